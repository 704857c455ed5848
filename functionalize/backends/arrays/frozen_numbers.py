"""What a program decides by, for a backend: numbers of its state, which become constants, and data, which are results.

A program decides by hyperparameters (``if momentum != 0``) and is right for those that decide alike. A call of a
captured program compares; a backend's function is not to, so that such numbers are no inputs of it. What the data
decide is only known once the graph has run: it gives them, for the caller to compare.

Invariant: the decisions come out as captured, or whoever compares them finds that they do not. Limits: numbers that a
program computes of data and decides by are compared as the backend computes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functionalize.python_state.slots import NumberSlot
from functionalize.reachability import nodes_behind
from functionalize.runtime.calls.precheck import precheck_of
from functionalize.runtime.decisions import Decision, Diverged
from functionalize.runtime.metadata import ProgramMetadata


class Decided(NamedTuple):
    """A graph that runs without deciding.

    ``frozen``: the inputs that are constants of it. ``asked``: decisions whose outputs are to be compared after a run:
    tensors, or numbers of them. ``causes``: why it cannot be run so.
    """

    graph: Graph
    frozen: frozenset[int] = frozenset()
    asked: tuple[Decision, ...] = ()
    causes: tuple[tuple[str, str], ...] = ()


def freeze_numbers(graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata) -> Decided:
    """Have the numbers that decide be constants of the graph, and data that do be among its results."""
    decisions = metadata.graph.of_forward
    if not decisions:
        return Decided(graph)
    ahead = precheck_of(graph, root, metadata)
    if ahead is None:
        return _asked(graph, decisions)
    numbers = {
        number: entry.slot.get() for number, entry in enumerate(metadata.inputs) if isinstance(entry.slot, NumberSlot)
    }
    inputs = [numbers.get(number) for number in range(len(metadata.inputs))]
    try:
        ahead(inputs)
    except Diverged:
        said = "it branches on numbers of its state, which have changed since the capture: capture it again"
        return Decided(graph, causes=tuple((one.location, said) for one in decisions))
    made, copies = Graph(), dict[Node, Node]()
    made.output(made.graph_copy(graph, copies))
    results = graph.output_node().args[0]
    deciding = nodes_behind([results[one.output] for one in decisions])  # type: ignore[index]
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), metadata.taken, strict=True))
    for node in deciding.intersection(placeholders):
        value = numbers[placeholders[node]].item()
        for user in list(copies[node].users):
            if user.target is torch.ops.aten._local_scalar_dense.default:
                _replace(user, value)
                made.erase_node(user)
    return Decided(made, frozenset(placeholders[node] for node in deciding.intersection(placeholders)))


def _asked(graph: Graph, decisions: Iterable[Decision]) -> Decided:
    """Have a graph give what it would decide by, tensors in the place of the numbers that are read off them.

    A number that must be the same in each call is a constant to whoever computes with it.
    """
    made = Graph()
    results = list(made.graph_copy(graph, {}))  # type: ignore[arg-type]
    for one in decisions:
        number = results[one.output]
        if not isinstance(number, Node):
            continue
        if number.target is torch.ops.aten._local_scalar_dense.default:
            results[one.output] = number.args[0]
        if not isinstance(one.answer, bool):
            _replace(number, one.answer)
    made.output(tuple(results))
    return Decided(made, asked=tuple(decisions))


def _replace(node: Node, value: float) -> None:
    """Have a number stand for a node."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda one: value if one is node else one)
        user.kwargs = map_arg(user.kwargs, lambda one: value if one is node else one)
