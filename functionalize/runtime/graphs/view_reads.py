"""Replaces copies of views in a graph by the views, where an operator may read a view: no copies, and eager's bits.

A kernel reads elements in the order of memory. The order of its additions, and whether it takes eight elements at a
time, shows in the last bit. So where eager reads a view, as in `silu(x[..., :n])`, a call reads the view too.

Invariant: each node keeps the value and the strides that it has in the graph. Limits: sizes must be integers, except
for matrix products and reductions; tensors that the graph writes in place keep their copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functionalize._torch import OpOverload, pytree
from functionalize._torch.elementwise import gives_strides_of
from functionalize.ops import traits
from functionalize.ops.variants import view_of

aten = torch.ops.aten

_UNKNOWN: Any = object()


def uncopied(op: Any) -> Any:
    """The operator that returns, as a view where possible, what this one copies; None if this one copies no view."""
    if op not in traits.READABLE_AS_VIEW:
        return None
    return aten.reshape.default if op is aten.view_copy.default else view_of(op)


def reads_views(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> bool:
    """Whether an operator may read views instead of their copies; ``made``: its result for the copies."""
    if op in traits.IGNORES_STRIDES:
        return True
    return isinstance(op, OpOverload) and gives_strides_of(op, args, kwargs, made)


def have_read_views(graph: Graph) -> None:
    """Have nodes that read copies of views read the views, as in eager, if their results keep their layouts."""
    views, layouts = dict[Node, Node](), ViewLayouts()
    written = {_root(node.args[0]) for node in graph.nodes if _writes(node.target)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        view = uncopied(node.target)
        if view is not None and _root(node) not in written:
            with graph.inserting_after(node):
                args, kwargs = map_arg((node.args, node.kwargs), lambda arg: views.get(arg, arg))
                views[node] = graph.call_function(view, args, kwargs)
                views[node].meta = node.meta
            layouts.as_view(node)
        elif not views.keys().isdisjoint(node.all_input_nodes) and layouts.read(node):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda arg: views.get(arg, arg))
    for pair in reversed(views.items()):
        for node in pair:
            if not node.users:
                graph.erase_node(node)


def _writes(op: Any) -> bool:
    return isinstance(op, OpOverload) and op._schema.is_mutable


def _root(node: Any) -> Any:
    """The tensor of which a node is a view, or a copy of a view."""
    while isinstance(node, Node) and (node.target in traits.READABLE_AS_VIEW or getattr(node.target, "is_view", False)):
        node = node.args[0]
    return node


class ViewLayouts:
    """The layouts of a graph's tensors; a copy of a view has the layout of the view."""

    def __init__(self) -> None:
        self._layouts: dict[Node, Any] = {}

    def as_view(self, node: Node) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), self._of)
        is_known = not any(leaf is _UNKNOWN for leaf in pytree.tree_leaves((args, kwargs)))
        self._layouts[node] = uncopied(node.target)(*args, **kwargs) if is_known else _UNKNOWN

    def read(self, node: Node) -> bool:
        """Whether a node may read views instead of their copies."""
        if node.target in traits.IGNORES_STRIDES:
            return True
        if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
            return False
        args, kwargs = map_arg((node.args, node.kwargs), self._of)
        is_known = not any(leaf is _UNKNOWN for leaf in pytree.tree_leaves((args, kwargs)))
        return is_known and reads_views(node.target, args, kwargs, node.meta.get("val"))

    def _of(self, node: Node) -> Any:
        if node not in self._layouts:
            value = node.meta.get("val")
            self._layouts[node] = _without_data(value) if isinstance(value, torch.Tensor) else _plain(value)
        return self._layouts[node]


def _without_data(value: torch.Tensor) -> Any:
    """A meta tensor of the same layout; ``_UNKNOWN`` if sizes or strides are not integers."""
    if value.layout is not torch.strided or not all(type(n) is int for n in (*value.size(), *value.stride())):
        return _UNKNOWN
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _plain(value: Any) -> Any:
    return value if type(value) in (bool, int, float) else _UNKNOWN
