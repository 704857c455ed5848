"""Splits a joint graph into a forward graph and a backward graph, by a partition function of torch's.

Invariant: both are free of mutation, and of views if the joint graph is; each collective stands in one half, in the
order of the joint graph. Limits: partition functions must have AOTAutograd's calling convention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from functionalize._torch import OpOverload, pytree
from functionalize._torch.autograd import default_partition_fn, module_without_code, partitioning
from functionalize.ops import tables
from functionalize.ops.collectives import starts
from functionalize.ops.variants import view_of
from functionalize.reachability import nodes_behind
from functionalize.refusals.values import RUNS_ONCE
from functionalize.runtime.autograd.joint import ForwardCall, JointGraph
from functionalize.runtime.graphs.waits import sink_waits
from functionalize.runtime.random_state import is_random

PartitionFn = Callable[..., tuple[GraphModule, GraphModule]]
Compile = Callable[[GraphModule], Callable[..., Any]]  # a graph as a function of its inputs


def partition(joint: JointGraph, partition_fn: PartitionFn | None, compile_fn: Compile) -> ForwardCall:
    """The two halves of a joint graph, each compiled by ``compile_fn``. The joint graph must not be used again."""
    own = len(joint.layouts)  # the forward's outputs after these are saved
    if not joint.names:
        return _without_inputs(joint, compile_fn)
    strides = _strides_of_tangents(joint)
    copies = _views_for_copies(joint.module.graph)
    calls = [(node, node.args, node.kwargs) for node in joint.module.graph.nodes if tables.acts(node.target)]
    kept = _keep_for_halves(joint.module.graph, own, [node for node, _, _ in calls])
    sequence = [node.name for node in joint.module.graph.nodes if _is_ordered(node)]
    with partitioning(joint.module):
        cut = partition_fn or default_partition_fn()
        forward, backward = cut(joint.module, (), num_fwd_outputs=own + kept.forward)
    results = _outputs(forward)
    _put_calls(forward.graph, calls)
    forward.graph.output_node().args = ((*results[:own], *results[own + kept.forward :]),)
    _save_bases(forward, backward, copies, own)
    _start_once(forward.graph, backward.graph)
    _put_in_order(forward.graph, sequence)
    _put_in_order(backward.graph, sequence)
    sink_waits(forward.graph)
    sink_waits(backward.graph)
    names = {f"primals_{number}": name for number, name in zip(joint.numbers, joint.names, strict=True)}
    outputs, ends = _outputs(forward), _outputs(backward)[kept.backward :]
    gradients, written = ends[: len(ends) - len(joint.tangents)], ends[len(ends) - len(joint.tangents) :]
    saved = _saved(backward, outputs, own, {name: position for position, name in enumerate(names)})
    results = outputs[:own]
    results += [source for source in saved if isinstance(source, Node) and source not in results]
    order = {node: position for position, node in reversed(list(enumerate(results))) if isinstance(node, Node)}
    computed = [node for node in ends if node is not None]
    rebuilt = _rebuilt(forward, names, results, copies)
    views = _views(rebuilt, own)  # before compile_fn changes the graph
    return ForwardCall(
        joint,
        compile_fn(rebuilt),
        compile_fn(_rebuilt(backward, names, computed, copies)) if computed else None,
        [len(names) + order[source] if isinstance(source, Node) else source for source in saved],
        [None if n is None or gradients[n] is None else computed.index(gradients[n]) for n in joint.gradients.all],
        [None if node is None else computed.index(node) for node in written],
        [n for n, node in enumerate(outputs[:own]) if node in order and (node.op == "placeholder" or order[node] < n)],
        views,
        strides,
    )


def _strides_of_tangents(joint: JointGraph) -> list[tuple[int, ...] | None]:
    """The strides of the tangents that the backward was captured for; None if they are not plain numbers."""
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    strides = list[tuple[int, ...] | None]()
    for node in placeholders[len(placeholders) - len(joint.tangents) :]:
        value: Any = node.meta.get("val")
        plain = getattr(value, "layout", None) is torch.strided and all(
            type(stride) is int for stride in value.stride()
        )
        strides.append(value.stride() if plain else None)
    return strides


def _without_inputs(joint: JointGraph, compile_fn: Compile) -> ForwardCall:
    """The halves of a joint graph without inputs: it has no gradients, and partition functions require an input."""
    graph = joint.module.graph
    results = _outputs_of(graph)[: len(joint.layouts)]
    graph.output_node().args = (tuple(results),)
    graph.eliminate_dead_code(Node.is_impure)
    for tangent in _placeholders(joint.module):
        graph.erase_node(tangent)
    doubles = [n for n, node in enumerate(results) if node in results[:n]]
    return ForwardCall(joint, compile_fn(GraphModule(joint.module, graph)), None, [], [], [], doubles, [], [])


@dataclass(frozen=True)
class _Kept:
    """How many outputs the halves of a graph have for nodes that partition functions would drop."""

    forward: int
    backward: int


def _keep_for_halves(graph: Graph, own: int, calls: Sequence[Node]) -> _Kept:
    """Add outputs for nodes that partition functions would drop, as these keep only what results need.

    These are unread random numbers, without which later draws would give other numbers, unread collectives, for which
    other processes wait, and arguments of ``calls`` with effects, which are removed from the graph.
    """
    ends = _outputs_of(graph)
    read = nodes_behind(ends)
    unread = [node for node in graph.nodes if node not in read and _is_ordered(node)]
    later = [node for node in unread if node.meta.get("partitioner_tag") == "must_be_in_backward"]
    arguments = [argument for call in calls for argument in call.all_input_nodes]
    sooner = list(dict.fromkeys([*(node for node in unread if node not in later), *arguments]))
    for call in calls:
        graph.erase_node(call)
    graph.output_node().args = ((*ends[:own], *sooner, *later, *ends[own:]),)
    return _Kept(len(sooner), len(later))


def _put_calls(graph: Graph, calls: Sequence[tuple[Node, Any, Any]]) -> None:
    """Append calls with effects, each given with its arguments, to a forward graph, in order: all else is pure."""
    own = {node.name: node for node in graph.nodes}
    with graph.inserting_before(graph.output_node()):
        for call, args, kwargs in calls:
            arguments: Any = map_arg((args, kwargs), lambda argument: own[argument.name])
            graph.call_function(call.target, *arguments).meta.update(call.meta)  # type: ignore[arg-type]


def _is_ordered(node: Node) -> bool:
    """Whether a node draws random numbers or starts a collective, so that it keeps its place among others."""
    return is_random(node) or starts(node.target)


def _start_once(forward: Graph, backward: Graph) -> None:
    """Remove collectives from a backward that its forward has: extraction keeps them in both, if they need no inputs.

    Raises:
        UnsupportedProgramError: the backward reads one, so it would run again.
    """
    own = {node.name for node in forward.nodes if starts(node.target)}
    for node in reversed([node for node in backward.nodes if node.op == "call_function" and node.name in own]):
        waits = [user for user in node.users if user.op == "call_function" and not user.users]
        if len(waits) < len(node.users):
            raise RUNS_ONCE.error(reason=f"the partition function has the backward compute {node.target} again")
        for unread in (*waits, node):
            backward.erase_node(unread)


def _put_in_order(graph: Graph, names: Sequence[str]) -> None:
    """Have a half draw and communicate in the order of ``names``: partition functions order by first use."""
    places = {name: place for place, name in enumerate(names)}
    ordered = [node for node in graph.nodes if node.op == "call_function" and node.name in places]
    wanted = sorted(ordered, key=lambda node: places[node.name])
    if ordered == wanted:
        return
    moved = dict[Node, None]()
    for node in wanted:
        behind = nodes_behind([node])
        moved.update(dict.fromkeys(other for other in graph.nodes if other in behind and other.op != "placeholder"))
    for node in reversed(moved):
        first = next(other for other in graph.nodes if other.op != "placeholder")
        if first is not node:
            first.prepend(node)


def _save_bases(forward: GraphModule, backward: GraphModule, copies: Mapping[Any, Any], own: int) -> None:
    """Have the backward take the base of several saved views, and copy the views itself.

    To save views along with their base costs nothing, but copies have memory of their own. A base that the backward
    computes again is not saved: its views are small, or it would be. ``own``: how many of the forward's outputs are
    results; the rest is saved.
    """
    computed = {node.name: node for node in forward.graph.nodes if node.op != "output"}
    taken = {node.name: node for node in _placeholders(backward)}
    chains = {name: _chain(computed[name], copies) for name in taken if name in computed}
    bases = [chain[0] for chain in chains.values() if len(chain) > 1]
    kept = {name for name, chain in chains.items() if len(chain) == 1}
    first: Node = next(node for node in backward.graph.nodes if node.op != "placeholder")
    added, gone = list[Node](), set[str]()
    again = {node.name for node in backward.graph.nodes if node.op != "placeholder"}
    made: dict[Node, Node] = {computed[name]: taken[name] for name in kept}
    for name, chain in chains.items():
        base = chain[0]
        is_alone = base.op != "placeholder" and base.name not in kept and bases.count(base) == 1
        if len(chain) == 1 or is_alone or base.name in again:
            continue
        if base not in made:
            with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
                made[base] = backward.graph.placeholder(base.name)
            made[base].meta = dict(base.meta)
            added += [base] if base.op != "placeholder" else []
        for node in chain[1:]:
            if node not in made:
                with backward.graph.inserting_before(first):
                    made[node] = backward.graph.node_copy(node, made.__getitem__)
        taken[name].replace_all_uses_with(made[computed[name]])
        backward.graph.erase_node(taken[name])
        gone.add(name)
    results = _outputs(forward)
    saved = [node for node in results[own:] if node.name not in gone]
    forward.graph.output_node().args = ((*results[:own], *saved, *added),)


def _chain(node: Node, copies: Mapping[Any, Any]) -> list[Node]:
    """The views that lead to a node, and first their base."""
    chain = [node]
    while chain[0].target in copies and len(chain[0].all_input_nodes) == 1:
        chain.insert(0, chain[0].all_input_nodes[0])
    return chain


def _views(forward: GraphModule, own: int) -> list[tuple[int, int]]:
    """Outputs in the memory of an input, or of one of the ``own`` first outputs, with its position: inputs come first.

    Callers hold these tensors, and may write there before the backward.
    """
    inputs = _placeholders(forward)
    first: dict[Node, tuple[Node, int]] = {node: (node, number) for number, node in enumerate(inputs)}
    views = list[tuple[int, int]]()
    for number, node in enumerate(_outputs(forward)):
        if not isinstance(node, Node):
            continue
        if number < own:
            first.setdefault(_root(node), (node, len(inputs) + number))
        shown, source = first.get(_root(node), (node, 0))
        if shown is not node:
            views.append((number, source))
    return views


def _root(node: Node) -> Node:
    """The node whose memory a node shares, as far as operators declare it."""
    while node.op == "call_function":
        viewing: Any = node.args[0] if node.target is operator.getitem else node
        if not isinstance(viewing, Node) or not _is_view(viewing.target):
            break
        node = node.all_input_nodes[0]
    return node


def _is_view(op: Any) -> bool:
    return isinstance(op, OpOverload) and (op is torch.ops.aten._unsafe_view.default or tables.views(op))


def _placeholders(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _outputs(module: GraphModule) -> list[Any]:
    return _outputs_of(module.graph)


def _outputs_of(graph: Graph) -> list[Any]:
    return list(pytree.arg_tree_leaves(graph.output_node().args[0]))


def _saved(backward: GraphModule, outputs: Sequence[Any], own: int, inputs: Mapping[str, int]) -> list[int | Node]:
    """The backward's inputs before the tangents: inputs of the graph, by position, and outputs of the forward."""
    sources: dict[str, int | Node] = {node.name: node for node in outputs if isinstance(node, Node)} | {**inputs}
    taken = [node.name for node in _placeholders(backward) if not node.name.startswith("tangents_")]
    rest = iter([node for node in outputs[own:] if node.name not in taken])  # states of random numbers, in order
    return [sources[name] if name in sources else next(rest) for name in taken]


def _rebuilt(
    module: GraphModule, names: Mapping[str, str], outputs: Sequence[Any], copies: Mapping[Any, Any]
) -> GraphModule:
    """A graph with the program's names for its inputs, other outputs, and copies in place of the views."""
    graph, made = Graph(), dict[Node, Node]()
    for node in _placeholders(module):
        made[node] = graph.placeholder(names.get(node.name, node.name))
        made[node].meta = dict(node.meta)
    graph.graph_copy(module.graph, made)
    for node in graph.nodes:
        node.target = copies.get(node.target, node.target)
    graph.output(map_arg(tuple(outputs), made.__getitem__))
    graph.eliminate_dead_code(Node.is_impure)
    return module_without_code(module, graph)


def _views_for_copies(graph: Graph) -> dict[Any, Any]:
    """Replace copies by view ops, as partition functions assume a copy to be costly; returns the copies by view op.

    If a graph has both a view op and its copy, they could not be distinguished afterwards: the copies stay.
    """
    twins: dict[Any, Any] = {}
    views = {node.target for node in graph.nodes}
    for node in graph.nodes:
        view = view_of(node.target) if node.op == "call_function" else None
        if view is not None and view not in views:
            twins[view] = node.target
            node.target = view
    return twins
