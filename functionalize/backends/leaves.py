"""What a program takes and returns, as nests of tuples, lists and dicts, which the pytrees of other libraries know.

Invariant: named fields stay under their names. Limits: of objects that are neither mappings nor dataclasses only what
leads to arrays is kept, and what refers to itself is cut off there.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from functionalize.errors import InputMismatchError, UnsupportedProgramError

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)  # which hold what no graph gives


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
    if type(tree) is dict:
        same = tree.keys() == like.keys()
        return {key: in_key_order(tree[key], like[key]) for key in like} if same else tree
    if type(tree) in (list, tuple) and len(tree) == len(like):
        return type(tree)(in_key_order(one, other) for one, other in zip(tree, like, strict=True))
    return tree


def no_array(label: str, given: Any) -> InputMismatchError:
    """The error of a call that passes something else where a backend's array belongs."""
    kind = type(given)
    return InputMismatchError(
        f"{label} is a {kind.__module__}.{kind.__qualname__}, and the function takes arrays of its backend",
        hint="convert it: to JAX's by functionalize.backends.jax.from_torch",
    )


class _Plain:
    def __init__(self, array: Callable[[torch.Tensor], Any]) -> None:
        self._array = array

    def of(self, tree: Any, within: tuple[int, ...]) -> Any:
        if isinstance(tree, (Leaf, torch.Tensor)):
            return tree.value if isinstance(tree, Leaf) else self._array(tree)
        if isinstance(tree, tuple):
            items = [self.of(item, within) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
        if isinstance(tree, list):
            return [self.of(item, within) for item in tree]
        if isinstance(tree, Mapping):
            return {key: self.of(item, within) for key, item in tree.items()}
        if dataclasses.is_dataclass(tree):
            return {one.name: self.of(getattr(tree, one.name), within) for one in dataclasses.fields(tree)}
        is_set = isinstance(tree, (set, frozenset))
        if isinstance(tree, _FUNCTIONS) or (is_set and _leads_to_arrays(list(tree), within)):
            raise UnsupportedProgramError(
                f"the program returns an object of class {type(tree).__name__}",
                why="a function of arrays returns arrays, numbers, and tuples, lists, dicts and objects of these",
                hint="return its tensors",
                at="what it returns",
            )
        if id(tree) in within or not hasattr(tree, "__dict__"):
            return tree
        deeper = (*within, id(tree))
        fields = {name: value for name, value in vars(tree).items() if _leads_to_arrays(value, deeper)}
        return {name: self.of(value, deeper) for name, value in fields.items()} if fields else tree


def _leads_to_arrays(tree: Any, within: tuple[int, ...]) -> bool:
    if isinstance(tree, (Leaf, torch.Tensor)):
        return True
    if id(tree) in within:
        return False
    if isinstance(tree, (list, tuple)):
        return any(_leads_to_arrays(item, within) for item in tree)
    items = tree if isinstance(tree, Mapping) else getattr(tree, "__dict__", {})
    return any(_leads_to_arrays(item, (*within, id(tree))) for item in items.values())
