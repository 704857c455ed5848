"""The random numbers of a construction: in which order operators draw them, and in what state each finds its generator.

While a construction is recorded, nothing is drawn. A generator is given a state of its own after each operator that
draws, so that a state which the program saves and sets again, on this generator or another, is known for what it is.
When the session ends, the generator goes where the draws would have left it. A state in between is found from the
nearest one that is known, without drawing what is numbers alone.

Invariant: an operator finds the state that it would have found in eager, whatever is computed, and in which order.
Limits: generators of other devices than the CPU are moved on by running what draws from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from functionalize.deferred.random import mersenne
from functionalize.deferred.random.fills import fill_of
from functionalize.deferred.random.marks import Marks
from functionalize.deferred.random.mersenne import State
from functionalize.deferred.specs import spec_of
from functionalize.runtime.random_state import generator_of, is_random

_STRIDE = 2_000_000  # so many numbers are drawn from one state that is kept to the next
Run = Callable[[Node], object]


@dataclass(eq=False)
class Stream:
    """Draws from one generator, one after another."""

    generator: torch.Generator
    start: State | Position
    entries: list[Node | int | None] = field(default_factory=list)  # what draws, how much it draws; None: unknown
    states: dict[int, State] = field(default_factory=dict)  # before the entry of a number


Position = tuple[Stream, int]


class Draws:
    """All streams of a recording."""

    def __init__(self) -> None:
        self._marks: Marks[Position] = Marks()
        self._touched: dict[torch.Generator, None] = {}
        self._at: dict[torch.Generator, Position] = {}  # where generators are, while values are computed
        self._before: dict[torch.Generator, State] = {}

    def note(self, node: Node, root: torch.nn.Module) -> None:
        """A node was added to the graph."""
        generator = _generator(node, root) if is_random(node) else None
        if generator is None:
            return
        stream, index = self._marks.of(generator) or (Stream(generator, generator.get_state()), 0)
        if stream.generator is not generator or index < len(stream.entries):  # in the state of another, or an earlier
            stream, index = Stream(generator, (stream, index)), 0
        stream.entries.append(node)
        node.meta["draw"] = stream, index
        self._marks.put(generator, (stream, index + 1))
        self._touched[generator] = None

    def state_of(self, generator: torch.Generator, run: Run) -> State:
        """The state in which eager would have a generator now."""
        position = self._marks.of(generator)
        return generator.get_state() if position is None else self.state(position, run).clone()

    def settle(self, run: Run) -> None:
        """A session ends: its generators go where its draws would have left them. ``run``: computes a node."""
        marks, touched = self._marks, self._touched
        self._marks, self._touched = Marks(), {}
        for generator in touched:
            position = marks.of(generator)
            if position is not None:
                generator.set_state(self.state(position, run))
        for stream in dict.fromkeys(stream for stream, _ in marks):
            self.state((stream, len(stream.entries)), run)
            stream.entries[:] = [_count(entry) for entry in stream.entries]

    def state(self, position: Position, run: Run) -> State:
        """The state of a stream's generator before an entry."""
        stream, index = position
        known = max((number for number in stream.states if number <= index), default=None)
        if known is None:
            known = 0
            stream.states[0] = self.state(stream.start, run) if isinstance(stream.start, tuple) else stream.start
        while known < index:
            known = self._step(stream, known, index, run)
        return stream.states[index]

    def _step(self, stream: Stream, known: int, index: int, run: Run) -> int:
        """Go from one state that is known to the next that is worth being known."""
        ahead, total, counts = known, 0, []
        while ahead < index and (count := _count(stream.entries[ahead])) is not None:
            counts.append(count)
            ahead += 1
            total += count
        if ahead == known:
            node = stream.entries[known]
            assert isinstance(node, Node)
            run(node)  # leaves the state behind it
            return known + 1
        if total < mersenne.JUMP_FROM:
            total, ahead = 0, known
            while total < _STRIDE and ahead < known + len(counts):
                total += counts[ahead - known]
                ahead += 1
        stream.states[ahead] = mersenne.skipped(stream.states[known], total)
        return ahead

    @contextmanager
    def running(self) -> Iterator[None]:
        """While values are computed; afterwards the generators are where they were."""
        outer = self._at, self._before
        self._at, self._before = {}, {}
        try:
            yield
        finally:
            for generator, (stream, index) in self._at.items():
                stream.states[index] = generator.get_state()
            for generator, state in self._before.items():
                generator.set_state(state)
            self._at, self._before = outer

    def perform(self, node: Node, compute: Callable[[], Any], run: Run) -> Any:
        """Run what a node does in the state that it found; inside of ``running``."""
        stream, index = node.meta["draw"]
        generator = stream.generator
        if self._at.get(generator) != (stream, index):
            self.leave(stream, index, run)
        out = compute()
        self._at[generator] = stream, index + 1
        return out

    def leave(self, stream: Stream, index: int, run: Run, ahead: int = 0) -> None:
        """Have a generator go to a position, and so many draws further, which are then nobody's position."""
        generator = stream.generator
        self._before.setdefault(generator, generator.get_state())
        state = self.state((stream, index), run)
        generator.set_state(mersenne.skipped(state, ahead) if ahead else state)
        self._at.pop(generator, None)


def _count(entry: Node | int | None) -> int | None:
    """How many numbers an entry of a stream takes, where that is known."""
    if not isinstance(entry, Node):
        return entry
    fill = fill_of(entry)
    return None if fill is None else fill.draws


def _generator(node: Node, root: torch.nn.Module) -> torch.Generator | None:
    """What a node draws from; None on a device that holds no data."""
    given = node.kwargs.get("generator")
    if isinstance(given, Node):
        own: torch.Generator = getattr(root, str(given.target))
        return own
    device = node.kwargs.get("device")
    if not isinstance(device, torch.device):
        specs = [spec for argument in node.all_input_nodes if (spec := spec_of(argument)) is not None]
        device = specs[0].device if specs else torch.device("cpu")
    if device.type == "meta":
        return None
    return generator_of(device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu"), {})
