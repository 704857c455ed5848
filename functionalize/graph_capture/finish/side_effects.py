"""What a program left in the Python objects that it reached, as side effects that a call repeats on its own objects.

Takes the watched objects of a run that has ended, and the graph of objects that describes how values are made. Returns
one :class:`SideEffect` for each container whose content changed. Guarantees that it holds no tensor of the capture,
only numbers of results, inputs and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from functionalize._torch import SYMBOLS
from functionalize.graph_capture.inputs.watched_state import ChangedContainer, WatchedState
from functionalize.python_state.containers import ABSENT, MAPPINGS, copy_of, unchanged
from functionalize.python_state.decompose import entries_of
from functionalize.python_state.reconstruct import ObjectRef
from functionalize.python_state.refused_objects import refuse_weak_keys
from functionalize.python_state.snapshot import content_of, frozen, same
from functionalize.python_state.traversal_rules import key_behind
from functionalize.python_state.walk import StateWalk, is_module, joined
from functionalize.refusals.python_objects import CONTENTS_CHANGED
from functionalize.runtime.guards.python_guards import PythonGuards
from functionalize.runtime.outputs.side_effects import ExpectedEntry, ObjectInTuple, SideEffect


class Objects(Protocol):
    """Describes how the objects that a program leaves are made."""

    def analyze(
        self,
        walked: Mapping[int, tuple[int, int]],
        substitutes: Collection[int],
        roots: Sequence[tuple[Any, Collection[int]]],
    ) -> None:
        """Analyze what the program left in some containers, each with the identities of what these held before."""

    def reconstruction(self, value: Any, path: str) -> Any:
        """How a value is made."""


class SideEffectRecorder:
    """Compares what containers hold with what they held when the program began."""

    def __init__(
        self, states: Sequence[WatchedState], is_log: Callable[[Any], bool], walk_again: Callable[[], StateWalk]
    ) -> None:
        """``is_log``: whether the program only adds to a list.

        ``walk_again``: walks what the program can reach now.
        """
        self._states, self._is_log, self._walk_again = states, is_log, walk_again
        self._numbers = {
            id(item): (index, number)
            for index, state in enumerate(states)
            for number, item in enumerate(state.walk.seen)
        }
        self._substitutes = {id(slot.get()) for slot in states[0].walk.tensors}  # they live as long as the capture

    def side_effects(self, objects: Objects, returned: list[Any]) -> list[SideEffect]:
        """The containers whose content the program changed. ``returned``: a list that holds its return value."""
        changed = [self._lasting(self._states[0].changed, returned), *(state.changed for state in self._states[1:])]
        changes = [change for of_state in changed for change in of_state]
        roots = [(change.container, _identities(change.before)) for change in changes]
        objects.analyze(self._numbers, self._substitutes, [(returned, ()), *roots])
        effects = [
            self._effect(objects, index, change) for index, of_state in enumerate(changed) for change in of_state
        ]
        return [effect for effect in effects if effect is not None]

    def _lasting(self, changed: list[ChangedContainer], returned: list[Any]) -> list[ChangedContainer]:
        """The changes of state, without those of objects that the program replaced and can no longer reach."""
        replaced = list[Any]()
        for change in changed:
            now = set(map(id, _leaves(_items(copy_of(change.container)))))
            before = _leaves(_items(change.before))
            replaced += (item for item in before if id(item) in self._numbers and id(item) not in now)
        if not replaced:
            return changed
        gone, reached = StateWalk(), self._walk_again()
        for place in range(len(replaced)):
            gone.walk(replaced, place, "")
        reached.walk([returned], 0, "the result")
        modules = filter(is_module, reached.seen)
        empty = {id(held) for module in modules for held in module.__dict__.values()}  # dicts of hooks
        lost = gone.containers.keys() - reached.containers.keys() - empty
        return [change for change in changed if id(change.container) not in lost]

    def _expected_entry(self, value: Any, state: WatchedState) -> ExpectedEntry:
        """What was at an entry; an object is described by its content, unless this holds tensors or other objects."""
        numbers = self._numbers
        if id(value) not in numbers:
            inside = [item for item in _leaves([value]) if id(item) in numbers]
            held = {id(item): ObjectInTuple(*numbers[id(item)], type(item)) for item in inside}
            content = frozen(value, dict(held))
            shown = content if isinstance(value, tuple) else value  # a tuple may hold substitutes
            return ExpectedEntry(shown, content, tuple(held.values()))
        contents = [state.content(container) for container, _ in entries_of(value)]
        items = _leaves(item for content in contents if content is not None for item in _items(content))
        plain = len(contents) == 1 and not any(_is_input(item) or id(item) in numbers for item in items)
        content = content_of(type(value), contents[0]) if plain and contents[0] is not None else None
        return ExpectedEntry(ObjectRef(*numbers[id(value)]), content)

    def _effect(self, objects: Objects, index: int, change: ChangedContainer) -> SideEffect | None:
        """What the program did to one container; None where it holds equal values."""
        container, path, before = change.container, change.path, change.before

        def key_of(key: Any) -> Any:
            return objects.reconstruction(key, path) if isinstance(key, (torch.Tensor, str)) else key

        now, mapping = copy_of(container), isinstance(container, MAPPINGS)
        new, touched = (now, before) if mapping else (dict(enumerate(now)), dict(enumerate(before)))
        removed, adds = tuple[Any, ...](), False
        length: int | None = len(before)
        source = self._states[index].walk.containers.get(id(container))
        order = tuple(before) if source is not None and source.is_ordered else ()
        last = tuple(map(key_of, _moved(before, now))) if isinstance(container, dict) else ()
        if mapping:
            new = {key: item for key, item in now.items() if _differ(before.get(key, ABSENT), item)}
            removed = tuple(key for key in before if key not in now)
            touched = {key: before.get(key, ABSENT) for key in (*new, *removed)}
            if not touched and not last:
                return None
            refuse_weak_keys((*touched, *last), path)
        elif len(now) > len(before) and unchanged(now[: len(before)], before) and self._is_only_added_to(container):
            new, touched, length, adds = dict(enumerate(now[len(before) :])), {}, None, True
        state = self._states[index]
        plain = {key: item for key, item in touched.items() if not _is_input(item)}
        constants = {key_of(key): self._expected_entry(item, state) for key, item in plain.items()}
        entries = {key_of(key): objects.reconstruction(item, joined(path, key)) for key, item in new.items()}
        gone = tuple(map(key_of, removed))
        return SideEffect(index, change.number, path, constants, entries, gone, length, adds, order, last)

    def _is_only_added_to(self, container: Any) -> bool:
        """Whether nothing depends on a list's content: the program adds to it, and no argument holds it as well."""
        return sum(id(container) in state.walk.containers for state in self._states) == 1 and self._is_log(container)


