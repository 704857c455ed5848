"""Ops that rely on the strides of their arguments: that several have the same, or how another op made a result.

Autograd's formulas ensure that by the strides of handles; a value may have others (Note [Values may have other strides
than their handles]). So these ops run on values with the strides of the handles.

Invariant: the elements of a value do not change. Limits: of a handle with gaps only the order of dimensions is kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import decided, on_handles, pytree, steps_over, unbacked
from functionalize._torch.tensors import suggest_memory_format
from functionalize.aliasing.geometry import Layout, hint, size_hint
from functionalize.aliasing.tensor_queries import is_contiguous, is_plain_strided, same_strides
from functionalize.aliasing.view_rules import Value
from functionalize.ops import traits
from functionalize.refusals.writes import DATA_DEPENDENT_STRIDES
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.writing_call import Kwargs

aten = torch.ops.aten


def with_aligned_bias(context: FunctionalizationContext, func: Any, args: list[Any]) -> list[Any]:
    """Arguments of an op of `ALIGNED_BIAS`, all of them values, with gaps between the rows of its bias."""
    place = traits.ALIGNED_BIAS[func]
    bias = args[place] if len(args) > place else None
    if bias is None or is_aligned(bias):
        return args
    strides: list[Any] = [1]
    for size in (-(-bias.size(-1) // traits.ALIGNMENT) * traits.ALIGNMENT, *reversed(bias.size()[1:-1])):
        strides.insert(0, strides[0] * size)
    call = context.executor.call
    unset = call(aten.empty_strided.default, list(bias.size()), strides, dtype=bias.dtype, device=bias.device)
    return [*args[:place], call(aten.copy.default, unset, bias), *args[place + 1 :]]


def is_aligned(bias: torch.Tensor) -> bool:
    """Whether the rows of a bias begin where the kernels need them."""
    *outer, last = bias.stride()
    return last == 1 and all(hint(stride) % traits.ALIGNMENT == 0 for stride in outer)


def trusted(context: FunctionalizationContext, func: Any, args: Sequence[Any], kwargs: Kwargs) -> tuple[Any, Kwargs]:
    """Arguments of an op of `TRUSTS_STRIDES`, with values whose strides it may take for those of the handles."""
    if func in traits.FACTORS_BY_STRIDES:
        return (contiguous_alike(context, args[0]), *args[1:]), kwargs
    if func in traits.NEEDS_ALIGNED_ROWS:
        return _with_values(functools.partial(_with_aligned_rows, context), args, kwargs)
    if func in traits.CHOOSES_KERNEL:
        return _with_values(functools.partial(_in_memory_format, context), args, kwargs)
    return values_like_handles(context, args, kwargs)


def _with_values(value_of: Callable[[torch.Tensor], Value], args: Sequence[Any], kwargs: Kwargs) -> tuple[Any, Kwargs]:
    """Arguments with handles replaced by values."""
    values: tuple[Any, Kwargs] = pytree.tree_map_only(torch.Tensor, value_of, (tuple(args), kwargs))
    return values


def _in_memory_format(context: FunctionalizationContext, handle: torch.Tensor) -> Value:
    """A handle's value if kernels see both in one memory format, else a copy in that of the handle."""
    value, wanted = context.value(handle), suggest_memory_format(handle)
    same = suggest_memory_format(value) == wanted
    return value if same else context.executor.call(aten.clone.default, value, memory_format=wanted)


