"""An exported program with views for copies of views: what torch's own passes and most exporters know.

In a graph without writes both compute the same. Invariant: an output that was a copy stays one. Limits: operators whose
views torch has under the same name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from functionalize._torch.exporting import viewing
from functionalize.aliasing.geometry import Layout
from functionalize.backends.export.signature.layouts import ADDRESSING

aten = torch.ops.aten
# A value may have other strides than the program's tensor had, and be no view of that size: torch decides.
_BY_SIZE = {aten.view_copy.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


def with_views(exported: ExportedProgram) -> ExportedProgram:
    """The same program, in which views are not copied."""
    graph, results = _viewed(exported.graph)
    graph.output(results)
    return remade(exported, graph, list(results), _attributes(exported.graph_module))


def _viewed(copied: Graph) -> tuple[Graph, Any]:
    """A graph with views, and its results, which are no views of its inputs: several, or the one of a condition."""
    graph = Graph()
    results: Any = graph.graph_copy(copied, {})
    keep_names(copied, graph)
    for node in [node for node in graph.nodes if node.target in ADDRESSING]:
        _keep_memory(graph, node)
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        node.target = _BY_SIZE.get(node.target) or viewing(node.target) or node.target
    return graph, map_arg(results, lambda result: _copied(graph, result))


def keep_names(before: Graph, after: Graph) -> None:
    """Give the inputs of a graph the names that they had: FX gives others to those that Python has a function for."""
    for old, new in zip(*(graph.find_nodes(op="placeholder") for graph in (before, after)), strict=True):
        new.name = old.name


def _attributes(root: GraphModule) -> dict[str, Any]:
    """What a graph finds on its root; bodies of higher-order operators with views as well."""
    found = {str(node.target): attrgetter(str(node.target))(root) for node in root.graph.find_nodes(op="get_attr")}
    return {name: _body(value) if isinstance(value, GraphModule) else value for name, value in found.items()}


def _body(body: GraphModule) -> GraphModule:
    graph, results = _viewed(body.graph)
    graph.output(results).meta = dict(body.graph.output_node().meta)
    made = GraphModule(_attributes(body), graph)
    made.meta = dict(body.meta)
    return made


def _keep_memory(graph: Graph, node: Node) -> None:
    """Have an operator that addresses memory find what it reads in order, as it does where views are copied."""
    base: Any = node.args[0]
    if base.op == "placeholder":
        return
    with graph.inserting_before(node):
        made = graph.call_function(aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
    made.meta = _meta_of_copy(base)
    node.args = (made, *node.args[1:])


def _copied(graph: Graph, node: Node) -> Node:
    """An output; a copy of it where it has become a view of an input that is not written."""
    root = node
    while root.op == "call_function" and (getattr(root.target, "is_view", False) or root.target in _BY_SIZE.values()):
        root = root.args[0]  # type: ignore[assignment]
    if root is node or root.op != "placeholder":
        return node
    made = graph.call_function(aten.clone.default, (node,))
    made.meta = _meta_of_copy(node)
    return made


def _meta_of_copy(node: Node) -> dict[str, Any]:
    """As that of the node, which alone introduces its symbols."""
    return {key: value for key, value in node.meta.items() if key != "unbacked_bindings"}


def views_of(copies: Sequence[Node], given: Layout, layout: Layout) -> list[tuple[Any, Any, Any, dict[str, Any]]]:
    """What to call, for views in the place of copies, each of the one before: operators, arguments, what nodes know.

    ``given``: where the first one's tensor lies; ``layout``: where the last view has to lie. Empty: no views do.
    """
    calls = [(viewing(one.target), one.args[1:], one.kwargs, one.meta) for one in copies]
    if all(op is not aten.as_strided.default for op, *_ in calls[1:]):  # which counts from where a copy begins
        return calls
    if (given.dtype, given.conj, given.neg) != (layout.dtype, layout.conj, layout.neg):
        return []
    return [(aten.as_strided.default, (layout.size, layout.stride, layout.offset), {}, copies[-1].meta)]


def remade(exported: ExportedProgram, graph: Graph, results: list[Any], root: Any = None) -> ExportedProgram:
    """A program with another graph of the same inputs; ``results``: its outputs, which are what they were.

    ``root``: what the attributes of the graph are found on, where it is another one.
    """
    specs = copy.deepcopy(list(exported.graph_signature.output_specs))
    for spec, result in zip(specs, results, strict=True):
        if isinstance(result, Node):
            spec.arg.name = result.name
    return ExportedProgram(
        root=exported.graph_module if root is None else root,
        graph=graph,
        graph_signature=ExportGraphSignature(list(exported.graph_signature.input_specs), specs),
        state_dict=exported.state_dict,
        range_constraints=dict(exported.range_constraints),
        module_call_graph=list(exported.module_call_graph),
        example_inputs=exported.example_inputs,
        constants=exported.constants,
    )
