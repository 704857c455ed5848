"""What a program left in the objects that it reached, as a recipe that a later call follows on its own objects.

Invariant: tensors stand in a recipe by their number among the program's results or inputs. Limits: an object that the
program made is copied attribute by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.runtime.state_walk import OPAQUE, Holder, State

ABSENT = object()  # an entry that was not there
Number = Callable[[torch.Tensor], Any]  # what stands for a tensor in a recipe


@dataclass(frozen=True)
class Build:
    """How to make a value: of a container or an object its type and its parts."""

    make: Callable[[Sequence[Any]], Any]
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Known:
    """An object that was there before, by its number on the walk."""

    state: int  # which walk: of the program's state, or of the arguments
    number: int


@dataclass(frozen=True)
class Result:
    """A tensor, by its number."""

    number: Any


@dataclass(frozen=True)
class Output:
    """A number that the graph gives, by its place among the graph's outputs."""

    place: int


@dataclass(frozen=True)
class Change:
    """Entries of one holder that a program leaves otherwise than it found them."""

    state: int
    holder: int  # its number on the walk
    path: str
    before: Mapping[Any, Any]  # entries that were no tensors: a call must find the same
    entries: Mapping[Any, Any] | None  # recipes, of a dict those that changed
    removed: tuple[Any, ...] = ()
    items: tuple[Any, ...] | None = None  # of a list all

    def apply(self, states: Sequence[State], tensor: Callable[[Any], Any]) -> None:
        """Follow the recipes on a call's own objects."""
        holder = list(states[self.state].holders.values())[self.holder][0]
        if self.items is not None:
            holder[:] = [follow(item, states, tensor) for item in self.items]
            return
        for key in self.removed:
            dict.__delitem__(holder, key)
        for key, recipe in (self.entries or {}).items():
            dict.__setitem__(holder, _key(key, tensor), follow(recipe, states, tensor))


def _key(key: Any, tensor: Callable[[Any], Any]) -> Any:
    return tensor(key.number) if isinstance(key, Result) else key


def follow(recipe: Any, states: Sequence[State], tensor: Callable[[Any], Any]) -> Any:
    """The value that a recipe describes."""
    if isinstance(recipe, Result):
        return tensor(recipe.number)
    if isinstance(recipe, Known):
        return states[recipe.state].seen[recipe.number]
    if isinstance(recipe, Build):
        return recipe.make([follow(part, states, tensor) for part in recipe.parts])
    return recipe


class Aftermath:
    """Compares what holders hold with what they held when they were lent to the program."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = states
        self._numbers = {
            id(item): Known(place, number)
            for place, state in enumerate(states)
            for number, item in enumerate(state.seen)
        }
        self._number: Number = lambda tensor: tensor

    def changes(self, number: Number) -> list[Change]:
        """The holders whose content the program changed."""
        self._number = number
        found: list[Change] = []
        for place, state in enumerate(self._states):
            for position, holder, path, before in state.changed:
                if isinstance(holder, dict):
                    found += self._of_dict(before, holder, place, position, path)
                else:
                    items = tuple(map(self._recipe, holder))
                    constants = {i: item for i, item in enumerate(before) if not isinstance(item, torch.Tensor)}
                    found.append(Change(place, position, path, constants, None, items=items))
        return found

    def _of_dict(self, before: Any, holder: Holder, place: int, position: int, path: str) -> Iterator[Change]:
        missing = object()
        new = {key: item for key, item in holder.items() if _differ(before.get(key, missing), item)}
        removed = tuple(key for key in before if key not in holder)
        if new or removed:
            touched = [*new, *removed]
            constants = {key: before.get(key, ABSENT) for key in touched}
            constants = {
                self._recipe_of_key(key): item for key, item in constants.items() if not isinstance(item, torch.Tensor)
            }
            entries = {self._recipe_of_key(key): self._recipe(item) for key, item in new.items()}
            yield Change(place, position, path, constants, entries, removed)

    def _recipe_of_key(self, key: Any) -> Any:
        return Result(self._number(key)) if isinstance(key, torch.Tensor) else key

    def _recipe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Result(self._number(value))
        known = self._numbers.get(id(value))
        if known is not None:
            return known
        if isinstance(value, OPAQUE) or callable(value):
            return value
        if isinstance(value, tuple):
            make = type(value)._make if hasattr(value, "_make") else type(value)
            return Build(make, tuple(map(self._recipe, value)))
        if isinstance(value, list):
            return Build(list, tuple(map(self._recipe, value)))
        if isinstance(value, dict):
            keys = tuple(value)
            return Build(lambda items: dict(zip(keys, items, strict=True)), tuple(map(self._recipe, value.values())))
        if hasattr(value, "__dict__"):
            kind, names = type(value), tuple(vars(value))
            return Build(lambda items: _object(kind, names, items), tuple(map(self._recipe, vars(value).values())))
        return value


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
