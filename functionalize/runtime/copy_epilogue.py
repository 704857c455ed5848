"""A captured program's graph that writes back by itself: it ends in ``copy_`` onto its inputs, as ``make_fx`` gives it.

Invariant: what comes before the write-backs is the graph without mutation, node for node.
Limits: changes of an input's sizes that are symbols are left to the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from functionalize.runtime.metadata import InputMutation, InputRef, NewStorage, OldStorageRef, ProgramMetadata

aten = torch.ops.aten


def with_copies(graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata) -> GraphModule:
    """A program's graph, with its write-backs as nodes and the caller's outputs alone."""
    new = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            copies[node] = new.node_copy(node, lambda old: copies[old])
    results: Any = map_arg(graph.output_node().args[0], lambda old: copies[old])
    inputs = dict(zip(metadata.taken, new.find_nodes(op="placeholder"), strict=True))
    for mutation in metadata.mutations:
        _emit(new, mutation, inputs, results)
    first = sum(len(mutation.writes) for mutation in metadata.mutations)
    new.output(tuple(results[first:]))
    return GraphModule(root, new, "CapturedWithCopies")


def _emit(graph: Graph, mutation: InputMutation, inputs: dict[int, Node], results: Any) -> None:
    target = inputs[mutation.input]
    for op, args in mutation.metadata:
        graph.call_function(op, (target, *(_argument(graph, arg, inputs) for arg in args)))
    for write in mutation.writes:
        part = target
        if mutation.layout is not None:
            where = [list(mutation.layout.size), list(mutation.layout.stride), mutation.layout.offset]
            part = graph.call_function(aten.as_strided.default, (target, *map(_numbers, where)))
        for op, args in write.path:
            part = graph.call_function(op, (part, *map(_numbers, args)))
        graph.call_function(aten.copy_.default, (part, results[write.result]))
    for op, args in mutation.after:
        graph.call_function(op, (target, *map(_numbers, args)))


def _argument(graph: Graph, argument: Any, inputs: dict[int, Node]) -> Any:
    if isinstance(argument, (InputRef, OldStorageRef)):
        return inputs[argument.number]
    if isinstance(argument, NewStorage):
        options: dict[str, Any] = {"dtype": argument.dtype, "device": argument.device}
        return graph.call_function(aten.empty.memory_format, (_numbers(list(argument.size)),), options)
    return _numbers(argument)


def _numbers(argument: Any) -> Any:
    """Sizes as numbers: a node cannot hold a symbol."""
    for item in argument if isinstance(argument, (list, tuple)) else [argument]:
        if hasattr(item, "free_symbols"):
            raise NotImplementedError(
                "this program changes the size of an input to one that differs from call to call, which no node can "
                "name; call the program itself, or capture it without dynamic_shapes"
            )
    return argument
