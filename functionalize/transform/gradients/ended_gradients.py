"""Places where a program ends gradients, or changes them, without a node in its graph that shows it.

Code that differentiates the graph would go on there: at `detach`, at views and writes with grad mode off, `.data =`,
hooks, and functions of autograd's with a backward of their own.

Invariant: each such place is noted, with the nodes that had the value there, and gradients until then. Limits: if the
nodes are unknown, or of another graph, as in a body of a higher-order op, it is unknown whose gradients end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from functionalize._torch.symbols.tracing import tracked_node
from functionalize.aliasing.alias_graph import AliasGraph
from functionalize.aliasing.tensor_queries import tensor_leaves
from functionalize.call_stack import user_location
from functionalize.transform.values import ValueExecutor

WITHOUT_GRAD_MODE = "grad mode off"
NO_GRAD = "no_grad"  # of a node's meta: whether the program had grad mode off when it was made


class EndedGradient(NamedTuple):
    """One place: the nodes whose gradients may end there, and the line."""

    nodes: frozenset[Node]
    location: str  # as `file:line in function: text (how)`


class EndedGradients:
    """The places of one call, and of the bodies of its higher-order ops."""

    def __init__(self, executor: ValueExecutor, graph: AliasGraph) -> None:
        self._executor, self._graph = executor, graph
        self._differentiates = torch.is_grad_enabled()  # when the program begins
        self._outer: EndedGradients | None = None
        self.found: list[EndedGradient] = []

    def close(self) -> None:
        """Stop: what follows is not part of the program."""
        self._differentiates = False

    @property
    def grad_is_off(self) -> bool:
        """Whether the program has switched grad mode off."""
        return self._differentiates and not torch.is_grad_enabled()

    def report_to(self, outer: EndedGradients) -> None:
        """Note all in the call that this is a body of."""
        self._outer, self.found = outer, outer.found

    def note(self, handle: Any, how: str) -> None:
        """Note that the gradient of a handle may end here."""
        if not _may_have_gradients(handle):
            return
        view = self._graph.find(handle)
        values: list[Any] = [handle]
        if view is not None:
            base = view.base
            values = [base.root.value, base.top.value, *(write.value for write in base.pending.values())]
        self.note_values(values, how)

    def note_values(self, values: Iterable[Any], how: str) -> None:
        """The same for values."""
        if not self._differentiates or self._executor.proxies is None:
            return
        tracer = self._executor.proxies.tracer
        tracked = (tracked_node(tracer, value) for value in values if isinstance(value, torch.Tensor))
        nodes = {node for node in tracked if node is not None}
        going = frozenset(node for node in nodes if NO_GRAD not in node.meta)
        if going or not nodes:  # otherwise the nodes show it, as in a step of an optimizer
            self.found.append(EndedGradient(going, f"{user_location()} ({how})"))

    def note_function(self, function: type, args: Any, kwargs: Any) -> None:
        """Note that a function of autograd's is applied, which has a backward of its own."""
        for handle in tensor_leaves(args, kwargs):
            self.note(handle, f"{function.__name__}.apply")

    def note_grad_mode(self) -> None:
        """Note that grad mode is set. In a body the nodes that are made without it do not matter."""
        if self._outer is not None:
            self.note_values((), WITHOUT_GRAD_MODE)


def _may_have_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
