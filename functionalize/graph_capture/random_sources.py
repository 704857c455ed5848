"""What a program does to sources of random numbers otherwise than by operators, and to arrays that are no tensors.

Operators that draw are nodes of the graph. A seed that is set, a number that Python or NumPy draws, or an element of an
array that is written, would be done once, by the capture.

Nothing is drawn while a program runs on fake tensors, so a state that is read and set again would leave no trace. What
functions of `torch.random` do to the default generator is therefore heard of, in the thread that captures. A generator
of the program's own goes on at each node that draws from it, as in eager: who finds it in another state has set it.

One that the program makes is made by each run of the graph, in the state in which the program first drew from it.

Invariant: after a capture the sources are as they were; the default generator is not touched. Limits: the generators
that the program's state and arguments hold, arrays among these, `random`, and NumPy where it is loaded. Of these two a
thread that draws meanwhile is not told apart; nor is `torch.default_generator.set_state`.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize._torch import FakeTensor
from functionalize._torch.dispatch import HigherOrderOperator, identity_of, kernels_alone
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.checkpointing import CheckpointRegions
from functionalize.graph_capture.inputs import TracedInput
from functionalize.runtime.opaque_values import ARRAYS, GENERATORS, access_to
from functionalize.runtime.random_state import anew, generator_of, is_random, source_of
from functionalize.transform.autograd_notes import Generators

_WHY = "the capture would do so once, and calls of the program not at all"
_SEEDS = "seeds torch's generator"
_SETS = "sets the state of a generator of torch's"
_HINT = (
    "seed before the program is called; draw by operators of torch; keep in tensors what is written; or pass what was "
    "drawn as an argument"
)


@dataclass(eq=False)
class _Generator:
    """A generator of torch's: its state before the program, and the one that it is to have by now."""

    generator: torch.Generator
    before: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> _Generator:
        state = generator.get_state()
        return cls(generator, state, state)

    @property
    def is_changed(self) -> bool:
        """Whether somebody else set it to another state, or drew from it."""
        with kernels_alone():
            return not torch.equal(self.generator.get_state(), self.expected)

    def go_on(self) -> None:
        """Draw, as an operator of the program does when a call runs it."""
        with kernels_alone():
            torch.rand(1, generator=self.generator, device=self.generator.device)
            self.expected = self.generator.get_state()


