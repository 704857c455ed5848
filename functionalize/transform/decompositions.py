"""Ops that run as other ops, dispatched to the program again, and when.

Random ops that write an ``out=``: eager's kernels fill it in place, in the order of its storage. ``random_(low,
high)``: its functional variant has a keyword of Python as its name, which no graph can print. Functional ops that
address the storage of their argument: a value may have other strides than its handle, and starts where it likes; views
and writes know where it lies.

Invariant: each function has the signature and the result of the op that it stands for. Limits: random ops whose kernels
draw for the elements one by one; others (`randperm`, `multinomial`) draw in an order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def _rand(size: Sequence[Any], *, out: Tensor, generator: Any = None) -> Any:
    return aten.uniform_.default(aten.resize_.default(out, size), generator=generator)


def _randn(size: Sequence[Any], *, out: Tensor, generator: Any = None) -> Any:
    return aten.normal_.default(aten.resize_.default(out, size), generator=generator)


def _randint(high: int, size: Sequence[Any], *, out: Tensor, generator: Any = None) -> Any:
    return _randint_from(0, high, size, out=out, generator=generator)


def _randint_from(low: int, high: int, size: Sequence[Any], *, out: Tensor, generator: Any = None) -> Any:
    return _random_from(aten.resize_.default(out, size), low, high, generator=generator)


def _random_from(tensor: Tensor, low: int, high: int | None, *, generator: Any = None) -> Any:
    if high is None:
        high = 1 + _largest(tensor.dtype)
    return aten.add_.Scalar(aten.random_.to(tensor, high - low, generator=generator), low)


def _largest(dtype: torch.dtype) -> int:
    """The largest number of those up to which the dtype has all integers."""
    if dtype is torch.bool:
        return 1
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


def _bernoulli(probability: Tensor, *, out: Tensor, generator: Any = None) -> Any:
    return aten.bernoulli_.Tensor(aten.resize_.default(out, probability.size()), probability, generator=generator)


def _normal(mean: float, std: float, size: Sequence[Any], *, out: Tensor, generator: Any = None, **_: Any) -> Any:
    return aten.normal_.default(aten.resize_.default(out, size), mean, std, generator=generator)


def _normal_around(mean: Tensor, std: float, *, out: Tensor, generator: Any = None) -> Any:
    drawn = aten.normal_.default(aten.resize_.default(out, mean.size()), 0, std, generator=generator)
    return aten.add_.Tensor(drawn, mean)


def _normal_scaled(mean: float | Tensor, std: Tensor, *, out: Tensor, generator: Any = None) -> Any:
    size = torch.broadcast_shapes(mean.size(), std.size()) if isinstance(mean, Tensor) else std.size()
    drawn = aten.normal_.default(aten.resize_.default(out, size), generator=generator)
    scaled = aten.mul_.Tensor(drawn, std)
    return aten.add_.Tensor(scaled, mean) if isinstance(mean, Tensor) else aten.add_.Scalar(scaled, mean)


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


# In a graph; in direct use these ops run themselves.
RANDOM: dict[Any, Callable[..., Any]] = {
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
# Where the storage of the first argument was viewed or written.
BY_STORAGE: dict[Any, Callable[..., Any]] = {
    aten.as_strided_copy.default: _as_strided_copy,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
DECOMPOSITIONS = RANDOM | BY_STORAGE
