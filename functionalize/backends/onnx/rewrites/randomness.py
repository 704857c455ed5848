"""Random numbers: passes over ONNX files take an operator that they do not know to be random for one that is not.

Invariant: each draw is one of its own, and none is a constant. Limits: torch's default generator, whose numbers these
are not.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite

aten = torch.ops.aten


def _drawn(like: Any, chance: Any) -> Any:
    """Where a number between 0 and 1 is below a chance; of sizes and dtype as a tensor."""
    wide = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    numbers = aten.rand_like.default(like, dtype=wide)
    return (numbers < (chance.to(wide) if isinstance(chance, torch.Tensor) else chance)).to(like.dtype)


@rewrite(aten.bernoulli.default)
def bernoulli(chances: Any, *, generator: Any = None) -> Any:
    return _drawn(chances, chances) if generator is None else NotImplemented


@rewrite(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_of(like: Any, chance: Any, *, generator: Any = None) -> Any:
    return _drawn(like, chance) if generator is None else NotImplemented


@rewrite(aten.normal.Tensor_float, aten.normal.Tensor_Tensor, aten.normal.float_Tensor)
def normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    like = mean if isinstance(mean, torch.Tensor) else std
    return NotImplemented if generator else aten.randn_like.default(mean * std + like) * std + mean


@rewrite(aten.uniform.default)
def uniform(like: Any, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    return NotImplemented if generator else aten.rand.default(like.size(), dtype=like.dtype) * (high - low) + low


@rewrite(aten.rrelu_with_noise_functional.default)
def rrelu(
    x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """The slope of each number that is not above zero is drawn, and is the noise that the gradient reads."""
    if not training:
        return aten.leaky_relu.default(x, (lower + upper) / 2), aten.clone.default(noise)
    if generator is not None:
        return NotImplemented
    slopes = torch.where(x <= 0, uniform(x, lower, upper), 1.0)
    return x * slopes, slopes


@rewrite(aten.randperm.default)
def randperm(count: Any, *, dtype: Any = None, **_: Any) -> Any:
    _, order = aten.sort.default(aten.rand.default([count], dtype=torch.float64))
    return order if dtype is None else order.to(dtype)


_STEPS = {torch.float16: 2**11, torch.bfloat16: 2**8}  # of numbers between 0 and 1, as eager draws them: never 1


def _in_32_bits(op: Any, uniform: bool) -> Rewrite:
    """With dtypes that the engine draws in: float32 and float64."""

    def drawn(like: Any, *args: Any, **options: Any) -> Any:
        dtype = options.get("dtype") or (like.dtype if isinstance(like, torch.Tensor) else torch.get_default_dtype())
        if dtype in (torch.float32, torch.float64):
            return NotImplemented
        numbers, steps = op(like, *args, **options | {"dtype": torch.float32}), _STEPS.get(dtype, 1)
        return ((numbers * steps).floor() / steps if uniform else numbers).to(dtype)

    return drawn


for _op in (aten.rand.default, aten.rand_like.default):
    rewrite(_op)(_in_32_bits(_op, uniform=True))
for _op in (aten.randn.default, aten.randn_like.default):
    rewrite(_op)(_in_32_bits(_op, uniform=False))
