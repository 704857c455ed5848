"""What the ranks of a world say to one another: the volume of one rank's program, and whether those of all ranks agree.

In: captured programs of one rank each. Out: their collectives; in words, where ranks would wait for one another for
ever, and where one graph for all ranks, with the numbers of each, differs from eager. Guarantees: nothing is sent; each
rank is captured in a process of its own, in a world that exists only there. Limits: sends and receives, which need not
wait, are not a part of the order; values are compared where a program writes to nothing that outlives the call.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functionalize._torch.distributed.worlds import AllRanks
    from functionalize.cli.shared import Job
    from functionalize.runtime.calls.program import CapturedProgram
    from functionalize.verify import Volume

Item = TypeVar("Item")
Result = TypeVar("Result")
_PEERS = ("send", "receive")
_PRELOADED = (
    "functionalize.graph_capture.capture",
    "torch._dynamo",
    "torch.distributed.tensor",
)  # what captures import
_NUMBER = "#"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Issued:
    """A collective of one rank.

    ``group``: the name of its group in the rank's process; ``axis``: of the mesh, or what else the group is called;
    ``bytes``: None if unknown.
    """

    kind: str
    group: str
    axis: str
    ranks: tuple[int, ...]
    bytes: int | None
    line: str

    def __str__(self) -> str:
        size = "" if self.bytes is None else f" of {_size(self.bytes)}"
        return f"{self.kind}{size} over {self.axis} (ranks {_span(self.ranks)}) at {self.line}"


@dataclass(frozen=True)
class RankProgram:
    """What one rank issues, and its graph: as text without names of process groups and numbers, and the numbers."""

    issued: tuple[Issued, ...]
    code: str
    numbers: tuple[int | float, ...]


def volume_lines(rows: Iterable[Volume]) -> Iterator[str]:
    """The volume of a program's collectives, for people."""
    for row in rows:
        yield f"{row.count} x {row.kind} over {row.axis} ({row.ranks} ranks), {_size(row.bytes)}"


def captured_by_each(job: Job) -> list[RankProgram]:
    """The programs of all ranks, by rank."""
    assert job.world is not None
    return in_processes(_captured, [replace(job, rank=rank) for rank in range(job.world)])


