"""What a call of a program with decisions does before it writes: it finds out whether it takes the captured branches.

Invariant: a call that takes another branch has changed nothing, and has drawn no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functionalize.python_state.slots import NumberSlot
from functionalize.reachability import nodes_behind
from functionalize.runtime.autograd.joint import called
from functionalize.runtime.calls.computation import Computed
from functionalize.runtime.decisions import Diverged, compare
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.random_state import RandomState, source_of


def compute_as_decided(
    metadata: ProgramMetadata, function: Callable[..., Any], inputs: Sequence[Any], computed: Callable[[], Computed]
) -> Computed:
    """What ``computed`` gives of a graph with decisions. ``function``: the graph, which compares each in its place.

    Raises:
        Diverged: one came out otherwise.
    """
    random = RandomState.now(metadata.graph.draws, {metadata.inputs[n].name: inputs[n] for n in metadata.taken})
    try:
        return computed()
    except Diverged as error:
        diverged = error
    except Exception:  # perhaps of what the program does only on the captured branches
        with random.again():
            found = _divergence(function, [inputs[number] for number in metadata.taken])
        if found is None:
            raise
        diverged = found
    random.restore()
    raise diverged


def decided_ahead(
    graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata
) -> Callable[[Sequence[Any]], None] | None:
    """What checks a graph's decisions by its inputs that are numbers; None where it branches on other data, too."""
    results: Any = graph.output_node().args[0]
    decisions = metadata.graph.decisions
    wanted = [results[decision.output] for decision in decisions]
    needed = nodes_behind(wanted)
    placeholders = dict(zip(graph.find_nodes(op="placeholder"), metadata.taken, strict=True))
    known = {node: number for node, number in placeholders.items() if node in needed}
    numbers = all(isinstance(metadata.inputs[number].slot, NumberSlot) for number in known.values())
    if not numbers or any(node.op == "get_attr" or source_of(node, root) is not None for node in needed):
        return None
    part, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] if isinstance(node, Node) else node for node in wanted))
    function: Any = GraphModule(root, part).forward

    def check_ahead(inputs: Sequence[Any]) -> None:
        answers = function(*[inputs[number] for number in known.values()])
        for number, answer in enumerate(answers):
            compare(answer, decisions, number)

    return check_ahead


def _divergence(function: Callable[..., Any], inputs: Sequence[Any]) -> Diverged | None:
    """Which decision comes out otherwise; None where the graph fails without such."""
    try:
        with torch.no_grad():
            called(function, inputs)
    except Diverged as error:
        return error
    except Exception:
        return None
    return None