class TorchGenerators:
    """Generators of torch's, watched while a program runs that may only draw from them by operators."""

    def __init__(self, values: Iterable[Any], inputs: Iterable[TracedInput]) -> None:
        """``values``: what a program reaches; ``inputs``: what its graph takes, which are not held."""
        found = {identity_of(value): value for value in values if isinstance(value, torch.Generator)}
        found.pop(identity_of(torch.default_generator), None)
        self._watched = {identity: _Generator.of(generator) for identity, generator in found.items()}
        self._own, self._states = set(found), set[bytes]()  # states that the program may have read
        self.given: Generators = {}  # what the program passed to draw from
        self._passed = {one.name: one.value for one in inputs if isinstance(one.value, torch.Generator)}
        self._root, self._default = torch.nn.Module(), _Default()

    @contextlib.contextmanager
    def watched(self, root: torch.nn.Module, regions: CheckpointRegions) -> Iterator[None]:
        """While the program runs.

        ``root``: what the graph's attributes are found on; ``regions``: where one is computed again, torch sets states.

        Raises:
            UnsupportedProgramError: the program has set a generator to another state.
        """
        self._root, self._default = root, _Default(regions)
        functions, changed = vars(torch.random), False
        before = functions["default_generator"]
        functions["default_generator"] = self._default
        self._states.add(_bytes(torch.default_generator.get_state()))
        for one in self._watched.values():
            self._go_on(one)  # else a seed that the program sets again would not be seen
        try:
            yield
            changed = any(one.is_changed for one in self._watched.values())
        finally:
            functions["default_generator"] = before
            self._default = _Default()
            for one in self._watched.values():
                one.generator.set_state(one.before)
        if changed:
            refuse_drawn([_SETS])

    def _go_on(self, one: _Generator) -> None:
        one.go_on()
        self._states.add(_bytes(one.expected))

    def before(self, generator: torch.Generator) -> torch.Tensor:
        """The state before the program."""
        watched = self._watched.get(identity_of(generator))
        return generator.get_state() if watched is None else watched.before

    def note(self, node: Node) -> None:
        """A node was added to the graph just now.

        Raises:
            UnsupportedProgramError: it draws from a generator that the program has set to another state.
        """
        if not (isinstance(node.target, HigherOrderOperator) or is_random(node)):
            return
        source = source_of(node, self._root)
        if source is None or (isinstance(source, Node) and source.target is anew):
            return
        self._default.draws += 1
        generator = generator_of(str(source.target) if isinstance(source, Node) else source, self._passed)
        watched = self._watched.get(identity_of(generator))
        if watched is None and identity_of(generator) != identity_of(torch.default_generator):
            watched = self._watched[identity_of(generator)] = _Generator.of(generator)  # made inside, as it seems
            if _bytes(watched.before) in self._states:
                raise _read()
        if watched is None:
            return
        if watched.is_changed:
            refuse_drawn([_SETS])
        self._go_on(watched)

    def make_anew(self, graph: Graph) -> None:
        """Have each run of the graph make the generators that the program, which is over, has made.

        Raises:
            UnsupportedProgramError: the program draws from one that it did not make, and does not reach by a name.
        """
        made = dict[int, Node]()
        for node in graph.find_nodes(op="get_attr"):
            generator = getattr(self._root, str(node.target))
            key = identity_of(generator) if isinstance(generator, torch.Generator) else None
            if key is None or key not in self._watched or key in self._own:
                continue
            if key not in made:
                if self._is_kept(key):
                    raise UnsupportedProgramError(
                        "the program draws random numbers from a generator that it does not reach by a name, or keeps",
                        why="a call could not tell in which state the generator is to be then",
                        hint="pass it as an argument, or reach it by a variable or an attribute",
                    )
                with graph.inserting_after(node):
                    made[key] = graph.call_function(anew, (node,))
            node.replace_all_uses_with(made[key], delete_user_cb=lambda user: user.target is not anew)

    def _is_kept(self, key: int) -> bool:
        """Whether somebody may draw from a generator that the program has passed."""
        given = self.given.get(key)
        if given and any(one() is not None for one in given):
            gc.collect()
        return not given or any(one() is not None for one in given)

    def check_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise where one of some tensors, which the program got without operators, is the state of a generator.

        Raises:
            UnsupportedProgramError: one is.
        """
        for tensor in tensors:
            if type(tensor) is torch.Tensor and tensor.dtype == torch.uint8 and _bytes(tensor) in self._states:
                raise _read()


def _bytes(state: torch.Tensor) -> bytes:
    with kernels_alone():
        return state.numpy().tobytes()


def _read() -> UnsupportedProgramError:
    return UnsupportedProgramError(
        "the program reads the state of a generator of torch's",
        why="operators that are recorded draw nothing: the state is not what a call would find",
        hint="read it before or after the program is called",
    )


class _Default:
    """The default generator, as functions of `torch.random` know it while a program is captured."""

    def __init__(self, regions: CheckpointRegions | None = None) -> None:
        self._regions, self._thread = regions, threading.get_ident()
        self.draws = 0  # of the program so far, from any generator
        self._drawn_then = -1  # by when the state was read

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        """The state: the same however much the program has drawn."""
        if self._is_captured:
            self._drawn_then = self.draws
        return torch.default_generator.get_state()

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Refused, but where it sets what there is."""
        if not self._is_captured:
            return torch.default_generator.set_state(state)
        again = self._regions is not None and self._regions.runs_again
        drawn = self._drawn_then != self.draws
        if not again and (drawn or isinstance(state, FakeTensor) or _bytes(state) != _bytes(self.get_state())):
            refuse_drawn([_SETS])
        return torch.default_generator

    def manual_seed(self, seed: int) -> torch.Generator:
        """Refused."""
        if self._is_captured:
            refuse_drawn([_SEEDS])
        return torch.default_generator.manual_seed(seed)

    def seed(self) -> int:
        """Refused."""
        if self._is_captured:
            refuse_drawn([_SEEDS])
        return torch.default_generator.seed()

    def initial_seed(self) -> int:
        """Refused: a call may find another."""
        if self._is_captured:
            raise UnsupportedProgramError(
                "the program asks for the seed of torch's generator",
                why="it would be a constant of what is captured",
                hint="pass the seed as an argument",
            )
        return torch.default_generator.initial_seed()

    @property
    def _is_captured(self) -> bool:
        return threading.get_ident() == self._thread


@dataclass(frozen=True, eq=False)
class _Source:
    """One source of random numbers besides torch's, or an array."""

    name: str
    what: str  # a program does to it that changes its state
    read: Callable[[], Any]
    write: Callable[[Any], object]


class RandomSources:
    """The sources, as they are when this is made."""

    def __init__(self, values: Iterable[Any]) -> None:
        """``values``: what a program reaches, generators among it."""
        draws, found = "draws numbers from", list[_Source]()
        for value in {id(value): value for value in values}.values():
            for table, does in ((GENERATORS, draws), (ARRAYS, "writes to")):
                access = access_to(value, table)
                if access is not None:
                    read, write = partial(access.read, value), partial(access.write, value)
                    found.append(_Source(access.name, does, read, write))
        found.append(_Source("Python's `random`", draws, random.getstate, random.setstate))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            found.append(_Source("numpy.random", draws, numpy.get_state, numpy.set_state))
        self._before = [(source, source.read()) for source in found]

    def restore(self) -> list[str]:
        """Put back what has changed; what the program did, in words."""
        changed = [(source, before) for source, before in self._before if not _same(source.read(), before)]
        for source, before in changed:
            source.write(before)
        return [f"{source.what} {source.name}" for source, _ in changed]


def refuse_drawn(done: list[str]) -> None:
    """Raise if a program did something to a source of random numbers.

    Raises:
        UnsupportedProgramError: it did.
    """
    if done:
        raise UnsupportedProgramError(
            f"the program {done[0]}",
            why=_WHY,
            hint=_HINT,
        )


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and len(now) == 5:  # of NumPy: the second is an array
        return bool(now[2:] == before[2:] and (now[1] == before[1]).all())
    return bool(now == before)
