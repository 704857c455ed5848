"""Random ops that write an ``out=``, as eager's kernels spell them: they fill it in place, in the order of its storage.

And ``random_(low, high)``, whose functional variant has a keyword of Python as its name, which no graph can print.

Invariant: each function has the signature and the result of the op that it stands for. Limits: ops whose kernels draw
for the elements one by one; others (`randperm`, `multinomial`) draw in an order of their own.
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
    return _random(aten.resize_.default(out, size), low, high, generator=generator)


def _random(tensor: Tensor, low: int, high: int | None, *, generator: Any = None) -> Any:
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


SPELT_OUT: dict[Any, Callable[..., Any]] = {
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
    getattr(aten.random_, "from"): _random,
}
