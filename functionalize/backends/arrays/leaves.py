"""What a program takes and returns, as nests of tuples, lists and dicts, which the pytrees of other libraries know.

Invariant: named fields stay under their names, and entries in their order; no :class:`Leaf` is given away. Limits: of
objects that are neither mappings nor dataclasses only what leads to arrays is kept, and what refers to itself is cut
off there.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functionalize.errors import InputMismatchError, UnsupportedProgramError
from functionalize.python_state.containers import SlotsOf
from functionalize.python_state.decompose import attributes_of, decompose, slots_of
from functionalize.python_state.walk import LEAF_TYPES

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)  # which hold what no graph gives
_CONTAINERS = (list, tuple, deque, Mapping)
_VALUES = LEAF_TYPES - {types.FunctionType}


class Leaf:
    """An array among what a program returns."""

    def __init__(self, value: Any) -> None:
        self.value = value


def plain(tree: Any, array: Callable[[torch.Tensor], Any]) -> Any:
    """A nest with the arrays of its leaves in place of these, and of tensors that objects of the caller hold.

    Example:
        >>> plain([Leaf(1), {"two": Leaf(2)}, None, torch.tensor(3)], torch.Tensor.item)
        [1, {'two': 2}, None, 3]
    """
    return _Plain(array).of(tree, ())


def in_key_order(tree: Any, like: Any) -> Any:
    """A nest whose dicts have their keys in the order of another: libraries sort them, to whom they have no order.

    Example:
        >>> in_key_order([{"a": 1, "b": 2}], [{"b": None, "a": None}])
        [{'b': 2, 'a': 1}]
    """
    if type(tree) is not type(like):
        return tree
    if type(tree) in (dict, defaultdict):
        if tree.keys() != like.keys():
            return tree
        entries = {key: in_key_order(tree[key], like[key]) for key in like}
        return defaultdict(tree.default_factory, entries) if type(tree) is defaultdict else entries
    if isinstance(tree, (list, tuple)) and len(tree) == len(like):
        items = [in_key_order(item, other) for item, other in zip(tree, like, strict=True)]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items) if type(tree) in (list, tuple) else tree
    return tree


def with_ordered(tree: Any, where: Callable[[list[Any]], bool]) -> Any:
    """A nest with an OrderedDict for each dict of some keys: libraries that sort a dict take that in its own order.

    Example:
        >>> made = with_ordered([{"b": 1, 2: 0}, {"a": 1}], lambda keys: not is_sortable(keys))
        >>> [type(part).__name__ for part in made]
        ['OrderedDict', 'dict']
    """
    if isinstance(tree, dict):
        kind = OrderedDict if where(list(tree)) else type(tree)
        return kind((key, with_ordered(item, where)) for key, item in tree.items())
    if isinstance(tree, (list, tuple)):
        items = [with_ordered(item, where) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def is_sortable(keys: list[Any]) -> bool:
    """Whether keys have an order of their own."""
    try:
        sorted(keys)
    except TypeError:
        return False
    return True


def no_array(label: str, given: Any) -> InputMismatchError:
    """The error of a call that passes something else where a backend's array belongs."""
    kind = type(given)
    return InputMismatchError(
        f"{label} is a {kind.__module__}.{kind.__qualname__}, but the function takes arrays of its backend",
        hint="convert it: to JAX with functionalize.backends.jax.from_torch",
    )


class _Plain:
    def __init__(self, array: Callable[[torch.Tensor], Any]) -> None:
        self._array = array

    def of(self, tree: Any, within: tuple[int, ...]) -> Any:
        if isinstance(tree, (Leaf, torch.Tensor)):
            return tree.value if isinstance(tree, Leaf) else self._array(tree)
        if type(tree) in _VALUES:
            return tree
        deeper = (*within, id(tree))
        return (self._container if isinstance(tree, _CONTAINERS) else self._object)(tree, within, deeper)

    def _container(self, tree: Any, within: tuple[int, ...], deeper: tuple[int, ...]) -> Any:
        if id(tree) in within:
            raise _refused(tree, "it contains itself, but nested results must be finite")
        if isinstance(tree, tuple):
            items = [self.of(item, deeper) for item in tuple.__iter__(tree)]
            return _tuple_like(tree, items)
        if isinstance(tree, (list, deque)):
            return [self.of(item, deeper) for item in tree]
        if any(_leads_to_arrays(key, deeper) for key in tree):
            raise _refused(tree, "its keys are arrays, which cannot be hashed")
        entries = {key: self.of(item, deeper) for key, item in tree.items()}
        return OrderedDict(entries) if type(tree) is OrderedDict else entries

    def _object(self, tree: Any, within: tuple[int, ...], deeper: tuple[int, ...]) -> Any:
        if isinstance(tree, _FUNCTIONS) or (isinstance(tree, (set, frozenset)) and _leads_to_arrays(tree, within)):
            raise _refused(tree, _GIVES)
        attributes = _attributes(tree)
        if not (dataclasses.is_dataclass(tree) and not isinstance(tree, type)):
            attributes = {name: value for name, value in attributes.items() if _leads_to_arrays(value, deeper)}
        if attributes and id(tree) not in within:
            return {name: self.of(value, deeper) for name, value in attributes.items()}
        if _leads_to_arrays(tree, within):
            raise _refused(tree, _GIVES)
        return tree


_GIVES = "a function of arrays returns arrays, numbers, and tuples, lists, dicts and objects of them"


def _refused(tree: Any, why: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"the program returns an object of class {type(tree).__name__}",
        why=why,
        hint="return its tensors",
        at="what it returns",
    )


def _tuple_like(tree: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of items; a named one where its class is made of these alone, else a dict of its fields."""
    kind: Any = type(tree)
    fields = getattr(kind, "_fields", None)
    if fields is None:
        return tuple(items)
    declared = next(base for base in kind.__mro__ if "_fields" in vars(base))
    return kind(*items) if kind.__new__ is declared.__new__ else dict(zip(fields, items, strict=True))


def _attributes(tree: Any) -> dict[str, Any]:
    """What an object holds by name: the fields of a dataclass in their order, else all, slots too."""
    held = {**(attributes_of(tree) or {}), **SlotsOf(tree, slots_of(type(tree)))}
    if dataclasses.is_dataclass(tree):
        return {field.name: held[field.name] for field in dataclasses.fields(tree) if field.name in held}
    return held


def _leads_to_arrays(tree: Any, within: tuple[int, ...]) -> bool:
    if isinstance(tree, (Leaf, torch.Tensor)):
        return True
    if type(tree) in _VALUES or isinstance(tree, type) or id(tree) in within:
        return False
    parts = decompose(tree)  # with what a built-in class keeps: a slice, an iterator
    deeper = (*within, id(tree))
    return parts is not None and any(_leads_to_arrays(part.value, deeper) for part in (*parts.first, *parts.rest))
