"""Antialiased interpolation and its gradient: a product with a matrix of weights along each dimension.

An element of the result covers a stretch of elements. Each counts by a filter of its distance to the middle, and all of
an element's weights add up to one.

Invariant: a row computes what torch's kernels compute, 16 bits in 32. Limits: floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functionalize.backends.decompositions.families.backwards import along, transposed

aten = torch.ops.aten
Function = Callable[..., Any]


def _linear(distance: Any) -> Any:
    return (1 - distance).clamp(min=0)


def _cubic(distance: Any) -> Any:
    """Keys' filter with -1/2 for its slope."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


def _step(before: Any, after: Any, align_corners: bool, scale: float | None) -> Any:
    """How far apart in the image the middles of two neighbours of the result are."""
    if align_corners:
        return (before - 1) / (after - 1) if after > 1 else 0.0
    return before / after if scale is None or scale <= 0 else 1 / scale


def _weights(filtered: Function, reach: int, before: Any, after: Any, step: Any, like: Any) -> Any:
    """Those of each element along a dimension, in rows, for each element of the result."""
    wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    options: Any = {"dtype": wide, "device": like.device}
    stretch = max(step, 1.0)
    middle = (torch.arange(after, **options) + 0.5) * step
    first, last = (middle - reach * stretch + 0.5).trunc(), (middle + reach * stretch + 0.5).trunc()
    places = torch.arange(before, **options).unsqueeze(1)
    inside = torch.logical_and(places >= first, places < last)
    weights = torch.where(inside, filtered((places - middle + 0.5).abs() / stretch), 0)
    total = weights.sum(0, keepdim=True)
    return weights / torch.where(total == 0, 1, total)  # a scale may lead past the image


def _rows(name: str, filtered: Function, reach: int) -> dict[Any, Function]:
    """``reach``: of the filter, in elements of what is larger."""

    def matrices(like: Any, sizes: Any, output_size: Any, align_corners: bool, scales: Any) -> list[Any]:
        found = []
        for before, after, scale in zip(sizes, output_size, scales or (None, None), strict=True):
            step = _step(before, after, align_corners, scale)
            found.append(_weights(filtered, reach, before, after, step, like))
        return found

    def forward(x: Any, output_size: Any, align_corners: bool, *scales: float | None) -> Any:
        if not x.is_floating_point():
            return NotImplemented
        found = matrices(x, x.size()[2:], output_size, align_corners, scales)
        made = x.to(found[0].dtype)
        for dim, matrix in enumerate(found):
            made = along(made, dim - 2, matrix)
        return made.to(x.dtype)

    def backward(gradient: Any, output_size: Any, input_size: Any, align_corners: bool, *scales: float | None) -> Any:
        found = matrices(gradient, input_size[2:], output_size, align_corners, scales)
        return transposed(gradient, input_size[2:], lambda identity, dim, size: found[dim])

    return {getattr(aten, name).default: forward, getattr(aten, f"{name}_backward").default: backward}


ANTIALIASED = _rows("_upsample_bilinear2d_aa", _linear, 1) | _rows("_upsample_bicubic2d_aa", _cubic, 2)