def in_processes(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What a function returns for each item, each in a process of its own: torch keeps groups of ended worlds."""
    servers = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    context = multiprocessing.get_context("forkserver" if servers else "spawn")
    if servers:
        context.set_forkserver_preload([__name__, *_PRELOADED])
    workers = min(len(items), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        return list(pool.map(function, items))


def _captured(job: Job) -> RankProgram:
    with job.ranks():
        return rank_program(job.capture())


def rank_program(program: CapturedProgram) -> RankProgram:
    """What a program issues, and its graph."""
    from functionalize.verify import collectives, source_line

    issued = tuple(
        Issued(entry.kind, entry.group, entry.axis, entry.ranks, entry.bytes, source_line(entry.node) or "unknown")
        for entry in collectives(program.graph_module)
    )
    numbers, lines = list[int | float](), []
    axes = {entry.group: entry.axis for entry in issued}

    def without(value: Any) -> Any:
        if type(value) in (int, float):
            numbers.append(value)
            return _NUMBER
        return axes.get(value, value) if type(value) is str else value

    for node in program.graph.nodes:
        lines.append(f"{node.name} = {node.target}{_mapped(without, node.args)}{_mapped(without, node.kwargs)}")
    return RankProgram(issued, "\n".join(lines), tuple(numbers))


def _mapped(function: Callable[[Any], Any], args: Any) -> Any:
    """Arguments of a node, with what a function gives for each value in them."""
    from torch.fx.node import map_aggregate

    return map_aggregate(args, function)


def disagreement(orders: Sequence[Sequence[Issued]]) -> list[str]:
    """Where ranks would wait for ever: for each rank that waits, in what. Empty if all ranks reach their ends.

    Every rank runs until it meets a collective, and goes on when all members of its group have met the same one.
    """
    places = [0] * len(orders)
    order = [[entry for entry in issued if entry.kind not in _PEERS] for issued in orders]

    def now(rank: int) -> Issued | None:
        return order[rank][places[rank]] if places[rank] < len(order[rank]) else None

    going_on = True
    while going_on:
        going_on = False
        for rank in range(len(order)):
            entry = now(rank)
            if entry is not None and all(_meets(entry, now(other)) for other in entry.ranks):
                for other in entry.ranks:
                    places[other] += 1
                going_on = True
    if all(now(rank) is None for rank in range(len(order))):
        return []
    return [f"rank {rank}: {now(rank) or 'has ended'}" for rank in range(len(order))]


def _meets(entry: Issued, other: Issued | None) -> bool:
    return other is not None and (entry.kind, entry.ranks) == (other.kind, other.ranks)


def values_on_all_ranks(job: Job, program: CapturedProgram, programs: Sequence[RankProgram]) -> str | None:
    """How the results of a graph differ from eager's where each rank has other inputs; None if they do not.

    All ranks run in this process, one tensor operation after another, on tensors that hold the numbers of each rank.

    Raises:
        NotImplementedError: the program writes to state or arguments, whose values are one rank's; or the graphs of
            ranks differ, in more than numbers that eager finds as well where all ranks run in one process.
    """
    import torch

    from functionalize._torch import pytree
    from functionalize._torch.distributed.worlds import AllRanks

    assert job.world is not None
    others = [rank for rank, each in enumerate(programs) if each.code != programs[0].code]
    if others:
        raise NotImplementedError(f"the graphs of ranks {', '.join(map(str, others))} differ from that of rank 0")
    if program.mutations:
        raise NotImplementedError("it writes to its state or its arguments")
    inputs = [job.inputs(rank) for rank in range(job.world)]
    leaves = [pytree.tree_leaves(each) for each in inputs]
    first_args, first_kwargs = inputs[0]
    taken = program.flat_inputs(*first_args, **first_kwargs)
    world = AllRanks(job.world)
    columns = list(zip(*(each.numbers for each in programs), strict=True))
    differing = sum(map(_differ, columns))
    interpreter = _of_all_ranks(program, columns, world)
    with world.mode, torch.no_grad():
        merged = [
            world.tensor(column) if isinstance(column[0], torch.Tensor) else column[0]
            for column in zip(*leaves, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(merged, pytree.tree_structure(inputs[0]))
        wanted = pytree.tree_leaves(job.original(*args, **kwargs))
        of_all = dict(zip(map(id, leaves[0]), merged, strict=True))
        returned = interpreter.run(*(of_all.get(id(value), value) for value in taken))
    for number, (want, got) in enumerate(zip(wanted, returned, strict=True)):
        if isinstance(want, torch.Tensor):
            for rank in range(job.world):
                mine, theirs = world.on_rank(got, rank), world.on_rank(want, rank)
                if mine.shape != theirs.shape or not torch.allclose(mine, theirs, equal_nan=True):
                    if differing:
                        raise NotImplementedError(
                            f"{differing} numbers in the graphs differ by rank, and eager's do not"
                        )
                    return f"result {number} differs on rank {rank}"
    return None


def _of_all_ranks(program: CapturedProgram, columns: Sequence[Sequence[int | float]], world: AllRanks) -> Any:
    """Runs the graph of a program with the numbers of each rank; ``columns``: each number on all ranks."""
    from torch.fx import Interpreter

    of_ranks = iter(columns)

    def of_all(value: Any) -> Any:
        column = next(of_ranks) if type(value) in (int, float) else ()
        return world.number(column) if _differ(column) else value

    class OfAllRanks(Interpreter):
        def fetch_args_kwargs_from_env(self, n: Any) -> Any:
            args, kwargs = _mapped(of_all, n.args), _mapped(of_all, n.kwargs)
            return self.map_nodes_to_values(args, n), self.map_nodes_to_values(kwargs, n)

    return OfAllRanks(program.graph_module)


def _differ(column: Sequence[int | float]) -> bool:
    return len(set(map(repr, column))) > 1  # a NaN equals another one


def _size(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def _span(ranks: Sequence[int]) -> str:
    """``0 to 7``, or ``0, 8, 16``."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, ... {len(ranks)} in all"
