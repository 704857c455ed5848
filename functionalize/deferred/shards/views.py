"""A part of a view of a memory, as a part of the tensor that the memory was made for.

Invariant: the elements are those that the view has there. Limits: views that take dimensions of that tensor, or parts
of them, in some order; and parts that lie in few of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from functionalize.aliasing.geometry import Layout
from functionalize.deferred.shards.rules import Window

Found = tuple[Window, Callable[[torch.Tensor], torch.Tensor]]


def part_behind(whole: Layout, view: Layout, window: Window) -> Found | None:
    """Which part of a contiguous tensor has a part of a view of it, and how the one is got from the other."""
    strides = [math.prod(whole.size[dim + 1 :]) for dim in range(len(whole.size))]
    kinds = {(one.dtype, one.conj, one.neg) for one in (whole, view)}
    if len(kinds) > 1 or not strides or tuple(whole.stride) != tuple(strides) or 0 in whole.size:
        return None
    return _by_dimension(whole, view, window) or _by_rows(whole, view, window)


def _by_dimension(whole: Layout, view: Layout, window: Window) -> Found | None:
    at, rest = [], int(view.offset - whole.offset)
    for stride in whole.stride:
        at.append(rest // stride)
        rest %= stride
    dims: dict[int, int] = {}  # of the view, which of the whole
    for dim, (size, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        found = [one for one, other in enumerate(whole.stride) if other == stride and one not in dims.values()]
        found = [one for one in found if at[one] + size <= whole.size[one]]
        if size != 1 and not found:
            return None
        if size != 1:
            dims[dim] = found[0]
    if window.dim not in dims:
        return None
    own = dims[window.dim]
    inner = Window(own, at[own] + window.start, at[own] + window.stop)
    at[own] = 0

    def of(part: torch.Tensor) -> torch.Tensor:
        stride = [part.stride(dims[dim]) if dim in dims else 1 for dim in range(len(view.size))]
        offset = sum(start * step for start, step in zip(at, part.stride(), strict=True))
        return part.as_strided(window.size(view.size), stride, offset)

    return inner, of


def _by_rows(whole: Layout, view: Layout, window: Window) -> Found | None:
    size, row = window.size(view.size), int(whole.stride[0])
    low = int(view.offset - whole.offset) + window.start * int(view.stride[window.dim])
    span: Any = sum((count - 1) * stride for count, stride in zip(size, view.stride, strict=True))
    if 0 in size or low < 0:
        return None
    first, last = low // row, (low + int(span)) // row + 1
    if last - first > whole.size[0] // 2:
        return None
    return Window(0, first, last), lambda part: part.as_strided(size, view.stride, low - first * row)
