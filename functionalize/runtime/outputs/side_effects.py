"""The changes that a program makes to the Python objects that it reaches, as data that a call applies to its objects.

Takes the walks over a call's objects, and a :class:`Maker` of values from the results of its graph. Guarantees that an
entry is written where the program wrote it; tensors and objects are represented in this data by their numbers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from functionalize._torch.distributed.parallel import await_backward
from functionalize.python_state.containers import ABSENT, MAPPINGS, Container, assign, entry, remove, write
from functionalize.python_state.reconstruct import Maker, ObjectRef, Walked
from functionalize.python_state.snapshot import frozen, same
from functionalize.python_state.traversal_rules import keys_of


@dataclass(frozen=True)
class ObjectInTuple(ObjectRef):
    """An object in a tuple; other guards compare what it holds."""

    kind: type

    def __repr__(self) -> str:
        return f"<{self.kind.__name__}>"


@dataclass(frozen=True)
class ExpectedEntry:
    """The value of an entry before the program changed it."""

    value: Any  # a reference, for an object that was walked
    content: Any  # frozen; None if a call must find the very object
    held: tuple[ObjectInTuple, ...] = ()  # the objects in a tuple, which a call must find

    def found_by(self, states: Sequence[Walked]) -> Any:
        """The value that a call must find, among its own objects."""
        reference = isinstance(self.value, ObjectRef)
        return states[self.value.state].objects[self.value.number].value if reference else self.value

    def is_found(self, now: Any, states: Sequence[Walked]) -> bool:
        """Whether the value that a call has is the same."""
        expected = self.found_by(states)
        if now is expected:
            return True
        held = {id(states[item.state].objects[item.number].value): item for item in self.held}
        return self.content is not None and same(frozen(now, held), self.content)

    def shown(self, now: Any, states: Sequence[Walked], words: Callable[[Any], str]) -> tuple[str, str]:
        """In words, the value that a call has and the expected one; objects by class, as tensors take long to print."""
        expected = self.found_by(states)
        by_identity = self.content is None and isinstance(self.value, ObjectRef)
        if now is ABSENT or not (by_identity or self.held):
            return words(now), words(expected)
        return f"a {type(now).__name__}", f"another {type(expected).__name__ if by_identity else 'tuple'}"


@dataclass(frozen=True)
class SideEffect:
    """Entries of one container that a program leaves changed."""

    state: int
    container: int  # its number on the walk
    path: str
    before: Mapping[Any, ExpectedEntry]  # entries that were not tensors: a call must find the same
    entries: Mapping[Any, Any]  # how they are made: the changed ones of a mapping, all of other containers
    removed: tuple[Any, ...] = ()
    length: int | None = None  # how many entries it had; None if that does not matter
    adds: bool = False  # whether the entries are appended
    order: tuple[Any, ...] = ()  # the keys of a dict: those that a call's dict also has must be in this order
    last: tuple[Any, ...] = ()  # the keys that come last in a dict at the end, in order

    def is_in_order(self, container: Any) -> bool:
        """Whether the keys that a call's container shares with the capture's have the same order."""
        if not self.order:
            return True
        now, before = keys_of(container), keys_of(self.order)
        both = set(before).intersection(now)
        return [key for key in now if key in both] == [key for key in before if key in both]

    def container_in(self, states: Sequence[Walked]) -> Container:
        """A call's own container."""
        return next(islice(states[self.state].containers.values(), self.container, None)).container

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Make the same changes to a call's own objects."""
        container = self.container_in(states)
        if not isinstance(container, MAPPINGS):
            items = [maker.make(item) for item in self.entries.values()]
            assign(container, [*container, *items] if self.adds else items)
            return
        for key in map(maker.make, self.removed):
            remove(container, key)
        for key, item in self.entries.items():
            write(container, maker.make(key), maker.make(item))
        for key in map(maker.make, self.last):
            item = entry(container, key)
            remove(container, key)
            write(container, key, item)


@dataclass(frozen=True)
class ScheduleStep:
    """A step of a learning rate scheduler, which a call makes after everything else."""

    number: int  # of the scheduler, on the walk over the program's state
    args: tuple[Any, ...]  # how they are made
    kwargs: Mapping[str, Any]
    line: str  # where the program steps it

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Step a call's own scheduler."""
        scheduler = states[0].objects[self.number].value
        scheduler.step(*map(maker.make, self.args), **{name: maker.make(value) for name, value in self.kwargs.items()})


@dataclass(frozen=True)
class AwaitedBackward:
    """A forward of DistributedDataParallel whose backward comes after the call, where the module's own reducer acts."""

    module: ObjectRef
    outputs: tuple[Any, ...]  # how the tensors are made from which it finds unused parameters

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Prepare the reducer of a call's own module."""
        await_backward(maker.make(self.module), list(map(maker.make, self.outputs)))


@dataclass(frozen=True)
class PrintedLine:
    """What a call prints after everything else."""

    values: tuple[Any, ...]  # how they are made
    options: Mapping[str, Any]  # of `print`; the file is "stdout" or "stderr", which a call looks up in `sys`

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Print it."""
        print(*map(maker.make, self.values), **{**self.options, "file": getattr(sys, self.options["file"])})


@dataclass(frozen=True)
class LoggedRecord:
    """What a call logs after everything else."""

    values: tuple[Any, ...]  # how the message and its arguments are made
    about: tuple[logging.Logger, logging.LogRecord]  # those of the capture

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Log it, with the time of the call."""
        logger, record = self.about
        message, *args = map(maker.make, self.values)
        where = record.pathname, record.lineno
        logger.handle(
            logger.makeRecord(record.name, record.levelno, *where, message, tuple(args), None, record.funcName)
        )


@dataclass(frozen=True)
class LeftInObjects:
    """The changes to objects other than tensors, in the order in which a call makes them."""

    side_effects: Sequence[SideEffect] = ()
    steps: Sequence[ScheduleStep] = ()
    lines: Sequence[PrintedLine | LoggedRecord] = ()
    backwards: Sequence[AwaitedBackward] = ()

    def __bool__(self) -> bool:
        return bool(self.side_effects or self.steps or self.lines or self.backwards)

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Make the same changes to a call's own objects, then print."""
        for change in (*self.side_effects, *self.steps, *self.backwards, *self.lines):
            change.apply(states, maker)
