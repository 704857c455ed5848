"""Random numbers in eager's order.

Kernels draw in the order of the storage, and by another algorithm where the tensor is contiguous. A value may have
other strides than its handle (Note [Values may have other strides than their handles]). If no mode below observes
us, the op runs on the handle itself. In a graph it runs on tensors which have the handles' strides, or on the value's
elements in the handle's storage order.

Invariant: each op draws once. Limits: in a graph, a handle with gaps draws as one without, except for ``normal_``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import decide_ones, on_handles, pytree
from functionalize.aliasing.geometry import hint
from functionalize.aliasing.tensor_queries import is_contiguous, same_strides, tensor_leaves
from functionalize.aliasing.view_rules import Value
from functionalize.ops import traits
from functionalize.ops.calls import draws
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.handlers.strides import (
    contiguous,
    empty_in_order,
    order_of,
    values_like_handles,
    with_aligned_bias,
)
from functionalize.transform.writing_call import Kwargs

aten = torch.ops.aten


def compute(context: FunctionalizationContext, op: Any, args: Sequence[Any], kwargs: Kwargs, *, writes: bool) -> Any:
    """Results, as values, of an op on handles; None if the op on values draws in eager's order or does not draw.

    ``writes``: whether the op stands for one that writes its first argument.
    """
    if not draws(op, args, kwargs):
        return None
    if kwargs.get("memory_format") not in (None, torch.preserve_format) or (
        op in traits.DRAWS_CONTIGUOUSLY and not writes
    ):
        return None
    handles, call = list(tensor_leaves(args, kwargs)), context.executor.call
    if op not in traits.DRAWS_BY_ELEMENT | traits.DRAWS_TO_FILL or len(handles) != 1:
        return _on_values_like_handles(context, op, args, kwargs)
    handle = handles[0]
    order = order_of(context, handle)
    back = sorted(range(len(order)), key=order.__getitem__)
    if op is aten.normal_functional.default and _is_large_with_gaps(handle, order):
        return _one_after_another(call, handle, order, *args[1:], **kwargs)
    longer = [dim for dim in order if hint(handle.size(dim)) != 1]  # the others do not matter for the order
    in_order = longer == sorted(longer)
    value = context.value(handle)
    if is_contiguous(value) if in_order else op not in traits.DRAWS_CONTIGUOUSLY and same_strides(value, handle):
        return None
    if op in traits.DRAWS_BY_ELEMENT:  # the elements in the order of the handle's storage
        substitute = contiguous(context, call(aten.permute.default, value, order))
    else:
        substitute = empty_in_order(context, handle, order)
    call_args, call_kwargs = pytree.tree_map_only(torch.Tensor, lambda _: substitute, (tuple(args), kwargs))
    out = call(op, *call_args, **call_kwargs)
    if op in traits.DRAWS_TO_FILL:
        return out
    return pytree.tree_map_only(torch.Tensor, lambda leaf: call(aten.permute.default, leaf, back), out)


def _on_values_like_handles(context: FunctionalizationContext, op: Any, args: Sequence[Any], kwargs: Kwargs) -> Any:
    """Results of the op on values with the handles' strides; None if all values have them."""
    if not context.executor.observed or not context.values_of(args, kwargs).strides_differ:
        return None
    call_args, call_kwargs = values_like_handles(context, args, kwargs)
    if op in traits.ALIGNED_BIAS:
        call_args = with_aligned_bias(context, op, call_args)
    return context.executor.call(op, *call_args, **call_kwargs)


_FAST = 16  # from this number of contiguous elements on `normal_` has another kernel


