"""Where a program ends or changes gradients: by ``detach``, without grad mode, by hooks, in an ``autograd.Function``.

A graph of values does not show it: another library that differentiates the graph would go on where torch ends.

Invariant: a program without such lines has the derivatives of its graph. Limits: parameters and arguments count, and of
what is computed from them what the program returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from functionalize._torch.tensors import has_backward_hooks, has_gradient_hooks, hooks_of_all
from functionalize.call_stack import line_of_trace
from functionalize.reachability import nodes_behind
from functionalize.runtime.calls.specialization import Capture
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.transform.gradients.ended_gradients import NO_GRAD

_LEAVES = (InputKind.PARAMETER, InputKind.USER_INPUT)


def stopped_gradients(capture: Capture, returned: Collection[int]) -> list[str]:
    """The places at which a gradient of what a program returns may end; ``returned``: positions of its outputs."""
    recorded = capture.recorded
    graph, metadata = recorded.graph, recorded.metadata
    results: Any = graph.output_node().args[0]
    leading = nodes_behind([results[at] for at in returned], has_floats)  # what leads to results by floats
    leaves, computed = _of_leaves(graph, metadata)
    found, own = list(_hooks(capture)), set(graph.nodes)
    for nodes, location in recorded.endings:
        if not nodes <= own or not nodes or not nodes.isdisjoint(leaves | computed):
            found.append(location)
    for node in graph.nodes:
        if node in computed and node in leading and (node.meta.get(NO_GRAD) or not _tensors(node)):
            how = "grad mode off" if _tensors(node) else "a number"
            found.append(f"{line_of_trace(node.meta.get('stack_trace'))} ({how})")
    return list(dict.fromkeys(found))


def _hooks(capture: Capture) -> Iterator[str]:
    """What of the program's state has hooks on gradients."""
    for slot in capture.state.tensors:
        value = slot.found()
        if isinstance(value, torch.Tensor) and has_gradient_hooks(value):
            yield f"`{slot.path}` (with a hook on its gradient)"
    modules = [value for value in capture.state.seen if issubclass(type(value), torch.nn.Module)]
    for module in modules:
        if has_backward_hooks(module):
            yield f"a {type(module).__name__} (with a hook on its backward)"
    if modules and any(hooks for name, hooks in hooks_of_all().items() if "backward" in name):
        yield "all modules (with a hook on their backwards)"


def _of_leaves(graph: Graph, metadata: ProgramMetadata) -> tuple[set[Node], set[Node]]:
    """The parameters and arguments of floats, and the nodes that are computed from these by floats."""
    placeholders = zip(graph.find_nodes(op="placeholder"), metadata.taken, strict=True)
    leaves = {node for node, number in placeholders if metadata.inputs[number].kind in _LEAVES and has_floats(node)}
    computed = set[Node]()
    for node in graph.nodes:
        if (
            node not in leaves
            and has_floats(node)
            and any(one in leaves or one in computed for one in node.all_input_nodes)
        ):
            computed.add(node)
    return leaves, computed


def has_floats(node: Node) -> bool:
    """Whether the value of a node, or a part of it, is of floats."""
    numbers = (float, torch.SymFloat)
    return any(one.dtype.is_floating_point or one.dtype.is_complex for one in _tensors(node)) or any(
        isinstance(one, numbers) for one in _values(node)
    )


def _tensors(node: Node) -> list[torch.Tensor]:
    return [one for one in _values(node) if isinstance(one, torch.Tensor)]


def _values(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]
