"""Random numbers of a construction: the order in which operators draw, and the state of the generator before each.

While a construction is recorded, nothing is drawn. After each operator that draws, its generator gets a unique state, a
mark. It identifies the position in the draws if the program saves the state and sets it again, on this generator or
another. When the session ends, the generator gets the state that the draws would have left. A state in between is
computed from the nearest known one; fills whose count of numbers is known are skipped, not run.

Invariant: an operator gets the state that it would get in eager, whatever is computed, and in whatever order.
Limits: generators of devices other than the CPU are advanced by running the operators that draw from them.
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

_STRIDE = 2_000_000  # about how many numbers are drawn between two states that are kept
Run = Callable[[Node], object]


@dataclass(eq=False)
class Stream:
    """A sequence of draws from one generator."""

    generator: torch.Generator
    start: State | Position
    entries: list[Node | int | None] = field(default_factory=list)  # what draws, later its count; None: unknown
    states: dict[int, State] = field(default_factory=dict)  # by index of an entry: the state before it


Position = tuple[Stream, int]


class Draws:
    """All streams of a recording."""

    def __init__(self) -> None:
        self._marks: Marks[Position] = Marks()
        self._touched: dict[torch.Generator, None] = {}
        self._at: dict[torch.Generator, Position] = {}  # where generators are, while values are computed
        self._before: dict[torch.Generator, State] = {}

    def note(self, node: Node, root: torch.nn.Module) -> None:
        """Note a new node, if it draws."""
        generator = _generator(node, root) if is_random(node) else None
        if generator is None:
            return
        stream, index = self._marks.of(generator) or (Stream(generator, generator.get_state()), 0)
        if stream.generator is not generator or index < len(stream.entries):  # the state of another, or an earlier one
            stream, index = Stream(generator, (stream, index)), 0
        stream.entries.append(node)
        node.meta["draw"] = stream, index
        self._marks.put(generator, (stream, index + 1))
        self._touched[generator] = None

    def state_of(self, generator: torch.Generator, run: Run) -> State:
        """The state that a generator would have now in eager."""
        position = self._marks.of(generator)
        return generator.get_state() if position is None else self.state(position, run).clone()

    def settle(self, run: Run) -> None:
        """End a session: its generators get the states that the draws would have left. ``run`` computes a node."""
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
        nearest = max((number for number in stream.states if number <= index), default=None)
        if nearest is None:
            nearest = 0
            stream.states[0] = self.state(stream.start, run) if isinstance(stream.start, tuple) else stream.start
        while nearest < index:
            nearest = self._step(stream, nearest, index, run)
        return stream.states[index]

    def _step(self, stream: Stream, start: int, index: int, run: Run) -> int:
        """Compute the next state to keep, from the one before entry ``start``. Returns its index, at most ``index``."""
        end, total, counts = start, 0, []
        while end < index and (count := _count(stream.entries[end])) is not None:
            counts.append(count)
            end += 1
            total += count
        if end == start:
            node = stream.entries[start]
            assert isinstance(node, Node)
            run(node)  # notes the state after it
            return start + 1
        if total < mersenne.JUMP_FROM:
            total, end = 0, start
            while total < _STRIDE and end < start + len(counts):
                total += counts[end - start]
                end += 1
        stream.states[end] = mersenne.skipped(stream.states[start], total)
        return end

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which values are computed; afterwards the generators have their former states."""
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
        """Compute a node from the state before its draw; only inside ``running``."""
        stream, index = node.meta["draw"]
        generator = stream.generator
        if self._at.get(generator) != (stream, index):
            self.seek(stream, index, run)
        out = compute()
        self._at[generator] = stream, index + 1
        return out

    def seek(self, stream: Stream, index: int, run: Run, skip: int = 0) -> None:
        """Set a generator to the state at a position, or ``skip`` numbers after it. Its position is then unknown."""
        generator = stream.generator
        self._before.setdefault(generator, generator.get_state())
        state = self.state((stream, index), run)
        generator.set_state(mersenne.skipped(state, skip) if skip else state)
        self._at.pop(generator, None)


def _count(entry: Node | int | None) -> int | None:
    """How many numbers an entry of a stream draws; None if unknown."""
    if not isinstance(entry, Node):
        return entry
    fill = fill_of(entry)
    return None if fill is None else fill.draws


def _generator(node: Node, root: torch.nn.Module) -> torch.Generator | None:
    """The generator that a node draws from; None on the meta device."""
    argument = node.kwargs.get("generator")
    if isinstance(argument, Node):
        own: torch.Generator = getattr(root, str(argument.target))
        return own
    device = node.kwargs.get("device")
    if not isinstance(device, torch.device):
        specs = [spec for argument in node.all_input_nodes if (spec := spec_of(argument)) is not None]
        device = specs[0].device if specs else torch.device("cpu")
    if device.type == "meta":
        return None
    return generator_of(device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu"), {})