def _with_aligned_rows(context: FunctionalizationContext, handle: torch.Tensor) -> Value:
    """A handle's value if it is no matrix or surely aligned; else a copy, dense along the rows if the handle is."""
    value = context.value(handle)
    if value.dim() < 2 or _has_aligned_rows(value):
        return value
    *_, down, across = handle.stride()
    dense = value.dim() - (2 if type(down) is int and down == 1 and across != 1 else 1)
    order = [dim for dim in range(value.dim()) if dim != dense] + [dense]
    step = traits.ALIGNED_BYTES // value.itemsize
    strides: list[Any] = [1] * value.dim()
    strides[order[-2]] = -(-value.size(dense) // step) * step
    for outer, inner in zip(reversed(order[:-2]), reversed(order[:-1]), strict=False):
        strides[outer] = strides[inner] * value.size(inner)
    options = {"dtype": value.dtype, "device": value.device}
    unset = context.executor.call(aten.empty_strided.default, list(value.size()), strides, **options)
    return context.executor.call(aten.copy.default, unset, value)


def _has_aligned_rows(matrix: torch.Tensor) -> bool:
    """Whether rows or columns are dense, and the next begins where kernels need it, whatever the sizes of a call."""
    down, across = matrix.stride()[-2:]
    leading = across if type(down) is int and down == 1 else down
    return type(leading) is int and leading * matrix.itemsize % traits.ALIGNED_BYTES == 0


def contiguous_alike(context: FunctionalizationContext, handle: torch.Tensor) -> Value:
    """A handle's value that is contiguous if the handle is; else a copy that is not, its matrices column by column."""
    value = context.value(handle)
    if is_contiguous(handle):
        return contiguous(context, value)
    if not is_contiguous(value):
        return value
    *batch, row, column = range(handle.dim())
    return context.executor.call(aten.copy.default, empty_in_order(context, handle, [*batch, column, row]), value)


def values_like_handles(context: FunctionalizationContext, args: Sequence[Any], kwargs: Kwargs) -> tuple[Any, Kwargs]:
    """Arguments with handles replaced by values with the handles' strides."""
    return _with_values(functools.partial(value_like_handle, context), args, kwargs)


def value_like_handle(context: FunctionalizationContext, handle: torch.Tensor) -> Value:
    """A handle's value with the handle's strides; for a handle with gaps, in the same order without gaps."""
    value = context.value(handle)
    if value is handle or not is_plain_strided(handle) or same_strides(value, handle):
        return value
    order = order_of(context, handle)
    if order == sorted(order):
        return contiguous(context, value)
    return context.executor.call(aten.copy.default, empty_in_order(context, handle, order), value)


def contiguous(context: FunctionalizationContext, value: Value) -> Value:
    """A value itself if it is contiguous, else a copy that is."""
    if is_contiguous(value):
        return value
    return context.executor.call(aten.clone.default, value, memory_format=torch.contiguous_format)


def empty_in_order(context: FunctionalizationContext, handle: torch.Tensor, order: Sequence[int]) -> Value:
    """An uninitialized dense tensor whose dimensions have the handle's order in storage."""
    strides: list[Any] = [1] * handle.dim()
    for outer, inner in zip(reversed(order[:-1]), reversed(order), strict=False):
        strides[outer] = strides[inner] * handle.size(inner)
    options = {"dtype": handle.dtype, "device": handle.device}
    return context.executor.call(aten.empty_strided.default, list(handle.size()), strides, **options)


def order_of(context: FunctionalizationContext, handle: torch.Tensor) -> list[int]:
    """The dimensions in the order in which a kernel visits a tensor like the handle, outermost first.

    Raises:
        UnsupportedMutationError: the order is data-dependent.
    """
    layout = Layout.of(handle)
    if layout.contiguous or not is_plain_strided(handle):
        return list(range(handle.dim()))
    if not unbacked((*layout.size, *layout.stride)):
        return Layout.of(context.executor.on_handles(aten.empty_like.default, (handle,), {})).outermost_first
    sizes, strides = list(map(size_hint, layout.size)), list(map(size_hint, layout.stride))
    alike = on_handles(aten.empty_strided.default, (sizes, strides), {"device": "meta"})
    order = Layout.of(on_handles(aten.empty_like.default, (alike,), {})).outermost_first
    decisive = [dim for dim in order if strides[dim] and sizes[dim] != 1]
    for outer, inner in itertools.combinations(decisive, 2):
        if not _is_further_out(handle, layout, outer, inner):
            raise DATA_DEPENDENT_STRIDES.error(op=context.op, outer=outer, inner=inner)
    return order


def _is_further_out(handle: torch.Tensor, layout: Layout, outer: int, inner: int) -> bool:
    """Whether a dimension is further out than another, or the two have no order; asks if that is data-dependent."""
    size, other_size = layout.size[outer], layout.size[inner]
    stride, other_stride = layout.stride[outer], layout.stride[inner]
    plain = type(stride) is int and type(other_stride) is int
    if stride > other_stride if plain else steps_over(handle, outer, inner):
        return True
    further_out = size >= other_size if plain else stride > other_stride
    return any(decided(condition) for condition in (further_out, size <= 1, other_size <= 1))
