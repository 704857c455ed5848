"""Questions about one tensor whose answers no tracer records and which guard no symbol.

Invariant: nothing here changes a tensor or dispatches to a mode. Limits: plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from functionalize._torch import FakeTensor, is_symbolic, on_handles
from functionalize.aliasing.geometry import Layout, same


def is_contiguous(tensor: torch.Tensor) -> bool:
    """``tensor.is_contiguous()``, with the arithmetic on symbols hidden from tracers."""
    if type(tensor) is FakeTensor and not is_symbolic(tensor) and Layout.of(tensor).contiguous:
        return True  # torch would find the same, less quickly
    return bool(on_handles(torch.Tensor.is_contiguous, (tensor,), {}))


def repeats(tensor: torch.Tensor) -> bool:
    """Whether several positions of a tensor share one element."""
    return bool(repeated(tensor))


def repeated(tensor: torch.Tensor) -> list[int]:
    """The dimensions along which all positions share one element."""
    if tensor.layout is not torch.strided:
        return []
    dims = enumerate(zip(tensor.size(), tensor.stride(), strict=True))
    return [
        dim
        for dim, (size, stride) in dims
        if type(stride) is int and stride == 0 and not (type(size) is int and size <= 1)
    ]


def counts_elements(handle: torch.Tensor) -> bool:
    """Whether ``copy_`` requires equally many specified elements: then ``resize_as_sparse_`` must run first."""
    return handle.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def same_strides(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape have equal strides; for symbols, equal expressions."""
    return same(first.stride(), second.stride())


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided, and neither quantized nor nested, as functional variants require."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def tensor_leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments; an op nests them at most one list deep."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (leaf for leaf in arg if isinstance(leaf, torch.Tensor))
