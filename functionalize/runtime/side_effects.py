"""What a program left in the objects that it reached, and how a later call does the same to its own objects.

Invariant: tensors stand in what is left by their number among the program's results or inputs. Limits: lists, and dicts
with the attributes of objects among them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import torch

from functionalize._torch import SYMBOLS
from functionalize.python_state.containers import (
    ABSENT,
    MAPPINGS,
    assign,
    copy_of,
    entry,
    remove,
    unchanged,
    write,
)
from functionalize.python_state.reconstruct import Maker, ObjectRef
from functionalize.python_state.refused_objects import refuse_weak_keys
from functionalize.python_state.snapshot import content_of, frozen, same
from functionalize.python_state.traversal_rules import key_behind, keys_of
from functionalize.python_state.walk import Changed, StateWalk, containers_of, is_module, joined


class Walked(Protocol):
    """Objects that were walked, in order."""

    @property
    def containers(self) -> Mapping[int, tuple[Any, str]]:
        """What their values sit in."""

    @property
    def seen(self) -> Sequence[Any]:
        """The objects."""


@dataclass(frozen=True)
class _Held(ObjectRef):
    """An object in a tuple: what it holds is compared by itself."""

    kind: type

    def __repr__(self) -> str:
        return f"<{self.kind.__name__}>"


@dataclass(frozen=True)
class Before:
    """What a program found at an entry that it changes."""

    value: Any  # of an object that was walked a reference
    content: Any  # frozen; None where a call must find the very object
    held: tuple[_Held, ...] = ()  # of a tuple: the objects in it, which a call must find

    def found_by(self, states: Sequence[Walked]) -> Any:
        """What a call is to find, in its own objects."""
        reference = isinstance(self.value, ObjectRef)
        return states[self.value.state].seen[self.value.number] if reference else self.value

    def is_found(self, now: Any, states: Sequence[Walked]) -> bool:
        """Whether a call finds the same."""
        expected = self.found_by(states)
        if now is expected:
            return True
        held = {id(states[one.state].seen[one.number]): one for one in self.held}
        return self.content is not None and same(frozen(now, held), self.content)

    def told(self, now: Any, states: Sequence[Walked], words: Callable[[Any], str]) -> tuple[str, str]:
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
    before: Mapping[Any, Before]  # entries that were no tensors: a call must find the same
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

    def apply(self, states: Sequence[Walked], maker: Maker) -> None:
        """Do the same to a call's own objects."""
        container = list(states[self.state].containers.values())[self.container][0]
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
        scheduler = states[0].seen[self.number]
        scheduler.step(*map(maker.make, self.args), **{name: maker.make(one) for name, one in self.kwargs.items()})


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


class Objects(Protocol):
    """What says how the objects that a program leaves are made."""

    def look(
        self,
        known: Mapping[int, tuple[int, int]],
        substitutes: Collection[int],
        roots: Sequence[tuple[Any, Collection[int]]],
    ) -> None:
        """Look at what it left in some containers, each with the identities of what these held before."""

    def recipe(self, value: Any, path: str) -> Any:
        """How one value is made."""


