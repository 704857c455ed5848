"""Traced graphs as short text, and what two graphs have in common.

Limits: one graph without subgraphs; where a tensor is allocated is not printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from functionalize import functionalize
from functionalize.ops import tables
from functionalize.verify.observation import clone_inputs

MODES = ("real", "fake", "symbolic")
REMOVES = ("mutations", "mutations_and_views")
_PLACEMENT = frozenset({"layout", "device", "pin_memory"})


def trace(
    func: Callable[..., Any],
    *inputs: Any,
    remove: str = "mutations",
    mode: Any = "fake",
    transform: Callable[..., Callable[..., Any]] = functionalize,
) -> GraphModule:
    """The graph of a functionalized function, less its dead nodes."""
    graph = make_fx(transform(func, remove=remove), tracing_mode=mode)(*clone_inputs(inputs))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def render(graph: GraphModule) -> str:
    """One line for each operator of a graph, and one for what it returns."""
    return "\n".join(_lines(graph))


def _lines(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        args = [_text(arg) for arg in _given(node)]
        if node.op == "output":
            yield f"return {args[0]}"
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            yield f"{node.name} = {args[0]}[{args[1]}]"
        elif node.op == "call_function":
            args += [f"{name}={_text(arg)}" for name, arg in node.kwargs.items() if name not in _PLACEMENT]
            yield f"{node.name} = {operator(node)}({', '.join(args)})"
        elif node.op == "get_attr":
            yield f"{node.name} = self.{node.target}"


def _given(node: Node) -> list[Any]:
    """A node's arguments less those at the end that only say the default."""
    args = list(node.args)
    if isinstance(node.target, torch._ops.OpOverload):
        declared = node.target._schema.arguments
        while args and declared[len(args) - 1].has_default_value():
            default = declared[len(args) - 1].default_value
            if type(default) is not type(args[-1]) or default != args[-1]:
                break
            args.pop()
    return args


def _text(arg: Any) -> str:
    return str(map_arg(arg, lambda node: node))


def operator(node: Node) -> str:
    """A node's operator, as `add.Tensor`."""
    return str(node.target).removeprefix("aten.")


def operators(graph: GraphModule) -> list[str]:
    """The operators of a graph, in order."""
    return [operator(node) for node in graph.graph.nodes if node.op == "call_function"]


def skeleton(graph: GraphModule) -> list[Any]:
    """A graph up to the names of its nodes, views counted as their copies."""
    names = {node.name: f"%{index}" for index, node in enumerate(graph.graph.nodes)}

    def rename(arg: Any) -> Any:
        return pytree.tree_map_only(Node, lambda node: names[node.name], arg)

    return [
        (node.op, _as_copy(node.target), rename(_given(node)), rename(dict(node.kwargs))) for node in graph.graph.nodes
    ]


def _as_copy(target: Any) -> Any:
    copy = tables.row(target).copy if isinstance(target, torch._ops.OpOverload) else None
    return target if copy is None else tables.overload(copy)
