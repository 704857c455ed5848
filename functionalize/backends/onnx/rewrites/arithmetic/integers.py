"""Whole numbers, exactly: the exporter, or ONNX Runtime's kernels, compute some of them by floats.

Invariant: as in eager, what is too large wraps around. Limits: what is decomposed behind the rows must not need them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import rewrite, tensor_of

aten, prims = torch.ops.aten, torch.ops.prims
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_MULTIPLIED = frozenset({torch.int32, torch.int64})  # of which ONNX has products of matrices


@rewrite(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide(one: Any, other: Any, *, rounding_mode: str | None) -> Any:
    dtype = torch.result_type(one, other)
    if rounding_mode is None or dtype not in _WHOLE:
        return NotImplemented
    divided = prims.div if rounding_mode == "trunc" else aten.floor_divide
    return divided.default(tensor_of(one, dtype), tensor_of(other, dtype))


@rewrite(aten.pow.Tensor_Scalar)
def power_of_all(base: Any, exponent: Any) -> Any:
    """By squares."""
    if base.dtype not in _WHOLE or not isinstance(exponent, (int, torch.SymInt)):
        return NotImplemented
    if type(exponent) is not int:
        return power(base, tensor_of(exponent, base.dtype))
    found = None if exponent else aten.full_like.default(base, 1)
    while exponent:
        if exponent % 2:
            found = base if found is None else found * base
        exponent //= 2
        base = base * base if exponent else base
    return aten.clone.default(found)


@rewrite(aten.pow.Scalar)
def power_of_one(base: Any, exponent: Any) -> Any:
    dtype = torch.result_type(base, exponent)
    return power(tensor_of(base, dtype), exponent) if dtype in _WHOLE else NotImplemented


@rewrite(aten.pow.Tensor_Tensor)
def power(base: Any, exponent: Any) -> Any:
    """By squares, one for each bit of the exponents; one that is negative leaves what is whole of a fraction."""
    dtype = torch.result_type(base, exponent)
    if dtype not in _WHOLE:
        return NotImplemented
    base, exponent = tensor_of(base, dtype), tensor_of(exponent, dtype)
    bits, signed = torch.iinfo(dtype).bits, torch.iinfo(dtype).min < 0
    found, square = tensor_of(1, dtype), base
    for bit in range(bits - signed):
        found = torch.where((exponent & (1 << bit)) != 0, found * square, found)
        square = square * square
    if signed:
        unit = (base == 1) | (base == -1)
        of_unit = torch.where((exponent & 1) != 0, base, base * base)
        found = torch.where(exponent < 0, torch.where(unit, of_unit, 0 * base), found)
    return found


@rewrite(aten.sum.default, aten.sum.dim_IntList, aten.nansum.default)
def sum_of_dims(
    values: Any, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """By a product with ones. Bools are too few to be counted wrongly."""
    wanted = dtype or torch.int64
    if values.dtype not in _WHOLE or wanted not in _WHOLE:
        return NotImplemented
    every = range(values.dim())
    dims = sorted({one % values.dim() for one in dim or every}) if every else []
    values = values.to(wanted if wanted in _MULTIPLIED else torch.int32)
    if dims:
        kept = [one for one in every if one not in dims]
        size = [1 if one in dims else values.size(one) for one in (every if keepdim else kept)]
        count: Any = math.prod(values.size(one) for one in dims)
        rows: Any = math.prod(values.size(one) for one in kept)
        order = [*kept, *dims]
        values = values if order == list(every) else values.permute(order)
        ones = aten.full.default([count, 1], 1, dtype=values.dtype)
        values = aten.mm.default(values.reshape([rows, count]), ones).reshape(size)
    return aten.clone.default(values.to(wanted))


@rewrite(aten.prod.default)
def product_of_all(values: Any, *, dtype: torch.dtype | None = None) -> Any:
    found = values.reshape([-1]) if values.dtype in _WHOLE else values
    return product(found, 0, dtype=dtype)


@rewrite(aten.prod.dim_int)
def product(values: Any, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """By a scatter that multiplies."""
    wanted = dtype or torch.int64
    if values.dtype not in _WHOLE or wanted not in _WHOLE or not values.dim():
        return NotImplemented
    dim %= values.dim()
    size = [1 if one == dim else values.size(one) for one in range(values.dim())]
    index = aten.full.default(values.size(), 0, dtype=torch.int64)
    ones = aten.full.default(size, 1, dtype=wanted)
    found = aten.scatter_reduce.two(ones, dim, index, values.to(wanted), "prod")
    return found if keepdim else found.squeeze(dim)


@rewrite(aten.addmm.default)
def added_product(added: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """ONNX Runtime has no such kernel. Factors are whole numbers, too."""
    if added.dtype not in _MULTIPLIED:
        return NotImplemented
    beta, alpha = (int(one) if isinstance(one, float) else one for one in (beta, alpha))
    return added * beta + aten.mm.default(one, other) * alpha


@rewrite(aten.relu.default)
def relu(values: Any) -> Any:
    """Of 64 bits, of which ONNX Runtime has none."""
    return aten.clamp.default(values, 0) if values.dtype is torch.int64 else NotImplemented
