"""What runs along a dimension, and windows.

Invariant: of equal elements, and of those that are no numbers, the last one counts, as in eager. Limits: sizes that are
known; products of floats step by step, and so of few, for another order overflows elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from functionalize._torch.onnx import higher_order_scan
from functionalize.backends.decompositions.opmath import wide
from functionalize.backends.onnx.rewrites.arithmetic.numbers import logaddexp
from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite

aten = torch.ops.aten
_WIDER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
_MOST_STEPS = 256
TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.map_impl: lambda body, rows, more: higher_order_scan(body, [], rows, more),
}
"""Operators, by functions of values of ONNX that give such."""


@rewrite(aten.cumprod.default)
def cumprod(values: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Of floats in the precision of eager's kernel."""
    whole = not (values.is_floating_point() or values.is_complex())
    dtype = dtype or (torch.int64 if whole else values.dtype)
    if dtype.is_complex or values.is_complex() or dtype is torch.bool:
        return NotImplemented
    if not values.dim():
        return aten.clone.default(values.to(dtype))
    size, found = values.size(dim), values.to(dtype)
    if type(size) is not int or (dtype.is_floating_point and size > _MOST_STEPS):
        return NotImplemented
    if not dtype.is_floating_point:
        return _doubling(lambda one, other: (one[0] * other[0],), (found,), dim)[0]
    parts = list(found.to(_WIDER.get(dtype, dtype)).split(1, dim))
    for place in range(1, len(parts)):
        parts[place] = parts[place - 1] * parts[place]
    return torch.cat(parts, dim).to(dtype) if parts else aten.clone.default(found)


def _doubling(joined: Callable[[Any, Any], Any], found: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    """Each joined with what is 1, 2, 4, ... places before."""
    size, reach = found[0].size(dim), 1
    while reach < size:
        before = [one.narrow(dim, 0, size - reach) for one in found]
        made = joined(before, [one.narrow(dim, reach, size - reach) for one in found])
        pairs = zip(found, made, strict=True)
        found = tuple(torch.cat([one.narrow(dim, 0, reach), more], dim) for one, more in pairs)
        reach *= 2
    return tuple(map(aten.clone.default, found))


@rewrite(aten.logcumsumexp.default)
def logcumsumexp(x: Any, dim: int) -> Any:
    """Where the arguments tell the size, all before at once."""
    if not x.dim() or x.is_complex():
        return x.clone() if not x.dim() else NotImplemented
    size, found = x.size(dim), wide(x)
    if type(size) is int:
        return _doubling(lambda before, now: (logaddexp(now[0], before[0]),), (found,), dim)[0].to(x.dtype)
    places = aten.arange.default(size)
    seen = places.unsqueeze(0) <= places.unsqueeze(1)
    before = found.movedim(dim, -1).unsqueeze(-2)
    return aten.where.ScalarOther(seen, before, float("-inf")).logsumexp(-1).movedim(-1, dim).to(x.dtype)


def _extreme(compare: Any) -> Rewrite:
    def chosen(before: Any, now: Any) -> Any:
        takes = compare(now[0], before[0])
        if now[0].is_floating_point():
            takes = (takes & ~aten.isnan.default(before[0])) | aten.isnan.default(now[0])
        return tuple(torch.where(takes, one, other) for one, other in zip(now, before, strict=True))

    def cumulated(values: Any, dim: int) -> Any:
        if values.dtype is torch.bool or values.is_complex():
            return NotImplemented
        if not values.dim():
            return aten.clone.default(values), aten.full.default([], 0, dtype=torch.int64)
        size = values.size(dim)
        if type(size) is not int:
            return NotImplemented
        shape = [-1] + [1] * (values.dim() - dim % values.dim() - 1)
        places = aten.arange.default(size, dtype=torch.int64).reshape(shape).expand(values.size())
        return _doubling(chosen, (values, places), dim)

    return cumulated


rewrite(aten.cummax.default)(_extreme(aten.ge.Tensor))
rewrite(aten.cummin.default)(_extreme(aten.le.Tensor))


def _hamming(length: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any) -> Any:
    dtype = options.get("dtype") or torch.get_default_dtype()
    if type(length) is not int or dtype not in (torch.float32, torch.float64):
        return NotImplemented
    if length < 2:
        return aten.full.default([length], 1, dtype=dtype)
    turn = 2 * math.pi / (length if periodic else length - 1)
    return (aten.arange.default(length, dtype=torch.int64).to(dtype) * turn).cos() * -beta + alpha


for _name in aten.hamming_window.overloads():
    if not _name.endswith("out"):
        rewrite(getattr(aten.hamming_window, _name))(_hamming)
