"""What values are at one moment, to be compared later: plain values themselves, containers by their content.

Takes values. Gives snapshots, which :func:`same` compares. Guarantees that two snapshots are the same only if a program
cannot distinguish the values. Limits: what sits behind other objects than modules, containers and objects with
attributes is compared by identity.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize.python_state.buffers import ARRAYS, held_by
from functionalize.python_state.decompose import Comparison, decomposition_of, items_of
from functionalize.python_state.slots import ObjectSource
from functionalize.python_state.traversal_rules import PLAIN

DEPTH = 4  # of containers and objects; tuples do not count


@dataclass(frozen=True, eq=False)
class _Identity:
    """A value that is only equal to itself."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


class _Any:
    """A value that does not count."""

    def __repr__(self) -> str:
        return "..."


_ANY = _Any()


class _Equal(_Identity):
    """A value that is what it is equal to, as text too: a date, a decimal number, a path."""


@dataclass(frozen=True, eq=False)
class _Array:
    """An array: what it held, and that as text."""

    kind: type
    held: Any
    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Content:
    """What a container, or an object with attributes, holds."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]

    def __repr__(self) -> str:
        if issubclass(self.kind, (list, tuple, set, frozenset, deque)):
            return f"{self.kind.__name__}({', '.join(map(repr, self.items))})"
        items = ", ".join(f"{key}: {item!r}" for key, item in zip(self.keys, self.items, strict=True))
        return f"{self.kind.__name__}({items})"


EMPTY = {kind: Content(kind, (), ()) for kind in (OrderedDict, dict, list)}  # what empty containers hold


def frozen(value: Any, memo: dict[int, Any], depth: int = DEPTH) -> Any:
    """What a value is, so that it can be compared later: containers by their content.

    ``memo``: of containers that were met before, by identity; they must outlive it.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in EMPTY and not value:  # the hooks of most modules
        return memo.get(id(value), EMPTY[kind])
    comparison = decomposition_of(kind).comparison
    if comparison is Comparison.VALUE:
        return value
    if comparison is Comparison.EQUALITY:
        return _Equal(value)
    content = memo.get(id(value)) if depth else None
    if content is None and (depth == 0 or comparison is Comparison.IDENTITY):
        return _Identity(None if issubclass(kind, torch.Tensor) else value)
    if content is None:
        memo[id(value)] = _Identity(value)  # what holds itself
        content = memo[id(value)] = _content(value, comparison, memo, inside(value, depth))
    return content


def _content(value: Any, comparison: Comparison, memo: dict[int, Any], depth: int) -> Any:
    kind = type(value)
    if comparison is Comparison.OTHER and not hasattr(value, "__dict__"):
        held = held_by(value, ARRAYS)
        if held is not None:
            return _Array(kind, held, repr(value))
        own: Any = kind.__hash__  # None of what cannot be hashed
        return _Identity(value) if own in (None, object.__hash__) else _Equal(value)
    if isinstance(value, frozenset) and _reaches_tensors(value, depth):  # which no walk finds there
        return _Identity(value)
    items = items_of(value)
    return Content(kind, items.keys, tuple(frozen(item, memo, depth) for item in items.values))


def _reaches_tensors(value: Any, depth: int) -> bool:
    """Whether a value is a tensor, or has one in its parts."""
    if isinstance(value, torch.Tensor):
        return True
    items = value if isinstance(value, frozenset) else items_of(value).values  # in any order
    others = (item for item in items if type(item) not in PLAIN)
    return depth >= 0 and any(_reaches_tensors(item, inside(value, depth)) for item in others)


def inside(value: Any, depth: int) -> int:
    """How deep one may go in a value's parts, where one may go so deep from here."""
    return depth if isinstance(value, tuple) else depth - 1


def holds_the_same(value: Any, content: Content) -> bool:
    """Whether a value holds what it did, as is told at once: an empty one, or a tuple of numbers and text."""
    return PLAIN.issuperset(map(type, value)) if type(value) is tuple else not (content.items or value)


def content_of(kind: type, held: Any) -> Any:
    """What an object of a class, one that held this, was to a program: as :func:`frozen` of it then."""
    items = list(held.values()) if isinstance(held, dict) else sorted(held, key=repr) if issubclass(kind, set) else held
    keys = tuple(held) if isinstance(held, dict) else ()
    if not held and kind in EMPTY:
        return EMPTY[kind]
    return Content(kind, keys, tuple(frozen(item, {}, DEPTH - 1) for item in items))


def without(content: Any, steps: tuple[int, ...]) -> Any:
    """What a tuple holds, but for the item to which these steps lead."""
    if not steps:
        return _ANY
    items = list(content.items)
    items[steps[0]] = without(items[steps[0]], steps[1:])
    return replace(content, items=tuple(items))


def same(now: Any, before: Any) -> bool:
    """Whether two values, both frozen, are the same to a program."""
    if now is before or before is _ANY:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, _Equal):
        return type(now.value) is type(before.value) and bool(now.value == before.value) and repr(now) == repr(before)
    if isinstance(now, _Array):
        return now.kind is before.kind and bool(now.held == before.held)
    if isinstance(now, (_Identity, ObjectSource)):
        return now.value is before.value
    if isinstance(now, Content):
        return (
            now.kind is before.kind
            and now.keys == before.keys
            and len(now.items) == len(before.items)
            and all(map(same, now.items, before.items))
        )
    return bool(now == before) if type(now) not in (float, complex) else repr(now) == repr(before)  # NaN, -0.0
