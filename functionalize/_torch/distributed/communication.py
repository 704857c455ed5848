"""What a graph communicates: each collective with its group and its bytes, in the order in which it starts.

In: a graph. Out: frozen records, and their volume by kind and group. Guarantees: waits and local operators are left
out. Limits: graphs of higher-order operators are not entered; sizes that are symbols have no bytes; a graph that no
capture has made says which ranks are in a group only while this process has the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functionalize._torch import pytree
from functionalize._torch.distributed.worlds import Group, group_named, in_use
from functionalize.ops.calls import argument, declared
from functionalize.ops.collectives import Way, collective

_GROUP = "process_group"  # the key in ``node.meta["custom"]``


@dataclass(frozen=True)
class Communication:
    """One collective of a graph.

    ``kind``: what it does, in whatever form; ``group``: the name of its process group in the process that captured it;
    ``bytes``: the size of what it takes or of what it gives, the larger of the two, on this rank; None if that is not
    a plain number; ``axis``: of the mesh, or what else the group is called; ``ranks``: of the group, in the world,
    empty if they are not known.
    """

    kind: str
    group: str
    bytes: int | None
    node: Node
    axis: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Volume:
    """All collectives of one kind over one axis: how many, and how many bytes they move on this rank."""

    kind: str
    axis: str
    ranks: int  # how many are in the group
    count: int
    bytes: int


def collectives(graph: Graph | GraphModule) -> list[Communication]:
    """The collectives of a graph, in order: what other processes see of it.

    Ranks whose lists differ in kinds, for one group, will wait for one another.

    Args:
        graph: a graph of a captured program, of `make_fx`, or of `torch.export`.

    Returns:
        One record for each collective, send and receive.

    Example:
        >>> import torch
        >>> from functionalize import capture, verify
        >>> verify.collectives(capture(lambda x: x.add_(1), (torch.zeros(2),)).graph)
        []
    """
    nodes = (graph.graph if isinstance(graph, GraphModule) else graph).nodes
    made = []
    for node in nodes:
        row = collective(node.target)
        if row is not None and row.way not in (Way.WAIT, Way.LOCAL):
            name = group_name_of(node)
            group = _noted(node) or group_named(name) or Group(name, ())
            made.append(Communication(row.kind, name, _bytes(node), node, group.axis, group.ranks))
    return made


def volumes(entries: Iterable[Communication]) -> list[Volume]:
    """How much some collectives move, by kind and axis, in the order in which these come first.

    Args:
        entries: those of a program, as `collectives` gives them.

    Returns:
        One record for each kind over each axis.

    Example:
        >>> volumes([])
        []
    """
    made: dict[tuple[str, str, int], Volume] = {}
    for entry in entries:
        key = entry.kind, entry.axis, len(entry.ranks)
        before = made.get(key)
        count, size = (0, 0) if before is None else (before.count, before.bytes)
        made[key] = Volume(*key, count + 1, size + (entry.bytes or 0))
    return list(made.values())


def note_groups(graph: Graph) -> None:
    """Note in each collective of a graph which ranks are in its group, so that other processes can know it.

    It stands in ``node.meta["custom"]``, which files of `torch.export` keep.
    """
    for entry in collectives(graph) if in_use() else ():
        if entry.ranks:
            noted = {"axis": entry.axis, "ranks": [*entry.ranks]}
            entry.node.meta["custom"] = {**(entry.node.meta.get("custom") or {}), _GROUP: noted}


def _noted(node: Node) -> Group | None:
    noted = (node.meta.get("custom") or {}).get(_GROUP)
    return None if noted is None else Group(noted["axis"], tuple(noted["ranks"]))


def group_name_of(node: Node) -> str:
    """The name of the group in which a collective communicates; empty if it is in none.

    The group is a value of the graph where ``torch.distributed.config.compile_on_one_rank`` is on.
    """
    op: Any = node.target
    for name in ("group_name", "process_group", "ranks"):
        if name in declared(op):
            group = argument(op, name, node.args, node.kwargs)
            value = group.meta.get("val") if isinstance(group, Node) else group
            return str(getattr(value, "group_name", group))
    return ""


def _bytes(node: Node) -> int | None:
    taken = _total([source.meta.get("val") for source in node.all_input_nodes])
    returned = _total(node.meta.get("val"))
    return None if taken is None or returned is None else max(taken, returned)


def _total(values: Any) -> int | None:
    """The bytes of the tensors in a tree; None if a size is a symbol."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    counts = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(counts) if all(type(count) is int for count in counts) else None
