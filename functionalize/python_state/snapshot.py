"""Snapshots of values, to be compared later: plain values are their own, containers are compared by their content.

Takes values. Gives snapshots, which :func:`same` compares. Guarantees that two snapshots are the same only if a program
cannot distinguish the values. Limits: other objects than modules, containers and objects with attributes are compared
by equality or identity, and not by what they hold.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize.python_state.buffers import ARRAYS, held_by
from functionalize.python_state.decompose import Comparison, decomposition_of, items_of
from functionalize.python_state.slots import ObjectSource
from functionalize.python_state.traversal_rules import PLAIN, keeps_shards

DEPTH = 4  # of containers and objects; tuples do not count


@dataclass(frozen=True, eq=False)
class _Identity:
    """A value that is only equal to itself."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


class _Any:
    """In the place of a value that is not compared."""

    def __repr__(self) -> str:
        return "..."


_ANY = _Any()


class _Equal(_Identity):
    """A value that is compared by ``==`` and as text: a date, a decimal number, a path."""


@dataclass(frozen=True, eq=False)
class _Array:
    """The elements of an array, also as text."""

    kind: type
    held: Any
    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Content:
    """The content of a container, or of an object with attributes."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]

    def __repr__(self) -> str:
        if issubclass(self.kind, (list, tuple, set, frozenset, deque)):
            return f"{self.kind.__name__}({', '.join(map(repr, self.items))})"
        items = ", ".join(f"{key}: {item!r}" for key, item in zip(self.keys, self.items, strict=True))
        return f"{self.kind.__name__}({items})"


EMPTY = {cls: Content(cls, (), ()) for cls in (OrderedDict, dict, list)}  # of empty containers


def frozen(value: Any, memo: dict[int, Any], depth: int = DEPTH) -> Any:
    """The snapshot of a value, to be compared later: containers by their content.

    ``memo``: the snapshots of containers that were met before, by identity; the containers must outlive it.
    """
    cls = type(value)
    if cls in PLAIN:
        return value
    if cls in EMPTY and not value:  # the hooks of most modules
        return memo.get(id(value), EMPTY[cls])
    comparison = decomposition_of(cls).comparison
    if comparison is Comparison.VALUE:
        return value
    if comparison is Comparison.EQUALITY:
        return _Equal(value)
    content = memo.get(id(value)) if depth else None
    if content is None and (depth == 0 or comparison is Comparison.IDENTITY):
        return _Identity(None if issubclass(cls, torch.Tensor) else value)
    if content is None:
        memo[id(value)] = _Identity(value)  # for a value that contains itself
        content = memo[id(value)] = _content(value, comparison, memo, inside(value, depth))
    return content


def _content(value: Any, comparison: Comparison, memo: dict[int, Any], depth: int) -> Any:
    cls = type(value)
    if keeps_shards(cls):
        return _Identity(value)
    if comparison is Comparison.OTHER and not hasattr(value, "__dict__"):
        held = held_by(value, ARRAYS)
        if held is not None:
            return _Array(cls, held, repr(value))
        own: Any = cls.__hash__  # None if it cannot be hashed
        return _Identity(value) if own in (None, object.__hash__) else _Equal(value)
    if isinstance(value, frozenset) and _reaches_tensors(value, depth):  # walks do not enter frozensets
        return _Identity(value)
    items = items_of(value)
    return Content(cls, items.keys, tuple(frozen(item, memo, depth) for item in items.values))


def _reaches_tensors(value: Any, depth: int) -> bool:
    """Whether a value is a tensor, or contains one."""
    if isinstance(value, torch.Tensor):
        return True
    items = value if isinstance(value, frozenset) else items_of(value).values  # in any order
    others = (item for item in items if type(item) not in PLAIN)
    return depth >= 0 and any(_reaches_tensors(item, inside(value, depth)) for item in others)


def inside(value: Any, depth: int) -> int:
    """The remaining depth for a value's parts, from the remaining depth for the value."""
    return depth if isinstance(value, tuple) else depth - 1


def holds_the_same(value: Any, content: Content) -> bool:
    """Whether a value evidently holds what it did: it is empty still, or a tuple of plain values."""
    return PLAIN.issuperset(map(type, value)) if type(value) is tuple else not (content.items or value)


def content_of(cls: type, held: Any) -> Any:
    """The snapshot of an object of a class that held these values, as :func:`frozen` would have given."""
    items = list(held.values()) if isinstance(held, dict) else sorted(held, key=repr) if issubclass(cls, set) else held
    keys = tuple(held) if isinstance(held, dict) else ()
    if not held and cls in EMPTY:
        return EMPTY[cls]
    return Content(cls, keys, tuple(frozen(item, {}, DEPTH - 1) for item in items))


def without(content: Any, steps: tuple[int, ...]) -> Any:
    """The content of a tuple, where the item to which these steps lead is not compared."""
    if not steps:
        return _ANY
    items = list(content.items)
    items[steps[0]] = without(items[steps[0]], steps[1:])
    return replace(content, items=tuple(items))


def same(now: Any, before: Any) -> bool:
    """Whether two snapshots are of values that are the same to a program."""
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
