"""Operators that reduce dimensions, and those that run along one.

Invariant: the accumulation is in the dtype of the result, in 32 bits where that is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.arithmetic.derivatives import absolute, of_order, root
from functionalize.backends.jax.lowerings.arithmetic.elementwise import logaddexp, rounded
from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import cast, category, opmath

aten = torch.ops.aten
Array = Any


def axes(x: Array, dim: Any) -> tuple[int, ...]:
    """The dimensions that an argument names: one, several, or all of them where it names none."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(x.ndim))
    return tuple(d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)) if x.ndim else ()


@lowering(aten.sum.default, aten.sum.dim_IntList, takes_call=True)
def sum_(call: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    wide = cast(x, opmath(call.dtype))
    return jnp.sum(wide, axes(x, dim), keepdims=keepdim, dtype=wide.dtype).astype(call.dtype)


@lowering(aten.mean.default, aten.mean.dim, takes_call=True)
def mean(call: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.mean(cast(x, opmath(call.dtype)), axes(x, dim), keepdims=keepdim).astype(call.dtype)


@lowering(aten.prod.default, aten.prod.dim_int, takes_call=True)
def prod(call: Call, x: Array, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.prod(cast(x, call.dtype), axes(x, dim), keepdims=keepdim, dtype=call.dtype)


@lowering(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default, takes_call=True)
def any_(call: Call, x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    found = jnp.any(x != 0, _asked(x, dim), keepdims=keepdim)
    return found.astype(call.dtype)


@lowering(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default, takes_call=True)
def all_(call: Call, x: Array, dim: Any = None, keepdim: bool = False) -> Array:
    found = jnp.all(x != 0, _asked(x, dim), keepdims=keepdim)
    return found.astype(call.dtype)


lowering(aten.equal)(jnp.array_equal)


def _asked(x: Array, dim: Any) -> tuple[int, ...]:
    """As ``axes``, but for an empty list, which names none here."""
    return () if isinstance(dim, (list, tuple)) and not len(dim) else axes(x, dim)


def _extreme(pick: Callable[..., Array], x: Array, dim: Any = (), keepdim: bool = False) -> Array:
    return pick(x, axes(x, dim), keepdims=keepdim)


def _index_of(pick: Callable[..., Array], x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    if dim is None:
        found = pick(x.reshape(-1))
        return (found.reshape([1] * x.ndim) if keepdim else found).astype(jnp.int64)
    return (
        pick(x.reshape(1) if not x.ndim else x, axis=dim, keepdims=keepdim and x.ndim > 0)
        .astype(jnp.int64)
        .reshape(() if not x.ndim else jax.eval_shape(lambda x: jnp.sum(x, dim, keepdims=keepdim), x).shape)
    )


def _picked(pick: Callable[..., Array], x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """An element along a dimension, and where it is."""
    places = _index_of(pick, x, dim, True)
    if not x.ndim:
        return x, places.reshape(())
    found = jnp.take_along_axis(x, places, dim), places
    return found if keepdim else tuple(jnp.squeeze(one, dim) for one in found)  # type: ignore[return-value]


lowering(aten.amax, aten.max.default)(partial(_extreme, jnp.max))
lowering(aten.amin, aten.min.default)(partial(_extreme, jnp.min))
lowering(aten.argmax)(partial(_index_of, jnp.argmax))
lowering(aten.argmin)(partial(_index_of, jnp.argmin))
lowering(aten.max.dim)(partial(_picked, jnp.argmax))
lowering(aten.min.dim)(partial(_picked, jnp.argmin))


@lowering(aten.var.correction)
def var(x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Array:
    found = _variance(x, dim, correction, keepdim)
    return found.astype(x.dtype) if category(x.dtype) == 2 else found


def _variance(x: Array, dim: Any, correction: Any, keepdim: bool) -> Array:
    over = axes(x, dim)
    count = math.prod(x.shape[d] for d in over)
    wide = x.astype(opmath(x.dtype))
    deviation = wide - jnp.mean(wide, over, keepdims=True)
    squares = jnp.real(deviation * jnp.conj(deviation)) if category(x.dtype) == 3 else deviation * deviation
    freedom = jnp.maximum(cast(count, squares.dtype) - (1 if correction is None else correction), 0)
    return jnp.sum(squares, over, keepdims=keepdim) / freedom


@lowering(aten.std.correction, takes_call=True)
def std(call: Call, x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Array:
    return root(_variance(x, dim, correction, keepdim)).astype(call.dtype)


@lowering(aten.std_mean.correction, takes_call=True)
def std_mean(
    call: Call, x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Array, Array]:
    mean = jnp.mean(x.astype(opmath(x.dtype)), axes(x, dim), keepdims=keepdim).astype(x.dtype)
    return std(call, x, dim, correction=correction, keepdim=keepdim), mean


@lowering(aten.linalg_vector_norm, takes_call=True)
def vector_norm(call: Call, x: Array, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    over = axes(x, dim)
    if math.isinf(ord):
        size = absolute(x)
        return (jnp.max if ord > 0 else jnp.min)(size, over, keepdims=keepdim).astype(call.dtype)
    if ord == 0:
        return jnp.sum(x != 0, over, keepdims=keepdim).astype(call.dtype)
    wide = opmath(call.dtype)
    size = absolute(x).astype(wide) if jnp.iscomplexobj(x) else x.astype(wide)
    return of_order(float(ord), over, keepdim, size).astype(call.dtype)


@lowering(aten.var.dim)
def var_dim(x: Array, dim: Any, unbiased: bool = True, keepdim: bool = False) -> Array:
    return var(x, dim, correction=int(unbiased), keepdim=keepdim)


# Along one dimension


def _cumulated(join: Callable[..., Array], call: Call, x: Array, dim: int, dtype: Any = None) -> Array:
    wide = cast(x, opmath(call.dtype))
    return (join(wide, dim, dtype=wide.dtype) if x.ndim else wide).astype(call.dtype)


lowering(aten.cumsum, takes_call=True)(partial(_cumulated, jnp.cumsum))
lowering(aten.cumprod, takes_call=True)(partial(_cumulated, jnp.cumprod))


@lowering(aten.logcumsumexp)
def logcumsumexp(x: Array, dim: int) -> Array:
    if jnp.iscomplexobj(x) and x.ndim:
        return jax.lax.associative_scan(logaddexp, x, axis=dim % x.ndim)
    return jax.lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x


@lowering(aten.soft_margin_loss)
def soft_margin_loss(x: Array, target: Array, reduction: int = 1) -> Array:
    """Step by step, as torch's kernel: with 16 bits it overflows."""
    losses = rounded(jnp.log, 1 + rounded(jnp.exp, -x * target))
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


def _running(better: Callable[[Array, Array], Array], x: Array, dim: int) -> tuple[Array, Array]:
    """The best so far along a dimension, and where it is: the later of two alike, and the last of what is NaN."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim = dim % x.ndim
    places = jnp.broadcast_to(
        jnp.expand_dims(jnp.arange(x.shape[dim]), [d for d in range(x.ndim) if d != dim]), x.shape
    )

    def later(one: Any, two: Any) -> Any:
        takes = better(two[0], one[0]) | jnp.isnan(two[0])
        takes = takes & ~(jnp.isnan(one[0]) & ~jnp.isnan(two[0]))
        return jnp.where(takes, two[0], one[0]), jnp.where(takes, two[1], one[1])

    values, indices = jax.lax.associative_scan(later, (x, places), axis=dim)
    return values, indices.astype(jnp.int64)


lowering(aten.cummax)(partial(_running, jnp.greater_equal))
lowering(aten.cummin)(partial(_running, jnp.less_equal))


@lowering(aten._softmax, takes_call=True)
def softmax(call: Call, x: Array, dim: int, half_to_float: bool) -> Array:
    wide = cast(x, opmath(call.dtype))
    return (jax.nn.softmax(wide, dim) if x.ndim else jnp.ones_like(wide)).astype(call.dtype)


@lowering(aten._safe_softmax.default, takes_call=True)
def safe_softmax(call: Call, x: Array, dim: int, dtype: Any = None) -> Array:
    nothing = jnp.all(x == -jnp.inf, dim, keepdims=True) if x.ndim else x == -jnp.inf  # zeros, without a derivative
    return jnp.where(nothing, 0, softmax(call, jnp.where(nothing, 0, x), dim, False)).astype(call.dtype)


@lowering(aten._log_softmax, takes_call=True)
def log_softmax(call: Call, x: Array, dim: int, half_to_float: bool) -> Array:
    wide = cast(x, opmath(call.dtype))
    return (jax.nn.log_softmax(wide, dim) if x.ndim else jnp.zeros_like(wide)).astype(call.dtype)


@lowering(aten._fft_c2c)
def fft_c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    size = _norm([x.shape[d] for d in dim], normalization)
    found = jnp.fft.fftn(x, axes=dim) if forward else jnp.fft.ifftn(x, axes=dim, norm="forward")
    return (found * size).astype(x.dtype)


@lowering(aten._fft_r2c)
def fft_r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    size = _norm([x.shape[d] for d in dim], normalization)
    found = jnp.fft.rfftn(x, axes=dim) if onesided else jnp.fft.fftn(x, axes=dim)
    return found * size


@lowering(aten._fft_c2r)
def fft_c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    sizes = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    return jnp.fft.irfftn(x, sizes, axes=dim, norm="forward") * _norm(sizes, normalization)


def _norm(sizes: Sequence[int], normalization: int) -> float:
    """By what a transform is scaled: by nothing, by the root of its size, by its size."""
    count = math.prod(sizes)
    return (1.0, count**-0.5, 1.0 / count)[normalization] if count else 1.0