class SideEffectRecorder:
    """Compares what containers hold with what they held when the program began."""

    def __init__(
        self, states: Sequence[StateWalk], is_log: Callable[[Any], bool], walk_again: Callable[[], StateWalk]
    ) -> None:
        """``is_log``: whether the program does nothing with a list but to add to it.

        ``walk_again``: what the program can reach now.
        """
        self._states, self._is_log, self._walk_again = states, is_log, walk_again
        self._numbers = {
            id(item): (index, number) for index, state in enumerate(states) for number, item in enumerate(state.seen)
        }
        self._substitutes = {id(slot.get()) for slot in states[0].tensors}  # they live as long as the capture

    def side_effects(self, objects: Objects, returned: list[Any]) -> list[SideEffect]:
        """The containers whose content the program changed. ``returned``: a list of what it gives, alone."""
        changed = [self._lasting(self._states[0].changed, returned), *(one.changed for one in self._states[1:])]
        roots = [(container, _identities(before)) for found in changed for _, container, _, before in found]
        objects.look(self._numbers, self._substitutes, [(returned, ()), *roots])
        effects = [self._effect(objects, index, *one) for index, found in enumerate(changed) for one in found]
        return [effect for effect in effects if effect is not None]

    def _lasting(self, changed: list[Changed], returned: list[Any]) -> list[Changed]:
        """The changes of state but for those of objects that the program replaced, and cannot reach any more."""
        pairs = [(content, set(map(id, _leaves(_items(copy_of(container)))))) for _, container, _, content in changed]
        replaced = [
            item
            for content, now in pairs
            for item in _leaves(_items(content))
            if id(item) in self._numbers and id(item) not in now
        ]
        if not replaced:
            return changed
        gone, reached = StateWalk(), self._walk_again()
        for place in range(len(replaced)):
            gone.walk(replaced, place, "")
        reached.walk([returned], 0, "the result")
        empty = {id(held) for one in reached.seen if is_module(one) for held in one.__dict__.values()}  # dicts of hooks
        lost = gone.containers.keys() - reached.containers.keys() - empty
        return [one for one in changed if id(one[1]) not in lost]

    def _before(self, value: Any, state: StateWalk) -> Before:
        """What was at an entry; an object counts by what it held, if that is no tensors and no other objects."""
        known = self._numbers
        if id(value) not in known:
            held = {id(one): _Held(*known[id(one)], type(one)) for one in _leaves([value]) if id(one) in known}
            content = frozen(value, dict(held))
            shown = content if isinstance(value, tuple) else value  # a tuple may hold substitutes
            return Before(shown, content, tuple(held.values()))
        contents = [state.content(container) for container in map(itemgetter(0), containers_of(value))]
        items = _leaves(item for content in contents if content is not None for item in _items(content))
        plain = len(contents) == 1 and not any(_is_input(item) or id(item) in known for item in items)
        content = content_of(type(value), contents[0]) if plain and contents[0] is not None else None
        return Before(ObjectRef(*known[id(value)]), content)

    def _effect(
        self, objects: Objects, index: int, position: int, container: Any, path: str, before: Any
    ) -> SideEffect | None:
        """What the program did to one container; None where that holds equal values."""

        def key_of(key: Any) -> Any:
            return objects.recipe(key, path) if isinstance(key, (torch.Tensor, str)) else key

        now, mapping = copy_of(container), isinstance(container, MAPPINGS)
        new, touched = (now, before) if mapping else (dict(enumerate(now)), dict(enumerate(before)))
        removed, adds = tuple[Any, ...](), False
        length: int | None = len(before)
        order = tuple(before) if id(container) in self._states[index].ordered else ()
        last = tuple(map(key_of, _moved(before, now))) if isinstance(container, dict) else ()
        if mapping:
            new = {key: item for key, item in now.items() if _differ(before.get(key, ABSENT), item)}
            removed = tuple(key for key in before if key not in now)
            touched = {key: before.get(key, ABSENT) for key in (*new, *removed)}
            if not touched and not last:
                return None
            refuse_weak_keys((*touched, *last), path)
        elif len(now) > len(before) and unchanged(now[: len(before)], before) and self._is_apart(container):
            new, touched, length, adds = dict(enumerate(now[len(before) :])), {}, None, True
        state = self._states[index]
        plain = {key: item for key, item in touched.items() if not _is_input(item)}
        constants = {key_of(key): self._before(item, state) for key, item in plain.items()}
        entries = {key_of(key): objects.recipe(item, joined(path, key)) for key, item in new.items()}
        gone = tuple(map(key_of, removed))
        return SideEffect(index, position, path, constants, entries, gone, length, adds, order, last)

    def _is_apart(self, container: Any) -> bool:
        """Whether what is in a list matters to nothing: the program adds to it, and no argument holds it as well."""
        return sum(id(container) in state.containers for state in self._states) == 1 and self._is_log(container)


def _moved(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The keys that a program has put last, in order, if there are others than new ones among them."""
    places, keys, last = {key: place for place, key in enumerate(before)}, list(now), -1
    for number, key in enumerate(keys):
        place = places.get(key, -1)
        if place <= last:
            return [] if places.keys().isdisjoint(keys[number:]) else keys[number:]
        last = place
    return []


def _is_input(item: Any) -> bool:
    """Whether the graph takes what was there before, which may be anything, or it refers to what the graph takes."""
    return isinstance(key_behind(item), torch.Tensor) or _has_symbol(item)


def _has_symbol(item: Any) -> bool:
    if isinstance(item, list):  # which may hold itself
        return any(isinstance(one, SYMBOLS) for one in item)
    return isinstance(item, SYMBOLS) or (isinstance(item, tuple) and any(map(_has_symbol, item)))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Values, of tuples their items."""
    for value in values:
        if isinstance(value, tuple):
            yield from _leaves(value)
        else:
            yield value


def _identities(content: Any) -> set[int]:
    """Of what a container held."""
    return set(map(id, _items(content)))


def _items(content: Any) -> list[Any]:
    """The keys and the items that a container held."""
    return [*content, *content.values()] if isinstance(content, dict) else list(content)


def _differ(before: Any, after: Any) -> bool:
    """Whether an entry holds another thing: another object, unless it is an equal number or text."""
    if before is after:
        return False
    plain = (bool, int, float, str, bytes, complex)
    return not (isinstance(before, plain) and same(before, after))
