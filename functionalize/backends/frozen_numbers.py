"""Numbers of a program's state by which it decides: constants of its graph for a backend, which cannot ask them.

A program decides by hyperparameters (``if momentum != 0``) and is right for those that decide alike. A call of a
captured program compares; a backend's function cannot, so that such numbers are no inputs of it.

Invariant: the decisions come out as captured. Limits: decisions by other data are refused.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functionalize.runtime.decided_call import decided_ahead
from functionalize.runtime.decisions import Diverged
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.slots import NumberSlot


def freeze_numbers(
    graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata
) -> tuple[Graph, frozenset[int], list[tuple[str, str]]]:
    """Have the numbers that decide be constants of the graph.

    Returns:
        The graph, which inputs these are, and why the graph cannot be run without deciding.
    """
    decisions = metadata.graph.decisions
    if not decisions:
        return graph, frozenset(), []
    ahead = decided_ahead(graph, root, metadata)
    if ahead is None:
        return (
            graph,
            frozenset(),
            [(one.location, "it decides by data, which no graph of a backend can ask") for one in decisions],
        )
    numbers = {
        number: entry.slot.get() for number, entry in enumerate(metadata.inputs) if isinstance(entry.slot, NumberSlot)
    }
    inputs = [numbers.get(number) for number in range(len(metadata.inputs))]
    try:
        ahead(inputs)
    except Diverged:
        said = "numbers of its state decide otherwise now than when it was captured: capture it again"
        return graph, frozenset(), [(one.location, said) for one in decisions]
    made, copies = Graph(), dict[Node, Node]()
    made.output(made.graph_copy(graph, copies))
    results = graph.output_node().args[0]
    deciding = _behind([results[one.output] for one in decisions])  # type: ignore[index]
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), metadata.taken, strict=True))
    for node in deciding.intersection(placeholders):
        value = numbers[placeholders[node]].item()
        for user in list(copies[node].users):
            if user.target is torch.ops.aten._local_scalar_dense.default:
                _replace(user, value)
    return made, frozenset(placeholders[node] for node in deciding.intersection(placeholders)), []


def _replace(node: Node, value: float) -> None:
    """Have a number stand for a node."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda one: value if one is node else one)
        user.kwargs = map_arg(user.kwargs, lambda one: value if one is node else one)
    node.graph.erase_node(node)


def _behind(nodes: list[object]) -> set[Node]:
    """Nodes, and what they are computed from."""
    found, ahead = set[Node](), [node for node in nodes if isinstance(node, Node)]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found
