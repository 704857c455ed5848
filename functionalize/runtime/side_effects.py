"""What a program left in the objects that it reached, and how a later call does the same to its own objects.

Invariant: tensors stand in a reconstruction by their number among the program's results or inputs. Limits: an object
that the program made is copied attribute by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from functionalize.runtime.containers import ABSENT, MAPPINGS, assign, copy_of, remove, unchanged, write
from functionalize.runtime.state_walk import OPAQUE, StateWalk

Number = Callable[[torch.Tensor], Any]  # what stands for a tensor in a reconstruction


class Walked(Protocol):
    """Objects that were walked, in order."""

    @property
    def containers(self) -> Mapping[int, tuple[Any, str]]:
        """What their values sit in."""

    @property
    def seen(self) -> Sequence[Any]:
        """The objects."""


@dataclass(frozen=True)
class Reconstruction:
    """How to make a value: of a container or an object its type and its parts."""

    make: Callable[[Sequence[Any]], Any]
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class ObjectRef:
    """An object that was there before, by its number on the walk."""

    state: int  # which walk: of the program's state, or of the arguments
    number: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor, by its number."""

    number: Any


@dataclass(frozen=True)
class GraphNumber:
    """A number that the graph gives, by its index among the graph's outputs."""

    position: int


@dataclass(frozen=True)
class SideEffect:
    """Entries of one container that a program leaves otherwise than it found them."""

    state: int
    container: int  # its number on the walk
    path: str
    before: Mapping[Any, Any]  # entries that were no tensors: a call must find the same
    entries: Mapping[Any, Any]  # reconstructions: of a mapping those that changed, of others all
    removed: tuple[Any, ...] = ()
    length: int | None = None  # of others than mappings: how many items it had, unless that does not matter
    adds: bool = False  # whether the entries come behind what is there

    def apply(self, states: Sequence[Walked], tensor: Callable[[Any], Any]) -> None:
        """Follow the reconstructions on a call's own objects."""
        container = list(states[self.state].containers.values())[self.container][0]
        if not isinstance(container, MAPPINGS):
            items = [reconstruct(item, states, tensor) for item in self.entries.values()]
            assign(container, [*container, *items] if self.adds else items)
            return
        for key in self.removed:
            remove(container, key)
        for key, item in self.entries.items():
            write(container, reconstruct(key, states, tensor), reconstruct(item, states, tensor))


def reconstruct(reconstruction: Any, states: Sequence[Walked], tensor: Callable[[Any], Any]) -> Any:
    """The value that a reconstruction describes."""
    if isinstance(reconstruction, TensorRef):
        return tensor(reconstruction.number)
    if isinstance(reconstruction, ObjectRef):
        return states[reconstruction.state].seen[reconstruction.number]
    if isinstance(reconstruction, Reconstruction):
        return reconstruction.make([reconstruct(part, states, tensor) for part in reconstruction.parts])
    return reconstruction


class SideEffectRecorder:
    """Compares what containers hold with what they held when the program began."""

    def __init__(self, states: Sequence[StateWalk], is_log: Callable[[Any], bool]) -> None:
        """``is_log``: whether the program does nothing with a list but to add to it."""
        self._states, self._is_log = states, is_log
        self._numbers = {
            id(item): (index, number) for index, state in enumerate(states) for number, item in enumerate(state.seen)
        }
        self._number: Number = lambda tensor: tensor

    def side_effects(self, number: Number) -> list[SideEffect]:
        """The containers whose content the program changed."""
        self._number = number
        found: list[SideEffect] = []
        for index, state in enumerate(self._states):
            for position, container, path, before in state.changed:
                compare = self._of_mapping if isinstance(container, MAPPINGS) else self._of_items
                effect = compare(container, before, (index, position, path))
                if effect is not None:
                    found.append(effect)
        return found

    def _of_mapping(self, container: Any, before: Any, where: tuple[int, int, str]) -> SideEffect | None:
        """What changed in a dict, or among the attributes of an object, by keys."""
        now = copy_of(container)
        new = {key: item for key, item in now.items() if _differ(before.get(key, ABSENT), item)}
        removed = tuple(key for key in before if key not in now)
        touched = {key: before.get(key, ABSENT) for key in (*new, *removed)}
        return SideEffect(*where, self._constants(touched), self._entries(new), removed) if touched else None

    def _of_items(self, container: Any, before: Any, where: tuple[int, int, str]) -> SideEffect | None:
        """What a list, or anything else that has no keys, holds now: all of it, but for one that was only added to."""
        now, count = list(container), len(before)
        if len(now) > count and unchanged(now[:count], before) and self._is_log(container):
            return SideEffect(*where, {}, self._entries(dict(enumerate(now[count:]))), adds=True)
        items, touched = dict(enumerate(now)), dict(enumerate(before))
        return SideEffect(*where, self._constants(touched), self._entries(items), length=count)

    def _constants(self, touched: Mapping[Any, Any]) -> dict[Any, Any]:
        """What was there before and is compared by its value."""
        return {self._key(key): value for key, value in touched.items() if not isinstance(value, torch.Tensor)}

    def _entries(self, new: Mapping[Any, Any]) -> dict[Any, Any]:
        return {self._key(key): self._reconstruction(item) for key, item in new.items()}

    def _key(self, key: Any) -> Any:
        return TensorRef(self._number(key)) if isinstance(key, torch.Tensor) else key

    def _reconstruction(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorRef(self._number(value))
        known = self._numbers.get(id(value))
        if known is not None:
            return ObjectRef(*known)
        if isinstance(value, OPAQUE) or callable(value):
            return value
        if isinstance(value, tuple):
            return self._made(type(value)._make if hasattr(value, "_make") else type(value), value)
        if isinstance(value, list):
            return self._made(list, value)
        if isinstance(value, dict):
            keys = tuple(value)
            return self._made(lambda items: dict(zip(keys, items, strict=True)), value.values())
        if hasattr(value, "__dict__"):
            kind, names = type(value), tuple(vars(value))
            return self._made(lambda items: _object(kind, names, items), vars(value).values())
        return value

    def _made(self, make: Callable[[Sequence[Any]], Any], parts: Iterable[Any]) -> Reconstruction:
        return Reconstruction(make, tuple(map(self._reconstruction, parts)))


def _differ(before: Any, after: Any) -> bool:
    """Whether an entry holds another thing: another object, unless it is an equal number or text."""
    if before is after:
        return False
    plain = (bool, int, float, str, bytes, complex)
    return not (type(before) is type(after) and isinstance(before, plain) and before == after)


def _object(kind: Any, names: Sequence[str], items: Sequence[Any]) -> Any:
    made = kind.__new__(kind)
    made.__dict__.update(zip(names, items, strict=True))
    return made
