"""What a program returns, as nests of tuples, lists and dicts, which the pytrees of other libraries know.

Invariant: named fields stay under their names. Limits: of objects that are neither mappings nor dataclasses only what
leads to arrays is kept, and what refers to itself is cut off there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


class Leaf:
    """An array among what a program returns."""

    def __init__(self, value: Any) -> None:
        self.value = value


def plain(tree: Any) -> Any:
    """A nest with the arrays of its leaves in place of these.

    Example:
        >>> plain([Leaf(1), {"two": Leaf(2)}, None])
        [1, {'two': 2}, None]
    """
    return _plain(tree, ())


def _plain(tree: Any, within: tuple[int, ...]) -> Any:
    if isinstance(tree, Leaf):
        return tree.value
    if isinstance(tree, tuple):
        items = [_plain(item, within) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [_plain(item, within) for item in tree]
    if isinstance(tree, Mapping):
        return {key: _plain(item, within) for key, item in tree.items()}
    if dataclasses.is_dataclass(tree):
        return {one.name: _plain(getattr(tree, one.name), within) for one in dataclasses.fields(tree)}
    if id(tree) in within or not hasattr(tree, "__dict__"):
        return tree
    deeper = (*within, id(tree))
    fields = {name: value for name, value in vars(tree).items() if _leads_to_arrays(value, deeper)}
    return {name: _plain(value, deeper) for name, value in fields.items()} if fields else tree


def _leads_to_arrays(tree: Any, within: tuple[int, ...]) -> bool:
    if isinstance(tree, Leaf):
        return True
    if id(tree) in within:
        return False
    if isinstance(tree, (list, tuple)):
        return any(_leads_to_arrays(item, within) for item in tree)
    items = tree if isinstance(tree, Mapping) else getattr(tree, "__dict__", {})
    return any(_leads_to_arrays(item, (*within, id(tree))) for item in items.values())
