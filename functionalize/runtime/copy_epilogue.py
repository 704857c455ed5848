"""A captured program's graph that writes back by itself: it ends in ``copy_`` onto its inputs, as ``make_fx`` gives it.

Invariant: what comes before the write-backs is the graph without mutation, node for node.
Limits: changes of an input's sizes that are symbols are left to the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from functionalize.graph_capture.finalize import Back, Outcome

aten = torch.ops.aten


def with_copies(outcome: Outcome, root: torch.nn.Module) -> GraphModule:
    """The graph of an outcome, with its write-backs as nodes and the caller's outputs alone."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    output: Any = None
    for node in outcome.tracer.graph.nodes:
        if node.op == "output":
            output = node
        else:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
    results = map_arg(output.args[0], lambda old: copies[old])
    placeholders = iter(graph.find_nodes(op="placeholder"))
    inputs = [None if n in outcome.unused else next(placeholders) for n in range(len(outcome.sources))]
    for back in outcome.backs:
        _emit(graph, outcome, back, inputs, results)
    first = sum(len(back.pieces) for back in outcome.backs)
    graph.output(tuple(results[first:]))
    return GraphModule(root, graph, "CapturedWithCopies")


def _emit(graph: Graph, outcome: Outcome, back: Back, inputs: list[Any], results: Any) -> None:
    target = inputs[back.source]
    for op, args in back.metadata:
        graph.call_function(op, (target, *(_argument(graph, outcome, arg, inputs) for arg in args)))
    for piece in back.pieces:
        part = target
        if back.place is not None:
            place = [list(back.place.size), list(back.place.stride), back.place.offset]
            part = graph.call_function(aten.as_strided.default, (target, *_plain(place)))
        for op, args in piece.path:
            part = graph.call_function(op, (part, *args))
        graph.call_function(aten.copy_.default, (part, results[piece.output]))
    for op, args in back.after:
        graph.call_function(op, (target, *_plain(args)))


def _argument(graph: Graph, outcome: Outcome, argument: Any, inputs: list[Any]) -> Node | Any:
    if not isinstance(argument, torch.Tensor):
        return _plain([argument])[0]
    source = outcome.source_of(argument)
    if source is not None:
        return inputs[source]
    size = _plain(list(argument.size()))
    options: dict[str, Any] = {"dtype": argument.dtype, "device": argument.device}
    return graph.call_function(aten.empty.memory_format, (size,), options)


def _plain(values: Any) -> list[Any]:
    """Sizes as numbers: a node cannot hold a symbol."""
    for value in values:
        if any(isinstance(item, torch.SymInt) for item in (value if isinstance(value, list) else [value])):
            raise NotImplementedError(
                "this program changes the size of an input to one that differs from call to call, which no node can "
                "name; call the program itself, or capture it without dynamic_shapes"
            )
    return list(values)
