"""Records operations as nodes. Data-dependent ones are computed, from the slice of the graph that they need.

Invariant: the program gets the number that eager would give it. Limits: operators that torch tags as data-dependent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import OpOverload, pytree
from functionalize._torch.fakes import FakeFactory, below_dispatch
from functionalize._torch.symbols.tracing import track
from functionalize.tracing.recording_mode import Annotate, RecordingMode

_NUMBERS, _SIZES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_INDEX = torch.ops.aten.index.Tensor
_MASKS = (torch.bool, torch.uint8)


class DeferredRecorder(RecordingMode):
    """Records the operations of all sessions into one graph."""

    def __init__(self, factory: FakeFactory, annotate: Annotate, answer: Callable[[list[Node]], list[Any]]) -> None:
        super().__init__(factory, annotate, symbolic=False)
        self._annotate_new, self._answer = annotate, answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if _is_data_dependent(func, args):
            return self._answered(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of dispatching an op to this mode."""
        if _is_data_dependent(func, args):
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


def _is_data_dependent(func: Any, args: Sequence[Any]) -> bool:
    """Whether an op returns a number that depends on tensor values, or a tensor whose size does."""
    if not isinstance(func, OpOverload) or not (_NUMBERS in func.tags or _SIZES in func.tags):
        return False
    if func is _INDEX:
        return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in args[1])
    return True
