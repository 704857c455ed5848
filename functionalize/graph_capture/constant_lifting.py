"""Tensors that a program reached by other ways than its inputs: they become inputs of the graph.

Invariant: afterwards the graph has no attributes that are tensors: buffers are those that were written, the others are
constants. None is a fake tensor, unless the program was captured for such: what a capture computed is no constant.
Limits: tensors; graphs of higher-order ops stay attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from functionalize._torch import FakeTensor
from functionalize._torch.tracing import track
from functionalize.call_stack import Origin
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.inputs import TracedInput, fresh_name, gradient_edge


class ConstantLifter:
    """Adds inputs before those of the user, in the graph and in the list of inputs alike."""

    def __init__(self, tracer: Any, inputs: list[TracedInput], snapshot: Callable[[torch.Tensor], Any]) -> None:
        """``snapshot``: what a tensor looks like, for a node's meta."""
        self._tracer, self._inputs, self._snapshot = tracer, inputs, snapshot
        self._lifted = 0
        self._takes_fakes = any(isinstance(entry.value, FakeTensor) for entry in inputs)

    def lift_attributes(self, written: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """Lift what the trace keeps as attributes, and tensors that the graph does not know yet."""
        graph, root = self._tracer.graph, self._tracer.root
        writes = {id(tensor) for tensor in written}
        missing = {id(tensor): tensor for tensor in others}
        for node in list(graph.find_nodes(op="get_attr")):
            value = getattr(root, str(node.target))
            if isinstance(value, torch.Tensor):
                placeholder = self.lift(value, id(value) in missing, next(iter(node.users), None))
                missing.pop(id(value), None)
                node.replace_all_uses_with(placeholder)
                graph.erase_node(node)
        for name, value in [*root.named_buffers(recurse=False), *list(vars(root).items())]:
            if isinstance(value, torch.Tensor):
                delattr(root, name)
        for identity, tensor in missing.items():
            self.lift(tensor, identity in writes)

    def lift(self, value: torch.Tensor, written: bool, user: Node | None = None) -> Node:
        """The placeholder of a tensor: a buffer if it is ``written``, else a constant. ``user``: what uses it."""
        position = next(
            (n for n, entry in enumerate(self._inputs) if entry.kind is InputKind.USER_INPUT), len(self._inputs)
        )
        placeholders = self._tracer.graph.find_nodes(op="placeholder")
        for number, entry in enumerate(self._inputs[:position]):
            if entry.value is value:
                return placeholders[number]  # type: ignore[no-any-return]
        if isinstance(value, FakeTensor) and not self._takes_fakes:
            raise _computed_unseen(value, user)
        kind = InputKind.BUFFER if written else InputKind.CONSTANT_TENSOR
        name = fresh_name(f"c_lifted_tensor_{self._lifted}", {entry.name for entry in self._inputs})
        target, persistent = f"lifted_tensor_{self._lifted}", False if written else None
        made = TracedInput(kind, name, target, value, persistent=persistent, fake=value, edge=gradient_edge(value))
        self._inputs.insert(position, made)
        self._lifted += 1
        after = placeholders[position - 1] if position else None
        graph = self._tracer.graph
        with graph.inserting_after(after) if after is not None else graph.inserting_before():
            node: Node = graph.placeholder(name)
        node.meta["val"] = self._snapshot(value)
        track(self._tracer, value, node)  # a backward may use it as well
        return node


def _computed_unseen(value: FakeTensor, user: Node | None) -> UnsupportedProgramError:
    origin = None if user is None else user.meta.get("stack_trace")
    used = "given to the caller" if user is None else f"used by {user.target}"
    return UnsupportedProgramError(
        f"a tensor of size {tuple(value.size())} and {value.dtype}, {used}, is a fake one of unknown origin",
        why="another thread computed it, or code that turns dispatch modes off, or it is left from an earlier capture",
        hint="compute it in the thread that runs the program, with its modes on",
        at=origin.location if isinstance(origin, Origin) else None,
    )
