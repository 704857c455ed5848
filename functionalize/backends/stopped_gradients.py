"""Where a program ends gradients: by ``detach``, under ``torch.no_grad()``, in an ``autograd.Function`` of its own.

A graph of values does not show it: another library that differentiates the graph would go on where torch ends.

Invariant: a program without such lines has the derivatives of its graph. Limits: parameters and arguments count, and of
what is computed from them what the program returns.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from functionalize.call_stack import line_of_trace
from functionalize.reachability import nodes_behind
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.specialization import Recorded

_LEAVES = (InputKind.PARAMETER, InputKind.USER_INPUT)


def stopped_gradients(recorded: Recorded, returned: Collection[int]) -> list[str]:
    """The lines at which a gradient of what a program returns may end; ``returned``: positions of its outputs."""
    found = [f"{line} (detached)" for line in recorded.detaches]
    graph, metadata = recorded.graph, recorded.metadata
    results: Any = graph.output_node().args[0]
    leading = nodes_behind([results[at] for at in returned], _floats)  # what leads to results by floats
    for node in _computed_from_leaves(graph, metadata):
        if node.meta.get("no_grad") and node in leading:
            found.append(f"{line_of_trace(node.meta.get('stack_trace'))} (without grad mode)")
    return list(dict.fromkeys(found))


def _computed_from_leaves(graph: Graph, metadata: ProgramMetadata) -> list[Node]:
    """The nodes whose values are floats, computed from parameters and arguments by floats."""
    placeholders = zip(graph.find_nodes(op="placeholder"), metadata.taken, strict=True)
    found = {node: None for node, number in placeholders if metadata.inputs[number].kind in _LEAVES and _floats(node)}
    leaves = len(found)
    for node in graph.nodes:
        if node not in found and _floats(node) and any(one in found for one in node.all_input_nodes):
            found[node] = None
    return list(found)[leaves:]


def _floats(node: Node) -> bool:
    values = node.meta.get("val")
    values = values if isinstance(values, (list, tuple)) else [values]
    return any(
        one.dtype.is_floating_point or one.dtype.is_complex for one in values if isinstance(one, torch.Tensor)
    ) or any(isinstance(one, (float, torch.SymFloat)) for one in values)
