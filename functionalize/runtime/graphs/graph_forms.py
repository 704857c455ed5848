"""Other forms of a captured graph: with writes in place, as a call runs it; ending in ``copy_``, as ``make_fx`` does.

A scatter copies its base to write a part of the copy. If the base is an input that the call writes back anyway, and
nothing reads its old value afterwards, the part is written in place: a decoding step writes a row of its cache.

Invariant: each node has the value that it has in the graph without mutation. Limits: writes in place need inputs that
share no memory, and a call that autograd does not follow; ``copy_`` needs inputs whose new sizes are not symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functionalize._torch import OpOverload, pytree
from functionalize._torch.dispatch import direct_call
from functionalize.ops import traits
from functionalize.ops.collectives import starts
from functionalize.ops.variants import in_place_of, offset_argument, written_view
from functionalize.runtime.communication import call_once
from functionalize.runtime.decisions import Decision, with_assertions, with_checks
from functionalize.runtime.graphs.view_reads import have_read_views
from functionalize.runtime.metadata import InputMutation, InputRef, NewStorage, ProgramMetadata

aten = torch.ops.aten


def reinplace(graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata) -> GraphModule | None:
    """The graph with writes in place where possible; None if it stays as it is. Inputs must not share memory."""
    chains = _chains(graph, metadata)
    if not chains:
        return None
    new, copies = Graph(), dict[Node, Node]()
    new.output(new.graph_copy(graph, copies))
    for node in map(copies.__getitem__, chains):
        _write_in_place(new, node)
    return GraphModule(root, new, "CapturedInPlace")


def _chains(graph: Graph, metadata: ProgramMetadata) -> list[Node]:
    """The scatters that can write in place, in order."""
    inputs = dict(zip(metadata.taken, graph.find_nodes(op="placeholder"), strict=True))
    memory = {  # nodes whose value is so far the memory of an input that is written
        inputs[mutation.input]
        for mutation in metadata.mutations
        if not (mutation.metadata or mutation.after or mutation.layout or mutation.overlaps)
    }
    results: Any = graph.output_node().args[0]
    own = {results[alias.result] for alias in metadata.outputs if alias.result is not None and alias.input is None}
    order = {node: number for number, node in enumerate(graph.nodes)}
    chains = []
    for node in graph.nodes:
        base: Any = node.args[0] if _writes_part(node.target) else None
        if base in memory and node not in own and _reads_last(node, base, order):
            chains.append(node)
            memory.add(node)
    return chains


def _writes_part(op: Any) -> bool:
    """Whether an operator copies its first argument and writes a part of the copy, as it could in place."""
    return op in traits.WRITES_PART or written_view(op) is not None


def _reads_last(node: Node, base: Node, order: dict[Node, int]) -> bool:
    """Whether the scatter is the last to read the memory of its base, and reads it only as its base."""
    shared = _views_of(base)
    arguments = pytree.tree_leaves(([*node.args[1:]], node.kwargs))
    if any(isinstance(arg, Node) and arg in shared for arg in arguments):
        return False
    if node.meta["val"].dtype != base.meta["val"].dtype or node.meta["val"].stride() != base.meta["val"].stride():
        return False
    if any(_is_addressed(user) for view in _views_of(node) for user in view.users):
        return False
    return all(order[user] <= order[node] for view in shared for user in view.users)


def _is_addressed(node: Node) -> bool:
    """Whether a node takes a storage offset: an input and a result may begin at different ones."""
    place = offset_argument(node.target)
    return place is not None and (len(node.args) > place or "storage_offset" in node.kwargs)


def _views_of(base: Node) -> set[Node]:
    """The nodes that share a node's memory: the node, its views, and views of these."""
    views, pending = {base}, [base]
    while pending:
        for user in pending.pop().users:
            if getattr(user.target, "is_view", False) and user not in views:
                views.add(user)
                pending.append(user)
    return views


def _write_in_place(graph: Graph, node: Node) -> None:
    """Have a scatter write in its base's memory, and its users read the base."""
    base, *args = node.args
    with graph.inserting_before(node):
        view = written_view(node.target)
        if view is None:
            graph.call_function(in_place_of(node.target), node.args, node.kwargs)
        else:
            part = graph.call_function(view, (base, *args[1:]))
            graph.call_function(aten.copy_.default, (part, args[0]))
    node.replace_all_uses_with(base)  # type: ignore[arg-type]
    graph.erase_node(node)


def executable(graph: Graph, root: torch.nn.Module, *, decisions: Sequence[Decision] = ()) -> GraphModule:
    """The graph as a call runs it: operators without torch's layer in Python, views instead of copies of them.

    ``decisions``: those that the graph compares as soon as they are computed.
    """
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    with_checks(new, decisions)
    return made_executable(new, root)


def made_executable(graph: Graph, root: torch.nn.Module) -> GraphModule:
    """As :func:`executable`, for a graph with no other user: it is changed, and not copied."""
    have_read_views(graph)
    communications = itertools.count()
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            op = node.target
            node.target = call_once(op, next(communications)) if starts(op) else direct_call(op)
    return GraphModule(root, graph, "Executed")


def with_copies(graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata) -> GraphModule:
    """A program's graph with nodes for write-backs and assertions of decisions; it returns what the caller gets."""
    new = Graph()
    results: Any = new.graph_copy(graph, {})
    inputs = dict(zip(metadata.taken, new.find_nodes(op="placeholder"), strict=True))
    for mutation in metadata.mutations:
        _emit(new, mutation, inputs, results)
    new.output(results)
    with_assertions(new, metadata.graph.decisions)
    first = sum(len(mutation.writes) for mutation in metadata.mutations)
    new.output_node().args = (tuple(results[first : len(results) - len(metadata.graph.decisions)]),)
    return GraphModule(root, new, "CapturedWithCopies")


def asserting(graph: Graph, root: torch.nn.Module, metadata: ProgramMetadata) -> GraphModule:
    """A program's graph that asserts its decisions, instead of returning them."""
    new, decisions = Graph(), metadata.graph.decisions
    results: Any = new.graph_copy(graph, {})
    new.output(results)
    with_assertions(new, decisions)
    new.output_node().args = (tuple(results[: len(results) - len(decisions)]),)
    return GraphModule(root, new, "CapturedVariant")


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
    if isinstance(argument, InputRef):
        return inputs[argument.number]
    if isinstance(argument, NewStorage):
        options: dict[str, Any] = {"dtype": argument.dtype, "device": argument.device}
        return graph.call_function(aten.empty.memory_format, (_numbers(list(argument.size)),), options)
    return _numbers(argument)


def _numbers(argument: Any) -> Any:
    """An argument, which must be a number: a node cannot hold a symbol."""
    for item in argument if isinstance(argument, (list, tuple)) else [argument]:
        if hasattr(item, "free_symbols"):
            raise NotImplementedError(
                "this program changes the size of an input to one that differs from call to call, which no node can "
                "name; call the program itself, or capture it without dynamic_shapes"
            )
    return argument
