"""What something is computed from: nodes in graphs of FX, functions in autograd's."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from torch.fx import Node


def nodes_behind(ends: Iterable[object], through: Callable[[Node], bool] = lambda node: True) -> set[Node]:
    """Nodes among the ``ends``, and what leads to them; only ``through`` some, if that is given."""
    found, ahead = set[Node](), [end for end in ends if isinstance(end, Node)]
    while ahead:
        node = ahead.pop()
        if node not in found and through(node):
            found.add(node)
            ahead += node.all_input_nodes
    return found


def functions_behind(ends: Iterable[Any], beyond: Container[Any] = ()) -> set[Any]:
    """Autograd's functions of some tensors (``grad_fn``, or None), and what leads to them, but not ``beyond`` some."""
    found, ahead = set[Any](), list(ends)
    while ahead:
        function = ahead.pop()
        if function is not None and function not in found and function not in beyond:
            found.add(function)
            ahead += [following for following, _ in function.next_functions]
    return found
