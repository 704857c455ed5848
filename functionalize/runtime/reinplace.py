"""A captured graph as a call runs it: what only builds the next state of an input is done in that input's memory.

A scatter copies its base to write a part of the copy. Where the base is an input that the call is to write back anyway,
and nothing reads the old one afterwards, the part is written in place: a decoding step writes a row of its cache.

Invariant: each node has the value that it has in the graph without mutation. Limits: inputs that share
no memory; calls that autograd follows run the graph without mutation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functionalize._torch import pytree
from functionalize.graph_capture.finalize import Outcome

aten = torch.ops.aten

# Ops that write a part of a copy of their first argument, and how the same is done in place.
_IN_PLACE: dict[Any, Any] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
# Ops that copy a value into a view of a copy: the view's op takes what follows the value.
_VIEW_OF: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


def runnable(outcome: Outcome, root: torch.nn.Module, *, apart: bool) -> GraphModule | None:
    """The graph with writes in place where they can be; None where none can. ``apart``: inputs share no memory."""
    graph = outcome.tracer.graph
    chains = _chains(outcome) if apart else {}
    if not chains:
        return None
    new = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in chains:
            copies[node] = _written(new, node, copies)
        else:
            copies[node] = new.node_copy(node, lambda old: copies[old])
    return GraphModule(root, new, "CapturedInPlace")


def _chains(outcome: Outcome) -> dict[Node, Node]:
    """Scatters that can write in place, each with the input whose memory it writes."""
    placeholders = iter(outcome.tracer.graph.find_nodes(op="placeholder"))
    inputs = [None if n in outcome.unused else next(placeholders) for n in range(len(outcome.sources))]
    written = {
        inputs[back.source]
        for back in outcome.backs
        if not (back.metadata or back.after or back.place) and not outcome.places[back.source].has_internal_overlap
    }
    results = outcome.tracer.graph.output_node().args[0]
    fresh = {results[leaf.output] for leaf in outcome.leaves if leaf.output is not None and leaf.source is None}
    order = {node: number for number, node in enumerate(outcome.tracer.graph.nodes)}
    memory: dict[Node, Node] = {node: node for node in written if node is not None}
    found: dict[Node, Node] = {}
    for node in outcome.tracer.graph.nodes:
        base = node.args[0] if node.target in _IN_PLACE or node.target in _VIEW_OF else None
        if base in memory and node not in fresh and _reads_last(node, base, order):
            found[node] = memory[node] = memory[base]
    return found


def _reads_last(node: Node, base: Node, order: dict[Node, int]) -> bool:
    """Whether nothing reads the memory of a scatter's base afterwards, and the scatter as its base alone."""
    shared = _views_of(base)
    arguments = pytree.tree_leaves(([*node.args[1:]], node.kwargs))
    if any(isinstance(arg, Node) and arg in shared for arg in arguments):
        return False
    if node.meta["val"].dtype != base.meta["val"].dtype or node.meta["val"].stride() != base.meta["val"].stride():
        return False
    return all(order[user] <= order[node] for view in shared for user in view.users)


def _views_of(base: Node) -> set[Node]:
    """The nodes that share a node's memory: itself, and its views, and theirs."""
    found, ahead = {base}, [base]
    while ahead:
        for user in ahead.pop().users:
            if getattr(user.target, "is_view", False) and user not in found:
                found.add(user)
                ahead.append(user)
    return found


def _written(new: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    """A scatter's write in its base's memory; the base stands for the result."""

    def mapped(arg: Any) -> Any:
        if isinstance(arg, Node):
            return copies[arg]
        return [mapped(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

    base, args = copies[node.args[0]], [mapped(arg) for arg in node.args[1:]]  # type: ignore[index]
    if node.target in _IN_PLACE:
        new.call_function(
            _IN_PLACE[node.target], (base, *args), {name: mapped(arg) for name, arg in node.kwargs.items()}
        )
    else:
        view = new.call_function(_VIEW_OF[node.target], (base, *args[1:]))
        new.call_function(aten.copy_.default, (view, args[0]))
    return base
