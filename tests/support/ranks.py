"""Programs on real ranks: kept gloo processes run a program eager and captured, and compare what both leave.

In: a function of a rank, a world and a group that makes a :class:`Program`. Out: an :class:`Outcome` for each rank.
Guarantees: the parent ends what it has started, within a bound; after anything but right or refused, the next program
gets new processes. Limits: a program is a function of a module, since processes get it by its name.
"""

from __future__ import annotations

import copy
import datetime
import functools
import multiprocessing
import os
import socket
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from functionalize import capture, functionalize
from functionalize.errors import in_words

_SECONDS = 60.0  # for one program
_STARTING = 120.0  # until the processes have imported torch


@dataclass(frozen=True)
class Program:
    """What runs: ``arguments`` are those of a call, by its number."""

    function: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    calls: int = 3
    left: Callable[[], Any] = tuple  # what else is compared after a call
    backward: bool = False  # whether gradients of the result are taken, outside of the program


Makes = Callable[[int, int, Any], Program]  # of a rank, the size of the world, and its group
Make = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]


@dataclass(frozen=True)
class Outcome:
    """What came of a program on one rank: ``verdict`` is right, refused, wrong, error or lost."""

    verdict: str
    message: str = ""
    captured: int = 0  # how often the capture has communicated: as often on all ranks
    variants: int = 0  # of the captured program, after all calls


def _traced(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    traced: Callable[..., Any] = make_fx(functionalize(function), tracing_mode="fake")(*args)
    return traced


def _with_captured_forward(step: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """A step that runs its model captured, and all else in eager."""
    made = copy.copy(step)
    made.captured = capture(step.model, args)
    return made  # type: ignore[no-any-return]


SYSTEMS: dict[str, Make] = {
    "capture": lambda function, args: capture(function, args),
    "forward": _with_captured_forward,
    "make_fx": _traced,
    "dynamo": lambda function, args: torch.compile(function, backend="functionalize"),
}


class Ranks:
    """A kept set of processes, one for each rank."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def outcomes(self, program: Makes, system: str = "capture", seconds: float = _SECONDS) -> list[Outcome]:
        """What came of a program, by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((program, system))
        until = time.monotonic() + seconds
        results = [_received(pipe, until) for pipe in self._pipes]
        if {result.verdict for result in results} == {"right", "refused"} or len({r.captured for r in results}) > 1:
            texts = "; ".join(f"{r.verdict}, captured with {r.captured}: {r.message}" for r in results)
            results = [replace(result, verdict="wrong", message=f"the ranks differ: {texts}") for result in results]
        if any(result.verdict not in ("right", "refused") for result in results):
            self.end()
        return results

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, port, other), daemon=True)
            process.start()
            other.close()
            self._processes.append(process)
            self._pipes.append(own)
        until = time.monotonic() + _STARTING
        for pipe in self._pipes:
            _received(pipe, until)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []


@functools.cache
def kept(world: int) -> Ranks:
    """The processes that serve all tests of this one."""
    return Ranks(world)


def assert_right(program: Makes, world: int = 2, system: str = "capture") -> None:
    """Check that a program does on each rank what eager does."""
    for outcome in kept(world).outcomes(program, system):
        assert outcome.verdict == "right", outcome.message


def refusals(program: Makes, system: str = "capture") -> list[str]:
    """The messages of a program that is refused on each rank."""
    outcomes = kept(2).outcomes(program, system)
    for outcome in outcomes:
        assert outcome.verdict == "refused", outcome.message
    return [outcome.message for outcome in outcomes]


def _received(pipe: Any, until: float) -> Outcome:
    try:
        if pipe.poll(max(0.0, until - time.monotonic())):
            outcome: Outcome = pipe.recv()
            return outcome
    except EOFError:
        return Outcome("lost", "the process has ended")
    return Outcome("lost", "no answer in time")


def _serve(rank: int, world: int, port: int, pipe: Any) -> None:
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # type: ignore[union-attr]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address, seconds = f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=seconds)
    pipe.send(Outcome("right"))
    while True:
        program, system = pipe.recv()
        pipe.send(_outcome(program, SYSTEMS[system], rank, world))


def _outcome(program: Makes, make: Make, rank: int, world: int) -> Outcome:
    torch.compiler.reset()
    try:
        torch.manual_seed(0)
        eager = program(rank, world, dist.group.WORLD)
        torch.manual_seed(0)
        other = program(rank, world, dist.group.WORLD)
        before = _sequence_numbers()
        captured = make(other.function, copy.deepcopy(other.arguments(0)))
        moved = sum(_moved(before).values())
        differences = list(_differences(eager, other, captured))
    except Exception as error:
        return Outcome("refused", str(error)) if in_words(error) else Outcome("error", traceback.format_exc())
    return (
        Outcome("wrong", "; ".join(differences))
        if differences
        else Outcome("right", "", moved, len(getattr(captured, "variants", ())))
    )


def _differences(eager: Program, other: Program, captured: Callable[..., Any]) -> Iterator[str]:
    """In which a program that alternates with its captured form differs from an eager one."""
    for call in range(eager.calls):
        wanted = _call(eager, eager.function, call)
        left = _call(other, other.function if call % 2 else captured, call)
        if not _equal(left, wanted):
            yield f"call {call}: {left}, not {wanted}"


def _call(program: Program, function: Callable[..., Any], call: int) -> Any:
    """What a call returns, its arguments and the state afterwards, and how often each group has communicated."""
    args, before = program.arguments(call), _sequence_numbers()
    torch.manual_seed(call)
    try:
        returned = function(*args)
        if program.backward:
            returned.sum().backward()
    except Exception as error:
        if in_words(error):
            raise
        returned = type(error).__name__, str(error)
    return returned, args, torch.get_rng_state(), (_state(program.function), program.left()), _moved(before)


def _state(function: Any) -> Any:
    if not isinstance(function, nn.Module):
        return ()
    return function.state_dict(), [parameter.grad for parameter in function.parameters()]


def _sequence_numbers() -> Counter[tuple[int, ...]]:
    """How often groups have communicated, by their ranks: two modules may have groups of their own."""
    numbers: Counter[tuple[int, ...]] = Counter()
    groups: Any = dist.distributed_c10d._world.pg_names
    for group in groups:
        numbers[tuple(dist.get_process_group_ranks(group))] += group._get_sequence_number_for_group()
    return numbers


def _moved(before: Counter[tuple[int, ...]]) -> Counter[tuple[int, ...]]:
    return _sequence_numbers() - before


def _equal(left: Any, right: Any) -> bool:
    lefts, rights = pytree.tree_flatten(left), pytree.tree_flatten(right)
    return lefts[1] == rights[1] and all(map(_same, lefts[0], rights[0]))


def _same(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return left is right or bool(left == right)
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        return left.placements == right.placements and _same(left.to_local(), right.to_local())
    layout = left.dtype == right.dtype and left.size() == right.size() and left.stride() == right.stride()
    return layout and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