def _moved(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The keys that a program has put last, in order; empty if all of them are new."""
    places, keys, last = {key: place for place, key in enumerate(before)}, list(now), -1
    for number, key in enumerate(keys):
        place = places.get(key, -1)
        if place <= last:
            return [] if places.keys().isdisjoint(keys[number:]) else keys[number:]
        last = place
    return []


def _is_input(item: Any) -> bool:
    """Whether an entry's old value, or what it refers to, is an input of the graph, which may be anything."""
    return isinstance(key_behind(item), torch.Tensor) or _has_symbol(item)


def _has_symbol(item: Any) -> bool:
    if isinstance(item, list):  # a list may hold itself
        return any(isinstance(inner, SYMBOLS) for inner in item)
    return isinstance(item, SYMBOLS) or (isinstance(item, tuple) and any(map(_has_symbol, item)))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The values, with the items of tuples for the tuples."""
    for value in values:
        if isinstance(value, tuple):
            yield from _leaves(value)
        else:
            yield value


def _identities(content: Any) -> set[int]:
    """The identities of a container's keys and items."""
    return set(map(id, _items(content)))


def _items(content: Any) -> list[Any]:
    """The keys and the items of a container's content."""
    return [*content, *content.values()] if isinstance(content, dict) else list(content)


def _differ(before: Any, after: Any) -> bool:
    """Whether an entry changed: it holds another object, unless this is an equal number or text."""
    if before is after:
        return False
    plain = (bool, int, float, str, bytes, complex)
    return not (isinstance(before, plain) and same(before, after))


def refuse_changes_inside(guards: PythonGuards) -> None:
    """Raise where a value of the program's state changed inside, and no call can write values of its class.

    Raises:
        UnsupportedProgramError: a value did.
    """
    changed = guards.changed_inside()
    if changed is not None:
        raise CONTENTS_CHANGED.error(path=changed.path, kind=type(changed.value).__name__)
