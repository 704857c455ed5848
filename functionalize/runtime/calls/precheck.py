"""Checks decisions before the graph computes anything: those on numbers among a program's inputs, which cost little.

Where a call must not start again, since it has effects, the part of the graph that decides runs ahead, whatever its
inputs are, unless it draws random numbers or communicates itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functionalize.ops.collectives import communicates
from functionalize.python_state.slots import NumberSlot
from functionalize.reachability import nodes_behind
from functionalize.runtime.decisions import compare, with_checks
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.random_state import source_of


def precheck_of(
    graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata, *, once: bool = False
) -> Callable[[Sequence[Any]], None] | None:
    """A function that checks a graph's decisions ahead; None if they have to be checked while the graph runs.

    ``once``: whether a call must not start again.
    """
    results: Any = graph.output_node().args[0]
    decisions = metadata.graph.decisions
    wanted = [results[decision.output] for decision in decisions]
    needed = nodes_behind(wanted)
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), metadata.taken, strict=True))
    read = {node: number for node, number in placeholders.items() if node in needed}
    numbers = all(isinstance(metadata.inputs[number].slot, NumberSlot) for number in read.values())
    if not (numbers or once) or any(node.op == "get_attr" or _acts(node, root) for node in needed):
        return None
    part, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] if isinstance(node, Node) else node for node in wanted))
    with_checks(part, [replace(decision, output=number) for number, decision in enumerate(decisions)])
    function: Any = GraphModule(root, part).forward

    def precheck(inputs: Sequence[Any]) -> None:
        with torch.no_grad():
            answers = function(*[inputs[number] for number in read.values()])
        for number, answer in enumerate(answers):
            compare(answer, decisions, number)

    return precheck


def _acts(node: Node, root: torch.nn.Module) -> bool:
    """Whether a node draws random numbers or communicates, which a call must do once and in order."""
    return source_of(node, root) is not None or communicates(node.target)
