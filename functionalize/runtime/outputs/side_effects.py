"""What a program leaves in the Python objects that it reaches, as data, and how a call does the same to its own.

Takes the walks over a call's objects, and what makes values from the results of its graph. Guarantees that an entry is
written where the program wrote it; tensors and objects stand in this data by their numbers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from functionalize.python_state.containers import ABSENT, MAPPINGS, Container, assign, entry, remove, write
from functionalize.python_state.reconstruct import Maker, ObjectRef, Walked
from functionalize.python_state.snapshot import frozen, same
from functionalize.python_state.traversal_rules import keys_of


@dataclass(frozen=True)
class ObjectInTuple(ObjectRef):
    """An object in a tuple: what it holds is compared by itself."""

    kind: type

    def __repr__(self) -> str:
        return f"<{self.kind.__name__}>"


@dataclass(frozen=True)
class ExpectedEntry:
    """What a program found at an entry that it changes."""

    value: Any  # of an object that was walked a reference
    content: Any  # frozen; None where a call must find the very object
    held: tuple[ObjectInTuple, ...] = ()  # of a tuple: the objects in it, which a call must find

    def found_by(self, states: Sequence[Walked]) -> Any:
        """What a call is to find, in its own objects."""
        reference = isinstance(self.value, ObjectRef)
        return states[self.value.state].objects[self.value.number].value if reference else self.value

    def is_found(self, now: Any, states: Sequence[Walked]) -> bool:
        """Whether a call finds the same."""
        expected = self.found_by(states)
        if now is expected:
            return True
        held = {id(states[item.state].objects[item.number].value): item for item in self.held}
        return self.content is not None and same(frozen(now, held), self.content)

    def shown(self, now: Any, states: Sequence[Walked], words: Callable[[Any], str]) -> tuple[str, str]:
        """What a call finds, and what it is to find; objects by their class, since tensors take long to write."""
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
    before: Mapping[Any, ExpectedEntry]  # entries that were no tensors: a call must find the same
    entries: Mapping[Any, Any]  # how they are made: of a mapping those that changed, of others all
    removed: tuple[Any, ...] = ()
    length: int | None = None  # how many entries it had, unless that does not matter
    adds: bool = False  # whether the entries come behind what is there
    order: tuple[Any, ...] = ()  # of a dict: its keys, in order, of which a call must find those that it has in order
    last: tuple[Any, ...] = ()  # of a dict: the keys that come last in the end, in order

    def is_in_order(self, container: Any) -> bool:
        """Whether a call's container has the keys that it has of the capture's in the order of these."""
        if not self.order:
            return True
        now, before = keys_of(container), keys_of(self.order)
        both = set(before).intersection(now)
        return [key for key in now if key in both] == [key for key in before if key in both]

    def container_in(self, states: Sequence[Walked]) -> Container:
        """A call's own container."""
        return next(islice(states[self.state].containers.values(), self.container, None)).container

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Do the same to a call's own objects."""
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
    """A step of a scheduler of learning rates, which a call does when all else is done."""

    number: int  # the scheduler's on the walk over the program's state
    args: tuple[Any, ...]  # how they are made
    kwargs: Mapping[str, Any]
    line: str  # where the program steps it

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Step a call's own scheduler."""
        scheduler = states[0].objects[self.number].value
        scheduler.step(*map(maker.make, self.args), **{name: maker.make(value) for name, value in self.kwargs.items()})


@dataclass(frozen=True)
class PrintedLine:
    """What a call prints when all else is done."""

    values: tuple[Any, ...]  # how they are made
    options: Mapping[str, Any]  # of `print`; the file is "stdout" or "stderr": what a call has by this name

    def apply(self, maker: Maker) -> None:
        """Print it."""
        print(*map(maker.make, self.values), **{**self.options, "file": getattr(sys, self.options["file"])})


@dataclass(frozen=True)
class LoggedRecord:
    """What a call logs when all else is done."""

    values: tuple[Any, ...]  # how the message and its arguments are made
    about: tuple[logging.Logger, logging.LogRecord]  # of the capture

    def apply(self, maker: Maker) -> None:
        """Log it, as of now."""
        logger, record = self.about
        message, *args = map(maker.make, self.values)
        where = record.pathname, record.lineno
        logger.handle(
            logger.makeRecord(record.name, record.levelno, *where, message, tuple(args), None, record.funcName)
        )


@dataclass(frozen=True)
class LeftInObjects:
    """What a program does to other objects than tensors, in the order in which a call does it."""

    side_effects: Sequence[SideEffect] = ()
    steps: Sequence[ScheduleStep] = ()
    lines: Sequence[PrintedLine | LoggedRecord] = ()

    def __bool__(self) -> bool:
        return bool(self.side_effects or self.steps or self.lines)

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Do the same to a call's own objects, and print."""
        for effect in self.side_effects:
            effect.apply(states, maker)
        for step in self.steps:
            step.apply(states, maker)
        for line in self.lines:
            line.apply(maker)
