"""Specs describe the values of nodes after their fake tensors are dropped.

Invariant: each node of the recording has a spec. Limits: strided tensors; for others `spec_of` returns None.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from functionalize._torch import pytree


class Spec(NamedTuple):
    """Size, strides, dtype and device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return math.prod(self.size)

    @property
    def contiguous(self) -> bool:
        """Whether the elements are contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    def empty(self, device: torch.device) -> torch.Tensor:
        """An uninitialized tensor with these size, strides and dtype."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


def specs_of(value: Any) -> Any:
    """The values, with a spec in the place of each tensor."""
    return pytree.tree_map_only(torch.Tensor, _of_tensor, value)


def _of_tensor(tensor: torch.Tensor) -> Spec | None:
    if tensor.layout is not torch.strided:
        return None
    return Spec(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.device)


def spec_of(node: Node) -> Spec | None:
    """The spec of a node whose value is one tensor, else None."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        value = _of_tensor(value)
    return value if isinstance(value, Spec) else None
