"""Operators that draw random numbers, each with a key of its own.

Invariant: what is drawn is told by the key of the call and the order of the draws. Limits: the numbers have torch's
distribution, and are not torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.registry import lowering

aten = torch.ops.aten
Array = Any


def _uniform(call: Call, shape: Any) -> Array:
    return jax.random.uniform(call.key(), tuple(shape), call.dtype)


def _normal(call: Call, shape: Any) -> Array:
    return jax.random.normal(call.key(), tuple(shape), call.dtype)


def _integers(call: Call, shape: Any, low: int, high: int) -> Array:
    wide = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    return jax.random.randint(call.key(), tuple(shape), low, high, jnp.int64 if wide else jnp.int32).astype(call.dtype)


@lowering(aten.rand.default, takes_call=True)
def rand(call: Call, size: Sequence[int], **_: Any) -> Array:
    return _uniform(call, size)


@lowering(aten.rand_like, takes_call=True)
def rand_like(call: Call, x: Array, **_: Any) -> Array:
    return _uniform(call, x.shape)


@lowering(aten.uniform, takes_call=True)
def uniform(call: Call, x: Array, low: Any = 0.0, high: Any = 1.0, *, generator: Any = None) -> Array:
    return (_uniform(call, x.shape) * (high - low) + low).astype(call.dtype)


@lowering(aten.randn.default, takes_call=True)
def randn(call: Call, size: Sequence[int], **_: Any) -> Array:
    return _normal(call, size)


@lowering(aten.randn_like, takes_call=True)
def randn_like(call: Call, x: Array, **_: Any) -> Array:
    return _normal(call, x.shape)


@lowering(aten.normal_functional, takes_call=True)
def normal(call: Call, x: Array, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Array:
    return (_normal(call, x.shape) * std + mean).astype(call.dtype)


@lowering(aten.normal.Tensor_float, aten.normal.Tensor_Tensor, aten.normal.float_Tensor, takes_call=True)
def normal_of(call: Call, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Array:
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    return (_normal(call, shape) * std + mean).astype(call.dtype)


@lowering(aten.randint.default, takes_call=True)
def randint(call: Call, high: int, size: Sequence[int], **_: Any) -> Array:
    return _integers(call, size, 0, high)


@lowering(aten.randint.low, takes_call=True)
def randint_low(call: Call, low: int, high: int, size: Sequence[int], **_: Any) -> Array:
    return _integers(call, size, low, high)


@lowering(aten.randint_like.default, takes_call=True)
def randint_like(call: Call, x: Array, high: int, **_: Any) -> Array:
    return _integers(call, x.shape, 0, high)


@lowering(aten.randint_like.low_dtype, takes_call=True)
def randint_like_low(call: Call, x: Array, low: int, high: int, **_: Any) -> Array:
    return _integers(call, x.shape, low, high)


@lowering(getattr(aten.random, "from"), takes_call=True)
def random_from(call: Call, x: Array, low: int, high: int | None, *, generator: Any = None) -> Array:
    if high is None:
        raise ValueError("random_ without an upper bound")
    return _integers(call, x.shape, low, high)


@lowering(aten.random.to, takes_call=True)
def random_to(call: Call, x: Array, high: int, *, generator: Any = None) -> Array:
    return _integers(call, x.shape, 0, high)


@lowering(aten.randperm.default, takes_call=True)
def randperm(call: Call, n: int, **_: Any) -> Array:
    return jax.random.permutation(call.key(), n).astype(call.dtype)


@lowering(aten.bernoulli.default, takes_call=True)
def bernoulli(call: Call, p: Array, *, generator: Any = None) -> Array:
    return jax.random.bernoulli(call.key(), p).astype(call.dtype)


@lowering(aten.bernoulli.p, aten.bernoulli.Tensor, takes_call=True)
def bernoulli_of(call: Call, x: Array, p: Any, *, generator: Any = None) -> Array:
    return jax.random.bernoulli(call.key(), p, x.shape).astype(call.dtype)


@lowering(aten.exponential, takes_call=True)
def exponential(call: Call, x: Array, lambd: Any = 1.0, *, generator: Any = None) -> Array:
    return (jax.random.exponential(call.key(), x.shape, call.dtype) / lambd).astype(call.dtype)


@lowering(aten.multinomial, takes_call=True)
def multinomial(call: Call, p: Array, count: int, replacement: bool = False, *, generator: Any = None) -> Array:
    logits = jnp.log(p)
    if replacement:
        shape = (count, *p.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(call.key(), logits, -1, shape), 0, -1).astype(jnp.int64)
    noise = jax.random.gumbel(call.key(), p.shape, p.dtype)  # the largest of noisy logits are such a draw
    return jax.lax.top_k(logits + noise, count)[1].astype(jnp.int64)


@lowering(aten.native_dropout.default, takes_call=True)
def native_dropout(call: Call, x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    mask = jax.random.bernoulli(call.key(), 1 - p, x.shape)
    return jnp.where(mask, x * jnp.asarray(1 / (1 - p), x.dtype), 0).astype(x.dtype), mask


@lowering(aten.rrelu_with_noise_functional.default, takes_call=True)
def rrelu(
    call: Call, x: Array, noise: Array, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False,
    generator: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    if not training:
        return jnp.where(x > 0, x, x * jnp.asarray((lower + upper) / 2, x.dtype)), noise
    slopes = jnp.where(x > 0, 1, _uniform(call, x.shape) * (upper - lower) + lower).astype(x.dtype)
    return x * slopes, slopes
