"""What a graph communicates: each collective with its group and its bytes, in the order in which it starts.

In: a graph. Out: frozen records. Guarantees: the graph is only read; waits and local operators are left out. Limits:
graphs of higher-order operators are not entered; sizes that are symbols have no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functionalize._torch import pytree
from functionalize.ops.calls import argument, declared
from functionalize.ops.collectives import Way, collective


@dataclass(frozen=True)
class Communication:
    """One collective of a graph.

    ``kind``: what it does, in whatever form; ``group``: the name of its process group; ``bytes``: the size of what it
    takes or of what it gives, the larger of the two, on this rank; None if that is not a plain number.
    """

    kind: str
    group: str
    bytes: int | None
    node: Node


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
            made.append(Communication(row.kind, _group(node), _bytes(node), node))
    return made


def _group(node: Node) -> str:
    op: Any = node.target
    for name in ("group_name", "process_group", "ranks"):
        if name in declared(op):
            return str(argument(op, name, node.args, node.kwargs))
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
