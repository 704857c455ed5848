"""Finds a part of a view in a part of the tensor that the storage was made for.

Invariant: the elements are those of the view. Limits: views that take dimensions of that tensor, or ranges of them, in
any order; and parts within few of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.aliasing.geometry import Layout
from functionalize.deferred.shards.rules import Window


@dataclass(frozen=True)
class SourcePart:
    """A part of a tensor, and how to read a part of a view from it."""

    window: Window
    read: Callable[[torch.Tensor], torch.Tensor]


def part_behind(whole: Layout, view: Layout, window: Window) -> SourcePart | None:
    """The part of a contiguous tensor that has a part of a view of it; None where it would be most of the tensor."""
    strides = [math.prod(whole.size[dim + 1 :]) for dim in range(len(whole.size))]
    formats = {(layout.dtype, layout.conj, layout.neg) for layout in (whole, view)}
    if len(formats) > 1 or not strides or tuple(whole.stride) != tuple(strides) or 0 in whole.size:
        return None
    return _by_dimension(whole, view, window) or _by_rows(whole, view, window)


def _by_dimension(whole: Layout, view: Layout, window: Window) -> SourcePart | None:
    at, rest = [], int(view.offset - whole.offset)
    for stride in whole.stride:
        at.append(rest // stride)
        rest %= stride
    dims: dict[int, int] = {}  # by dimension of the view: that of the whole
    for dim, (size, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        same_stride = [axis for axis, step in enumerate(whole.stride) if step == stride and axis not in dims.values()]
        candidates = [axis for axis in same_stride if at[axis] + size <= whole.size[axis]]
        if size != 1 and not candidates:
            return None
        if size != 1:
            dims[dim] = candidates[0]
    if window.dim not in dims:
        return None
    own = dims[window.dim]
    inner = Window(own, at[own] + window.start, at[own] + window.stop)
    at[own] = 0

    def read(part: torch.Tensor) -> torch.Tensor:
        stride = [part.stride(dims[dim]) if dim in dims else 1 for dim in range(len(view.size))]
        offset = sum(start * step for start, step in zip(at, part.stride(), strict=True))
        return part.as_strided(window.size(view.size), stride, offset)

    return SourcePart(inner, read)


def _by_rows(whole: Layout, view: Layout, window: Window) -> SourcePart | None:
    size, row = window.size(view.size), int(whole.stride[0])
    low = int(view.offset - whole.offset) + window.start * int(view.stride[window.dim])
    span: Any = sum((count - 1) * stride for count, stride in zip(size, view.stride, strict=True))
    if 0 in size or low < 0:
        return None
    first, last = low // row, (low + int(span)) // row + 1
    if last - first > whole.size[0] // 2:
        return None
    return SourcePart(Window(0, first, last), lambda part: part.as_strided(size, view.stride, low - first * row))
