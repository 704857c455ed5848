"""Operators that order elements, and those that look for them in an order."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from functionalize.backends.jax.lowerings.arithmetic.derivatives import evenly
from functionalize.backends.jax.lowerings.registry import lowering

aten = torch.ops.aten
Array = Any


@lowering(aten.sort.default, aten.sort.stable)
def sort(x: Array, dim: int = -1, descending: bool = False, *, stable: Any = True) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order.astype(jnp.int64)


@lowering(aten.argsort.stable)
def argsort(x: Array, *, stable: bool, dim: int = -1, descending: bool = False) -> Array:
    return sort(x, dim, descending)[1]


@lowering(aten.topk)
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    values, indices = sort(x, dim, descending=largest)
    return tuple(jax.lax.slice_in_dim(one, 0, k, axis=dim % x.ndim) for one in (values, indices))  # type: ignore[return-value]


@lowering(aten.kthvalue)
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    found = [jax.lax.index_in_dim(one, k - 1, dim % x.ndim, keepdim) for one in sort(x, dim)]
    return found[0], found[1]


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    sequence: Array, values: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Array:
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    side = side or ("right" if right else "left")
    dtype, values = jnp.int32 if out_int32 else jnp.int64, jnp.asarray(values)
    if sequence.ndim == 1:
        return jnp.searchsorted(sequence, values, side).astype(dtype)
    rows = sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1])
    found = jax.vmap(lambda one, two: jnp.searchsorted(one, two, side))(*rows)
    return found.reshape(values.shape).astype(dtype)


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(values: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return searchsorted(boundaries, values, out_int32=out_int32, right=right)


def _median(counts_all: bool, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower of the two in the middle; a number that is none comes last, and before all where it counts."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    values, indices = sort(x, dim)
    missing = jnp.isnan(values) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, bool)
    known = x.shape[dim] - jnp.sum(missing, dim, keepdims=True)
    middle = jnp.maximum(known - 1, 0) // 2
    if counts_all:
        middle = jnp.where(known < x.shape[dim], known, middle)
    found = [jnp.take_along_axis(one, middle, dim) for one in (values, indices)]
    return tuple(one if keepdim else jnp.squeeze(one, dim) for one in found)  # type: ignore[return-value]


def _median_of_all(counts_all: bool, x: Array) -> Array:
    """Of no elements no number, or the least integer."""
    if not x.size:
        return jnp.full((), jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min, x.dtype)
    return evenly(x, _median(counts_all, x.reshape(-1), 0)[0])


for _packet, _counts_all in ((aten.median, True), (aten.nanmedian, False)):
    lowering(_packet.dim)(partial(_median, _counts_all))
    lowering(_packet.default)(partial(_median_of_all, _counts_all))
