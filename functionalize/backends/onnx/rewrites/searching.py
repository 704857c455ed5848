"""Where elements are: in order, between boundaries, and those that are chosen.

Invariant: what is not a number comes behind all others, as in eager.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite

aten = torch.ops.aten


@rewrite(aten.nonzero.default)
def nonzero(values: Any) -> Any:
    """Of a tensor without dimensions, whose places are rows of no numbers."""
    return NotImplemented if values.dim() else aten.nonzero.default(values.reshape(1)).narrow(1, 0, 0)


@rewrite(aten.nonzero.default)
def nonzero_of_wide(values: Any) -> Any:
    """Of a type for which the engine has no kernel."""
    return aten.nonzero.default(aten.ne.Scalar(values, 0)) if values.dtype is torch.float64 else NotImplemented


@rewrite(aten.unique_consecutive.default)
def unique_consecutive(
    values: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The first of each run of equal elements."""
    flat = values.reshape(-1)
    if dim is not None or flat.numel() == 0:
        return NotImplemented
    first = torch.cat([torch.ones_like(flat[:1], dtype=torch.bool), flat[1:] != flat[:-1]])
    found = aten.index.Tensor(flat, [first])
    none = aten.full.default([0], 0, dtype=torch.int64)
    inverse = first.to(torch.int64).cumsum(0) - 1
    if not return_counts:
        return found, inverse.reshape(values.size()) if return_inverse else none, none
    counts = aten.scatter_add.default(torch.zeros_like(found, dtype=torch.int64), 0, inverse, torch.ones_like(inverse))
    return found, inverse.reshape(values.size()) if return_inverse else none, counts


@rewrite(aten.masked_select.default)
def masked_select(values: Any, mask: Any) -> Any:
    values, mask = torch.broadcast_tensors(values, mask)
    return aten.index.Tensor(values.reshape(-1), [mask.reshape(-1)])


@rewrite(aten.nonzero_static.default)
def nonzero_static(values: Any, *, size: int, fill_value: int = -1) -> Any:
    """The first places in order, of which each element knows its own; those beyond have the number that fills."""
    if type(values.numel()) is not int:
        return NotImplemented
    flat = aten.ne.Scalar(values, 0).reshape(-1).to(torch.int64)
    count, ranks = flat.sum(), flat.cumsum(0) - 1
    ranks = torch.where((flat > 0) & (ranks < size), ranks, size)
    whole = aten.arange.default(values.numel(), dtype=torch.int64)
    found = aten.scatter.src(aten.full.default([size + 1], 0, dtype=torch.int64), 0, ranks, whole).narrow(0, 0, size)
    filled = aten.arange.default(size, dtype=torch.int64) >= count
    columns, step = list[Any](), 1
    for length in reversed(values.size()):
        columns.insert(0, torch.where(filled, fill_value, (found // step) % max(length, 1)))
        step *= max(length, 1)
    return torch.stack(columns, 1) if columns else aten.full.default([size, 0], 0, dtype=torch.int64)


def _place(values: Any, boundaries: Any, out_int32: bool, right: bool) -> Any:
    """Where the first boundary above is, else how many there are; they stand along one dimension more."""
    above = (aten.gt if right else aten.ge).Tensor(boundaries, values.unsqueeze(-1)).to(torch.int32)
    found = aten.argmax.default(torch.cat([above, torch.ones_like(values, dtype=torch.int32).unsqueeze(-1)], -1), -1)
    return found.to(torch.int32) if out_int32 else found


@rewrite(aten.bucketize.Tensor)
def bucketize(values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _place(values, boundaries, out_int32, right)


@rewrite(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    boundaries: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Each row of values between the row of boundaries that stands at its place, or all between one row."""
    values = values if isinstance(values, torch.Tensor) else aten.full.default([], values, dtype=boundaries.dtype)
    ordered = boundaries if sorter is None else boundaries.gather(-1, sorter)
    ordered = ordered if ordered.dim() == 1 else ordered.unsqueeze(-2)
    return _place(values, ordered, out_int32, right or side == "right")


@rewrite(aten.sort.stable)
def sort(values: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """ONNX's operator gives equal elements in their order."""
    return aten.sort.default(values, dim, descending)


def _whole(of_dim: Rewrite) -> Rewrite:
    """Of all elements."""

    def of_all(values: Any) -> Any:
        found = of_dim(values.reshape(-1), 0)
        return found if found is NotImplemented else found[0]

    return of_all


def _ordered(values: Any, dim: int, place: Any, keepdim: bool) -> Any:
    """The element at a place of the order along a dimension, and where it is; ``place``: as a tensor with that size."""
    found = [one.gather(dim, place) for one in aten.sort.default(values, dim)]
    return tuple(found if keepdim else [one.squeeze(dim) for one in found])


def _at(values: Any, dim: int, place: Any) -> Any:
    size = [1 if one == dim % values.dim() else values.size(one) for one in range(values.dim())]
    return aten.full.default(size, place, dtype=torch.int64)


@rewrite(aten.kthvalue.default)
def kthvalue(values: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not values.dim():
        return aten.clone.default(values), aten.full.default([], 0, dtype=torch.int64)
    return _ordered(values, dim, _at(values, dim, k - 1), keepdim)


@rewrite(aten.median.dim)
def median(values: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower one of two; what is NaN counts for all."""
    if not values.numel():
        return NotImplemented
    if not values.dim():
        return aten.clone.default(values), aten.full.default([], 0, dtype=torch.int64)
    found, index = _ordered(values, dim, _at(values, dim, (values.size(dim) - 1) // 2), keepdim)
    if values.is_floating_point():
        none = aten.isnan.default(values).to(torch.int64)
        some = none.sum([dim], keepdim=keepdim) > 0
        found = torch.where(some, math.nan, found)
        index = torch.where(some, aten.argmax.default(none, dim, keepdim), index)
    return found, index


@rewrite(aten.nanmedian.dim)
def nanmedian(values: Any, dim: int, keepdim: bool = False) -> Any:
    """The same of what is a number."""
    if not values.is_floating_point():
        return median(values, dim, keepdim)
    if not values.dim() or not values.numel():
        return NotImplemented if values.dim() else median(values, dim)
    none = aten.isnan.default(values)
    count = aten.logical_not.default(none).to(torch.int64).sum([dim], keepdim=True)
    place = ((count - 1) // 2).clamp(min=0)
    found, index = _ordered(torch.where(none, math.inf, values), dim, place, keepdim)
    count = count if keepdim else count.squeeze(dim)
    return torch.where(count == 0, math.nan, found), torch.where(count == 0, 0, index)


rewrite(aten.median.default)(_whole(median))
rewrite(aten.nanmedian.default)(_whole(nanmedian))
