"""What the gradients of a joint graph are computed from: which of its placeholders, and whether by their values.

Invariant: nothing that a gradient depends on is left out. Limits: the tables
name a few operators that read only sizes; all other operators count as reading values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from functionalize._torch import is_symbolic, storage_key
from functionalize.graph_capture.trace.checkpointing import item_of
from functionalize.ops import traits
from functionalize.ops.calls import declared
from functionalize.ops.variants import offset_argument
from functionalize.reachability import nodes_behind
from functionalize.runtime.autograd.joint import Sources

aten = torch.ops.aten


def sharing(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """The tensors that share memory with each tensor, itself included, as bits; None shares with itself alone."""
    keys = [number if tensor is None else ("storage", storage_key(tensor)) for number, tensor in enumerate(tensors)]
    bits: dict[Any, int] = {}
    for number, key in enumerate(keys):
        bits[key] = bits.get(key, 0) | 1 << number
    return [bits[key] for key in keys]


def reads_storages(graph: Graph) -> bool:
    """Whether a graph reads at offsets in storages, perhaps outside the elements of an input."""
    return any(graph.find_nodes(op="call_function", target=op, sort=False) for op in traits.BY_ADDRESS)


def counting_from_storages(graph: Graph) -> list[Node]:
    """The nodes that take an offset in a storage: they are right for inputs at the same offset as in the capture."""
    nodes = [node for op in traits.BY_ADDRESS for node in graph.find_nodes(op="call_function", target=op)]
    return [node for node in nodes if len(node.args) > cast(int, offset_argument(node.target))]


def sources_of(graph: Graph, results: int, together: Sequence[int], tangents: Sequence[int]) -> Sources:
    """What the gradients are computed from; the gradients are the outputs after the first ``results``.

    ``together``: for each of the first placeholders those that share its memory, which a graph may read through it;
    ``tangents``: for each gradient, the tangents from which autograd reaches it.
    """
    rules = ((True, True), (False, True), (False, False))
    by_rule = [_sources(graph, results, together, unread=unread, discrete=discrete) for unread, discrete in rules]
    return Sources(by_rule[0], by_rule[1], by_rule[2], tuple(tangents))


def _sources(graph: Graph, results: int, together: Sequence[int], *, unread: bool, discrete: bool) -> tuple[int, ...]:
    """``unread``: also placeholders whose sizes alone are read; ``discrete``: also through masks and integers."""
    bits: dict[Node, int] = {}
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        bits[node] = together[number] if number < len(together) else 1 << number
    for node in graph.nodes:
        left_out = (not unread and node.target in traits.READS_METADATA_ONLY) or (not discrete and _is_discrete(node))
        if node not in bits and not left_out:
            read = node.all_input_nodes if unread else _read(node)
            bits[node] = functools.reduce(operator.or_, (bits.get(arg, 0) for arg in read), 0)
    ends: Any = graph.output_node().args[0]
    return tuple(bits.get(node, 0) for node in ends[results:])


def _is_discrete(node: Node) -> bool:
    """Whether a node computes a mask or integers, through which no gradient flows."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _read(node: Node) -> list[Node]:
    """The arguments whose values a node depends on."""
    whole = item_of(node)
    if whole is not None and whole.target in traits.UPDATES_STATISTICS and cast(int, node.args[1]) >= 3:  # a statistic
        return [*whole.all_input_nodes]
    if node.target not in traits.UPDATES_STATISTICS:
        return node.all_input_nodes
    args = dict(zip(declared(node.target), node.args, strict=False))
    if args.get("training", args.get("train")) is not True:
        return node.all_input_nodes
    return [arg for name, arg in args.items() if not name.startswith("running_") and isinstance(arg, Node)]


def forget_unread(graph: Graph) -> None:
    """Replace inputs that no result depends on by constants: dead nodes that draw random numbers still use them.

    Operators accept the constants: zeros are valid indices for all sizes, ones valid probabilities.
    """
    read = nodes_behind(graph.output_node().all_input_nodes)
    for node in graph.find_nodes(op="placeholder"):
        like = node.meta.get("val")
        if node.users and node not in read and isinstance(like, torch.Tensor) and not is_symbolic(like):
            for part in [user for user in node.users if user.target in traits.READS_BY_ADDRESS]:
                _substitute(graph, part, part.meta.get("val", like))  # reads its storage, perhaps beyond its elements
                graph.erase_node(part)
            if node.users:
                _substitute(graph, node, like)


def _substitute(graph: Graph, node: Node, like: torch.Tensor) -> None:
    """Replace a node by a constant of its metadata."""
    with graph.inserting_before(next(iter(node.users), node)):
        number = int(like.dtype.is_floating_point or like.dtype.is_complex)
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        other = graph.call_function(aten.full.default, (list(like.size()), number), options)
    other.meta["val"] = like
    node.replace_all_uses_with(other)


def drop_dead(graph: Graph) -> None:
    """Like ``eliminate_dead_code``, which calls ``is_impure`` of each node; here only of calls without users."""
    for node in reversed(graph.nodes):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if node.target is operator.getitem or not node.is_impure():
            graph.erase_node(node)
