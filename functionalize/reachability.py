"""Finds what results are computed from: nodes in FX graphs, functions in autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from torch.fx import Node


def nodes_behind(ends: Iterable[object], through: Callable[[Node], bool] = lambda node: True) -> set[Node]:
    """The nodes among ``ends`` and all that they are computed from; the search stops at nodes that fail ``through``."""
    reached, pending = set[Node](), [end for end in ends if isinstance(end, Node)]
    while pending:
        node = pending.pop()
        if node not in reached and through(node):
            reached.add(node)
            pending += node.all_input_nodes
    return reached


def functions_behind(ends: Iterable[Any], beyond: Container[Any] = ()) -> set[Any]:
    """Autograd's functions of some tensors (``grad_fn``, or None) and all behind them, without those in ``beyond``."""
    reached, pending = set[Any](), list(ends)
    while pending:
        function = pending.pop()
        if function is not None and function not in reached and function not in beyond:
            reached.add(function)
            pending += [following for following, _ in function.next_functions if following is not None]
    return reached
