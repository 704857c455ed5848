"""What the inputs of a program are after a call, as nodes of its graph: whole, where the program wrote parts of them.

Invariant: the nodes are neither views nor writes; they have fake values as others do. Limits: inputs whose sizes,
strides or storages change are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize._torch import pytree
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.view_rules import VIEW_RULES
from functionalize.runtime.metadata import InputMutation, ProgramMetadata

aten = torch.ops.aten
_RESHAPED = {aten.view.default: aten.reshape.default}  # fake values have the strides of memory, which values have not


def with_new_values(graph: Graph, metadata: ProgramMetadata) -> tuple[Graph, dict[int, int]]:
    """The graph with the new value of each written input among its outputs.

    Returns:
        The new graph, and for each written input the position of its value among the outputs.
    """
    made, copies = Graph(), dict[Node, Node]()
    results: Any = list(made.graph_copy(graph, copies))  # type: ignore[arg-type]
    inputs = dict(zip(metadata.taken, made.find_nodes(op="placeholder"), strict=True))
    positions: dict[int, int] = {}
    for mutation in metadata.mutations:
        if changes_metadata(mutation) is None and mutation.writes:
            results.append(_new_value(made, inputs[mutation.input], mutation, results))
            positions[mutation.input] = len(results) - 1
    made.output(tuple(results))
    return made, positions


def changes_metadata(mutation: InputMutation) -> str | None:
    """Why no value alone says what an input is after the call; None where one does."""
    if mutation.metadata or mutation.after:
        op = (mutation.metadata or mutation.after)[0][0]
        return f"it changes size, strides or storage of an input ({op}), and not its elements alone"
    if mutation.layout is not None:
        return "it writes to memory of an input's storage that the input does not show"
    return None


def _new_value(graph: Graph, target: Node, mutation: InputMutation, results: list[Any]) -> Node:
    value = target
    for write in mutation.writes:
        value = _written(graph, value, list(write.path), results[write.result])
    return value


def _written(graph: Graph, whole: Node, path: list[Any], part: Node) -> Node:
    """A value with one part of it replaced: along the path to the part, and back by the rules of its views."""
    if not path:
        return part
    (op, args), rest = path[0], path[1:]

    def call(op: Any, *args: Any) -> Node:
        return call_node(graph, op, *args)

    if rest or op not in VIEW_RULES:
        view = call(op, whole, *args)
        source, out = Layout.of(whole.meta["val"]), Layout.of(view.meta["val"])
    else:
        view, source = part, Layout.of(whole.meta["val"])
        out = Layout.of(part.meta["val"])
    new: Node = VIEW_RULES[op](source, out, *args).inverse(call, lambda: whole, _written(graph, view, rest, part))
    return new


def call_node(graph: Graph, op: Any, *args: Any) -> Node:
    """A node that calls an operator, with the fake value that it gives."""
    values = pytree.tree_map_only(Node, lambda node: node.meta["val"], args)
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
    node = graph.call_function(op, args)
    with tensors[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        node.meta["val"] = _RESHAPED.get(op, op)(*values)
    return node