def _is_large_with_gaps(handle: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor may have so many elements, and has gaps between them; asks for sizes of 1, without gaps."""
    if handle.device.type != "cpu" or handle.layout is not torch.strided:
        return False
    count = on_handles(torch.Tensor.numel, (handle,), {})
    if (type(count) is int and count < _FAST) or is_contiguous(on_handles(torch.Tensor.permute, (handle, order), {})):
        return False
    decide_ones(handle.size())
    return not is_contiguous(on_handles(torch.Tensor.permute, (handle, order), {}))


def _one_after_another(call: Any, handle: torch.Tensor, order: Sequence[int], *args: Any, **kwargs: Any) -> Value:
    """Normal numbers for a handle, drawn one after another: into a tensor that is not contiguous, and has no gaps."""
    sizes = [handle.size(dim) for dim in reversed(order)]
    if sum(hint(size) != 1 for size in sizes) < 2:
        drawn = _in_a_row(call, handle.numel(), handle.dtype, *args, **kwargs)
        return call(aten.view.default, drawn, list(handle.size()))
    strides = list(itertools.accumulate(sizes[:-1], operator.mul, initial=1))
    unset = call(aten.empty_strided.default, sizes, strides, dtype=handle.dtype, device="cpu")
    drawn = call(aten.normal_functional.default, unset, *args, **kwargs)
    return call(aten.permute.default, drawn, [len(order) - 1 - order.index(dim) for dim in range(len(order))])


def _in_a_row(call: Any, count: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Value:
    """The same for one dimension: into rows, whose number divides ``count`` but for a rest."""
    rows = next((n for n in range(2, math.isqrt(count) + 1) if count % n == 0), 2) if type(count) is int else 2
    rest = count - count // rows * rows
    unset = call(aten.empty_strided.default, [rows, count // rows], [1, rows], dtype=dtype, device="cpu")
    drawn = call(aten.normal_functional.default, unset, *args, **kwargs)
    in_order = call(aten.view.default, call(aten.permute.default, drawn, [1, 0]), [-1])
    if type(rest) is int and rest == 0:
        return in_order
    unset = call(aten.empty.memory_format, [rest], dtype=dtype, device="cpu")
    return call(aten.cat.default, [in_order, call(aten.normal_functional.default, unset, *args, **kwargs)])


# Ops that run as other ops in a graph, dispatched to the program again: `out=` is filled in place, in the order of its
# storage, and the functional variant of `random_(low, high)` has a keyword of Python as its name, which no graph can
# print. Limits: kernels that draw for the elements one by one; `randperm`, `multinomial` draw in an order of their own.


def _rand(size: Sequence[Any], *, out: torch.Tensor, generator: Any = None) -> Any:
    return aten.uniform_.default(aten.resize_.default(out, size), generator=generator)


def _randn(size: Sequence[Any], *, out: torch.Tensor, generator: Any = None) -> Any:
    return aten.normal_.default(aten.resize_.default(out, size), generator=generator)


def _randint(high: int, size: Sequence[Any], *, out: torch.Tensor, generator: Any = None) -> Any:
    return _randint_from(0, high, size, out=out, generator=generator)


def _randint_from(low: int, high: int, size: Sequence[Any], *, out: torch.Tensor, generator: Any = None) -> Any:
    return _random_from(aten.resize_.default(out, size), low, high, generator=generator)


def _random_from(tensor: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> Any:
    if high is None:
        high = 1 + _largest(tensor.dtype)
    return aten.add_.Scalar(aten.random_.to(tensor, high - low, generator=generator), low)


def _largest(dtype: torch.dtype) -> int:
    """The largest number up to which a dtype has all integers."""
    if dtype is torch.bool:
        return 1
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _bernoulli(probability: torch.Tensor, *, out: torch.Tensor, generator: Any = None) -> Any:
    return aten.bernoulli_.Tensor(aten.resize_.default(out, probability.size()), probability, generator=generator)


def _normal(mean: float, std: float, size: Sequence[Any], *, out: torch.Tensor, generator: Any = None, **_: Any) -> Any:
    return aten.normal_.default(aten.resize_.default(out, size), mean, std, generator=generator)


def _normal_around(mean: torch.Tensor, std: float, *, out: torch.Tensor, generator: Any = None) -> Any:
    drawn = aten.normal_.default(aten.resize_.default(out, mean.size()), 0, std, generator=generator)
    return aten.add_.Tensor(drawn, mean)


def _normal_scaled(mean: float | torch.Tensor, std: torch.Tensor, *, out: torch.Tensor, generator: Any = None) -> Any:
    size = torch.broadcast_shapes(mean.size(), std.size()) if isinstance(mean, torch.Tensor) else std.size()
    drawn = aten.normal_.default(aten.resize_.default(out, size), generator=generator)
    scaled = aten.mul_.Tensor(drawn, std)
    return aten.add_.Tensor(scaled, mean) if isinstance(mean, torch.Tensor) else aten.add_.Scalar(scaled, mean)


AS_FILLS: dict[Any, Callable[..., Any]] = {
    aten.rand.out: _rand,
    aten.rand.generator_out: _rand,
    aten.randn.out: _randn,
    aten.randn.generator_out: _randn,
    aten.randint.out: _randint,
    aten.randint.generator_out: _randint,
    aten.randint.low_out: _randint_from,
    aten.randint.low_generator_out: _randint_from,
    aten.bernoulli.out: _bernoulli,
    aten.normal.float_float_out: _normal,
    aten.normal.Tensor_float_out: _normal_around,
    aten.normal.float_Tensor_out: _normal_scaled,
    aten.normal.Tensor_Tensor_out: _normal_scaled,
    getattr(aten.random_, "from"): _random_from,
}
