"""Operators that read and write at indices.

Invariant: a write at indices gives a new array. Limits: JAX raises for no index that is out of range: it reads NaN
there (the smallest integer), and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import cast

aten = torch.ops.aten
Array = Any


@lowering(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_places(indices)]


def _places(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    """Indices as NumPy takes them. A mask is never among them: the size of its result is data-dependent."""
    if any(place is not None and place.dtype == bool for place in indices):
        raise ValueError("indexing with a mask returns a data-dependent number of elements")
    return tuple(slice(None) if place is None else place for place in indices)


@lowering(aten.index_put, aten._unsafe_index_put, aten._index_put_impl)
def index_put(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False, unsafe: bool = False
) -> Array:
    values = cast(values, x.dtype)
    masks = [place for place in indices if place is not None and place.dtype == bool]
    if masks:
        return _put_at_mask(x, indices, values, accumulate)
    row = None if accumulate else _row(x, indices, values)
    if row is not None:
        return row
    where = x.at[_places(indices)]
    return where.add(values) if accumulate else where.set(values)


def _put_at_mask(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool) -> Array:
    """One value for all that a mask picks: a choice, element by element."""
    if len([place for place in indices if place is not None]) != 1 or values.size != 1:
        raise ValueError("indexing with a mask returns a data-dependent number of elements")
    at = next(n for n, place in enumerate(indices) if place is not None)
    mask: Any = indices[at]
    mask = mask.reshape([1] * at + list(mask.shape) + [1] * (x.ndim - at - mask.ndim))
    return jnp.where(mask, x + values.reshape(()) if accumulate else values.reshape(()), x)


def _row(x: Array, indices: Sequence[Array | None], values: Array) -> Array | None:
    """A write at one index of one dimension, as the row of a cache, is an update of a slice; None for others."""
    given = [(dim, place) for dim, place in enumerate(indices) if place is not None]
    if len(given) != 1 or given[0][1].size != 1 or not x.size:
        return None
    dim, place = given[0]
    part = [*x.shape[:dim], *place.shape, *x.shape[dim + 1 :]]
    rows = jnp.broadcast_to(values, part).reshape([*x.shape[:dim], 1, *x.shape[dim + 1 :]])
    return _update(x, rows, place.reshape(()), dim)


def _update(x: Array, rows: Array, start: Array, dim: int) -> Array:
    start = jnp.where(start < 0, start + x.shape[dim], start)
    return jax.lax.dynamic_update_slice_in_dim(x, rows, start, dim)


@lowering(aten.index_select)
def index_select(x: Array, dim: int, index: Array) -> Array:
    if not x.ndim:
        return x
    return jnp.take(x, index.reshape(-1), dim)


@lowering(aten.embedding)
def embedding(weight: Array, indices: Array, *_: Any, **__: Any) -> Array:
    return jnp.take(weight, indices, 0)


@lowering(aten.embedding_renorm)
def embedding_renorm(weight: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    norms = jnp.linalg.norm(weight, norm_type, 1)
    used = jnp.zeros(weight.shape[0], bool).at[indices.reshape(-1)].set(True)
    scale = jnp.where(used & (norms > max_norm), max_norm / (norms + 1e-7), 1)
    return weight * scale[:, None].astype(weight.dtype)


@lowering(aten.embedding_dense_backward)
def embedding_dense_backward(
    grad: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    flat, rows = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, grad.dtype).at[flat].add(1)
        rows = rows / counts[flat][:, None]
    rows = jnp.where((flat == padding_idx)[:, None], 0, rows) if padding_idx >= 0 else rows
    return jnp.zeros((num_weights, grad.shape[-1]), grad.dtype).at[flat].add(rows)


@lowering(aten.gather)
def gather(x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    if not x.ndim:
        return jnp.broadcast_to(x, index.shape)
    if not index.ndim:
        return x.reshape(-1)[index]
    return x[_along(x, dim, index)]


def _along(x: Array, dim: int, index: Array) -> tuple[Array, ...]:
    """Indices of the elements that ``index`` names along a dimension, each in the place that it has itself."""
    grid = list(jnp.ogrid[tuple(slice(0, n) for n in index.shape)])
    grid[dim % x.ndim] = index
    return tuple(grid)


def _scattered(x: Array, dim: int, index: Array, src: Any, how: str) -> Array:
    if not x.ndim or not index.ndim:
        flat = src.reshape(-1) if hasattr(src, "shape") else src
        return _scattered(x.reshape(-1), 0, index.reshape(-1), flat, how).reshape(x.shape)
    if hasattr(src, "shape") and src.ndim:
        src = src[tuple(slice(0, n) for n in index.shape)]
    at = x.at[_along(x, dim, index)]
    return getattr(at, how)(cast(src, x.dtype))


@lowering(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(x: Array, dim: int, index: Array, src: Any, *, reduce: str = "set") -> Array:
    return _scattered(x, dim, index, src, reduce)


@lowering(aten.scatter_add)
def scatter_add(x: Array, dim: int, index: Array, src: Array) -> Array:
    return _scattered(x, dim, index, src, "add")


_REDUCED = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min", "mean": "add"}
_NEUTRAL = {"sum": 0, "mean": 0, "prod": 1}


@lowering(aten.scatter_reduce.two)
def scatter_reduce(x: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True) -> Array:
    reached = _scattered(jnp.zeros(x.shape, bool), dim, index, jnp.ones(index.shape, bool), "set")
    begun = x
    if not include_self:
        begun = jnp.where(reached, _least(x, reduce), x)
    found = _scattered(begun, dim, index, src, _REDUCED[reduce])
    if reduce != "mean":
        return found
    ones = jnp.ones(index.shape, jnp.int32)
    counts = _scattered(jnp.full(x.shape, int(include_self), jnp.int32), dim, index, ones, "add")
    counts = jnp.maximum(counts, 1).astype(x.dtype)
    mean = found / counts if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.floor_divide(found, counts)
    return jnp.where(reached, mean, x)


@lowering(aten.index_reduce.default)
def index_reduce(x: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True) -> Array:
    if not x.ndim:
        return scatter_reduce(x[None], 0, index.reshape(-1), src.reshape(-1), reduce, include_self=include_self)[0]
    shape = [-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]
    places = jnp.broadcast_to(index.reshape(shape), src.shape)
    return scatter_reduce(x, dim, places, src, reduce, include_self=include_self)


def _least(x: Array, reduce: str) -> Any:
    """What changes nothing when it is reduced with anything."""
    if reduce in _NEUTRAL:
        return jnp.asarray(_NEUTRAL[reduce], x.dtype)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if reduce == "amax" else jnp.inf, x.dtype)
    limits = np.iinfo(x.dtype)
    return jnp.asarray(limits.min if reduce == "amax" else limits.max, x.dtype)


def _at(x: Array, dim: int, index: Array) -> Any:
    return x.at[tuple(index.reshape(-1) if d == dim % x.ndim else slice(None) for d in range(x.ndim))]


@lowering(aten.index_add)
def index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    source = cast(source, x.dtype) * cast(alpha, x.dtype)
    if not x.ndim:
        return x + jnp.sum(source)
    return _at(x, dim, index).add(source)


@lowering(aten.index_copy)
def index_copy(x: Array, dim: int, index: Array, source: Array) -> Array:
    if not x.ndim:
        return source.reshape(())
    if index.size == 1:
        part = [*x.shape[: dim % x.ndim], 1, *x.shape[dim % x.ndim + 1 :]]
        return _update(x, cast(source, x.dtype).reshape(part), index.reshape(()), dim % x.ndim)
    return _at(x, dim, index).set(cast(source, x.dtype))


@lowering(aten.index_fill)
def index_fill(x: Array, dim: int, index: Array, value: Any) -> Array:
    if not x.ndim:
        return cast(value, x.dtype)
    return _at(x, dim, index).set(cast(value, x.dtype))


@lowering(aten.take)
def take(x: Array, index: Array) -> Array:
    return x.reshape(-1)[index]


@lowering(aten.put)
def put(x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    at = x.reshape(-1).at[index.reshape(-1)]
    values = source.reshape(-1)
    return (at.add(values) if accumulate else at.set(values)).reshape(x.shape)


@lowering(aten.masked_scatter)
def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    x, mask = jnp.broadcast_arrays(x, mask)
    order = jnp.cumsum(mask.reshape(-1)) - 1
    picked = source.reshape(-1)[jnp.maximum(order, 0)] if source.size else x.reshape(-1)
    return jnp.where(mask, picked.reshape(x.shape), x)


@lowering(aten.nonzero_static.default)
def nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    places = jnp.nonzero(x if x.ndim else x[None], size=size, fill_value=fill_value)
    return jnp.stack(places[: x.ndim], -1).astype(jnp.int64) if x.ndim else jnp.zeros((size, 0), jnp.int64)
