"""Records operations as nodes. Data-dependent ones are computed, from the slice of the graph that they need.

Invariant: the program gets the number that eager would give it. Limits: operators that torch tags as data-dependent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import pytree
from functionalize._torch.fakes import FakeFactory, below_dispatch
from functionalize._torch.symbols.tracing import track
from functionalize.ops.calls import is_data_dependent
from functionalize.tracing.recording_mode import Annotate, RecordingMode


class DeferredRecorder(RecordingMode):
    """Records the operations of all sessions into one graph."""

    def __init__(self, factory: FakeFactory, annotate: Annotate, answer: Callable[[list[Node]], list[Any]]) -> None:
        super().__init__(factory, annotate, symbolic=False)
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if is_data_dependent(func, args):
            return self._answered(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of dispatching an op to this mode."""
        if is_data_dependent(func, args):
            return self._answered(func, args, kwargs)
        return super().run(func, args, kwargs)

    def _answered(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a data-dependent op: a number, or tensors of data-dependent sizes."""
        node = self.op_node(func, args, kwargs)
        (value,) = self._answer([node])
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
            return value
        with below_dispatch():
            out = pytree.tree_map_only(torch.Tensor, self.factory.like_real, value)
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, self.factory.snapshot, out)
            if isinstance(out, torch.Tensor):
                track(self.tracer, out, node)
            else:
                for index, leaf in enumerate(out):
                    track(self.tracer, leaf, self.item_of(node, index, node.meta["val"][index]))
        return out
