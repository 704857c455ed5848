"""Functional ops that address the storage of their argument: in terms of views and writes, which know where it lies.

A value may have other strides than its handle, and starts where it likes. So such an op cannot run on one.

Invariant: each function has the signature and the result of the op that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def _as_strided_copy(x: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> Any:
    part = aten.as_strided.default(x, size, stride, storage_offset)
    return aten.clone.default(part, memory_format=torch.contiguous_format)


def _as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Any:
    whole = aten.as_strided.default(x, [x.untyped_storage().nbytes() // x.dtype.itemsize], [1], 0)
    copy = aten.as_strided.default(aten.clone.default(whole), x.size(), x.stride(), x.storage_offset())
    aten.copy_.default(aten.as_strided.default(copy, size, stride, storage_offset), source)
    return copy


BY_STORAGE: dict[Any, Callable[..., Any]] = {
    aten.as_strided_copy.default: _as_strided_copy,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
