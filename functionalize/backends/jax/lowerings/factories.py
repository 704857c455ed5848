"""Tensors from nothing but sizes and numbers.

Invariant: the dtype is the one that torch found, defaults among it; what is not initialized is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import cast

aten = torch.ops.aten
Array = Any


@lowering(aten.full.default, takes_call=True)
def full(call: Call, size: Sequence[int], fill_value: Any, **_: Any) -> Array:
    return jnp.full(tuple(size), cast(fill_value, call.dtype))


@lowering(aten.zeros.default, aten.empty.memory_format, aten.empty_strided, aten.empty_permuted, takes_call=True)
def zeros(call: Call, size: Sequence[int], *_: Any, **__: Any) -> Array:
    return jnp.zeros(tuple(size), call.dtype)


@lowering(aten.ones.default, takes_call=True)
def ones(call: Call, size: Sequence[int], **_: Any) -> Array:
    return jnp.ones(tuple(size), call.dtype)


def _like(make: Callable[..., Array], call: Call, x: Array, *args: Any, **options: Any) -> Array:
    return make(call, x.shape, *args, **options)


def _new(make: Callable[..., Array], call: Call, x: Array, *args: Any, **options: Any) -> Array:
    return make(call, *args, **options)


for _make, _likes, _news in (
    (full, (aten.full_like,), (aten.new_full,)),
    (zeros, (aten.zeros_like, aten.empty_like), (aten.new_zeros, aten.new_empty, aten.new_empty_strided)),
    (ones, (aten.ones_like,), (aten.new_ones,)),
):
    lowering(*_likes, takes_call=True)(partial(_like, _make))
    lowering(*_news, takes_call=True)(partial(_new, _make))


@lowering(aten.scalar_tensor, takes_call=True)
def scalar_tensor(call: Call, value: Any, **_: Any) -> Array:
    return cast(value, call.dtype)


@lowering(aten.arange.start_step, takes_call=True)
def arange(call: Call, start: Any, end: Any, step: Any = 1, **_: Any) -> Array:
    count = call.value.size(0)
    if type(count) is not int:
        count = max(0, -((start - end) // step))
    wide = jnp.issubdtype(call.dtype, jnp.floating) and jax.config.jax_enable_x64  # type: ignore[attr-defined]
    steps = jax.lax.iota(jnp.float64 if wide else call.dtype, count)
    return (start + steps * step).astype(call.dtype)


@lowering(aten.eye.default, aten.eye.m, takes_call=True)
def eye(call: Call, n: int, m: int | None = None, **_: Any) -> Array:
    return jnp.eye(n, m, dtype=call.dtype)


@lowering(aten.tril_indices, takes_call=True)
def tril_indices(call: Call, row: int, col: int, offset: int = 0, **_: Any) -> Array:
    return jnp.stack(jnp.tril_indices(row, offset, col)).astype(call.dtype)


@lowering(aten.triu_indices, takes_call=True)
def triu_indices(call: Call, row: int, col: int, offset: int = 0, **_: Any) -> Array:
    return jnp.stack(jnp.triu_indices(row, offset, col)).astype(call.dtype)
