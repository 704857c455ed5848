"""Programs of a GPU for backends that have arrays of their own: the same operators, on the CPU.

Invariant: the graph computes the same; what it was made from stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import Graph, Node

from functionalize._torch import FakeTensor, pytree

CPU = torch.device("cpu")


def on_cpu(graph: Graph) -> Graph:
    """A graph whose tensors are all on the CPU: itself, if they are there."""
    if not any(map(_elsewhere, graph.nodes)):
        return graph
    made, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        copy = copies[node] = made.node_copy(node, copies.__getitem__)
        copy.args, copy.kwargs = pytree.tree_map_only(torch.device, lambda _: CPU, (copy.args, copy.kwargs))
        copy.meta["val"] = pytree.tree_map(_tensor, node.meta.get("val"))
    return made


def program_on_cpu(exported: ExportedProgram) -> ExportedProgram:
    """The same program on the CPU, with its weights: the same object, which is changed."""
    return move_to_device_pass(exported, "cpu") if any(map(_elsewhere, exported.graph.nodes)) else exported


def _elsewhere(node: Node) -> bool:
    leaves = pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val")))
    devices = (one.device if isinstance(one, torch.Tensor) else one for one in leaves)
    return any(isinstance(one, torch.device) and one.type not in ("cpu", "meta") for one in devices)


def _tensor(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor) or leaf.layout is not torch.strided:
        return leaf.to(CPU) if isinstance(leaf, torch.Tensor) else leaf
    with leaf.fake_mode:  # `to` would lay out in order what is expanded
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=CPU)
