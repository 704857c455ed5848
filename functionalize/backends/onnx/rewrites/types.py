"""Operators that ONNX has for other types alone: computed in one of these, and converted back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite, tensor_of

aten = torch.ops.aten
_NOT_CHOSEN = frozenset({torch.bool, torch.int8, torch.int16})  # for which ONNX Runtime's `Where` has no kernel
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
_TRUTHS = frozenset({torch.bool})
_ROWS = {  # by the types that ONNX's operator does not take
    _NARROW: (aten.neg.default, aten.relu.default),
    _TRUTHS: (
        *(aten.max.dim, aten.min.dim, aten.sort.default, aten.sort.stable, aten.topk.default),
        *(aten.cummax.default, aten.cummin.default),
    ),
}


def _widened(value: Any) -> Any:
    return value.int() if isinstance(value, torch.Tensor) else value


def _through_32_bits(op: Any, types: frozenset[torch.dtype]) -> Rewrite:
    """Whole numbers wrap around in the end as they do on the way."""

    def converted(*args: Any, **kwargs: Any) -> Any:
        of = {one.dtype for one in args if isinstance(one, torch.Tensor)}
        if len(of) != 1 or not of <= types:
            return NotImplemented
        dtype, found = min(of, key=str), op(*map(_widened, args), **kwargs)
        if isinstance(found, torch.Tensor):
            return found.to(dtype) if found.dtype is torch.int32 else NotImplemented
        return found[0].to(dtype), *found[1:]

    return converted


for _types, _ops in _ROWS.items():
    for _op in _ops:
        rewrite(_op)(_through_32_bits(_op, _types))


# ONNX Runtime adds up, and compares, at the places of a scatter in these types alone, and says so when it runs.
_SCATTERED = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int32}


def _scattered(op: Any) -> Rewrite:
    """A scatter that reduces what goes to one place, in a type that has one."""

    def converted(values: Any, dim: int, index: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        wide = _SCATTERED.get(values.dtype)
        if wide is None:
            return NotImplemented
        return op(values.to(wide), dim, index, source.to(wide), *args, **kwargs).to(values.dtype)

    return converted


for _op in (aten.scatter_add.default, aten.scatter_reduce.two):
    rewrite(_op)(_scattered(_op))


@rewrite(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(base: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """As other scatters that add up; places are of 64 bits."""
    if any(one is not None and one.dtype is torch.int32 for one in indices):
        places = [one if one is None or one.dtype is not torch.int32 else one.long() for one in indices]
        return aten.index_put.default(base, places, values, accumulate)
    wide = _SCATTERED.get(base.dtype) if accumulate else None
    if wide is None:
        return NotImplemented
    return aten.index_put.default(base.to(wide), indices, values.to(wide), True).to(base.dtype)


@rewrite(aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)
def rounded(values: Any) -> Any:
    """Of whole numbers, which are."""
    return NotImplemented if values.is_floating_point() else aten.clone.default(values)


@rewrite(aten.isnan.default, aten.isinf.default)
def no_number(values: Any) -> Any:
    """No whole number is one."""
    if values.is_floating_point() or values.is_complex():
        return NotImplemented
    return aten.full.default(values.size(), False, dtype=torch.bool)


@rewrite(aten.where.self)
def where(condition: Any, one: Any, other: Any) -> Any:
    dtype = torch.promote_types(one.dtype, other.dtype)
    if dtype not in _NOT_CHOSEN:
        return NotImplemented
    return aten.where.self(condition, one.int(), other.int()).to(dtype)


@rewrite(aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther)
def where_of_numbers(condition: Any, one: Any, other: Any) -> Any:
    """Of two, of which some are no tensors."""
    dtype = torch.result_type(one, other)
    both = [value if isinstance(value, torch.Tensor) else aten.full.default([], value, dtype=dtype)
            for value in (one, other)]  # fmt: skip
    return aten.where.self(condition, *both)


@rewrite(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(values: Any, mask: Any, value: Any) -> Any:
    if values.dtype not in _NOT_CHOSEN:
        return NotImplemented
    value = tensor_of(value if isinstance(value, torch.Tensor) else int(value), torch.int32)
    return aten.where.self(mask, value, values.int()).to(values.dtype)


@rewrite(aten.stack.default)
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Of tensors of several types."""
    dtypes = {one.dtype for one in tensors}
    if len(dtypes) == 1:
        return NotImplemented
    return aten.stack.default([one.to(reduce(torch.promote_types, dtypes)) for one in tensors], dim)
