"""Pooling and its gradients.

Invariant: an index of a maximum counts the elements of the unpadded plane. Limits: gradients of averages are the
derivatives of the rows here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from functionalize.backends.jax.lowerings.layers.convolutions import each
from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import opmath

aten = torch.ops.aten
Array = Any


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> np.ndarray[Any, Any]:
    """For each window along one dimension the indices of its elements, which may lie outside."""
    reach = dilation * (kernel - 1) + 1
    room = size + 2 * padding - reach
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    return np.arange(count)[:, None] * stride - padding + np.arange(kernel) * dilation


def _geometry(shape: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    dims = len(shape)
    kernel = each(kernel, dims)
    stride = each(stride, dims) if len(stride) else kernel
    given = zip(shape, kernel, stride, each(padding, dims), each(dilation, dims), strict=True)
    return [_windows(*one, ceil_mode) for one in given]


def _taken(x: Array, windows: Sequence[np.ndarray[Any, Any]], fill: Any) -> Array:
    """The elements of each window as last dimensions; ``fill`` where a window reaches beyond the plane."""
    dims = len(windows)
    lead = x.ndim - dims
    for dim, places in enumerate(windows):
        axis = lead + 2 * dim
        size = x.shape[axis]
        found = jnp.take(x, np.clip(places, 0, max(size - 1, 0)).reshape(-1), axis)
        found = found.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])
        inside = ((places >= 0) & (places < size)).reshape([1] * axis + list(places.shape) + [1] * (x.ndim - axis - 1))
        x = found if inside.all() else jnp.where(inside, found, jnp.asarray(fill, x.dtype))
    order = [*range(lead), *(lead + 2 * d for d in range(dims)), *(lead + 2 * d + 1 for d in range(dims))]
    x = jnp.transpose(x, order)
    return x.reshape(*x.shape[: lead + dims], math.prod(x.shape[lead + dims :]))


def _max_pool(
    dims: int,
    x: Array,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil_mode: bool = False,
) -> Any:
    return _maxima(dims, x, _geometry(x.shape[-dims:], kernel, stride, padding, dilation, ceil_mode))


def _maxima(dims: int, x: Array, windows: Sequence[np.ndarray[Any, Any]]) -> Any:
    plane = x.shape[-dims:]
    low = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min
    found = _taken(x, windows, low)
    best = jnp.argmax(found, -1)
    flat = _flat_places(plane, windows)
    indices = jnp.take_along_axis(jnp.broadcast_to(flat, found.shape), best[..., None], -1)[..., 0]
    values = jnp.take_along_axis(found, best[..., None], -1)[..., 0]
    return values, indices.astype(jnp.int64)


def _flat_places(plane: Sequence[int], windows: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The index in the flat plane of each element of each window."""
    dims = len(plane)
    total: Any = 0
    for dim, places in enumerate(windows):
        shape = [1] * (2 * dims)
        shape[dim], shape[dims + dim] = places.shape
        total = total + places.reshape(shape) * math.prod(plane[dim + 1 :])
    return total.reshape(*total.shape[:dims], -1)  # type: ignore[no-any-return]


def _max_pool_backward(dims: int, grad: Array, x: Array, *geometry: Any) -> Array:
    """By the indices, which are the last argument."""
    lead = math.prod(x.shape[:-dims])
    flat, places = grad.reshape(lead, -1), geometry[-1].reshape(lead, -1)
    zeros = jnp.zeros((lead, math.prod(x.shape[-dims:])), grad.dtype)
    return zeros.at[np.arange(lead)[:, None], places].add(flat).reshape(x.shape)


def _avg_pool(
    dims: int,
    x: Array,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    plane = x.shape[-dims:]
    windows = _geometry(plane, kernel, stride, padding, (1,), ceil_mode)
    wide = x.astype(opmath(x.dtype))
    total = jnp.sum(_taken(wide, windows, 0), -1)
    if divisor_override is not None:
        return (total / divisor_override).astype(x.dtype)
    margins = each(padding, dims) if count_include_pad else [0] * dims
    counts = [
        ((places >= -margin) & (places < size + margin)).sum(1)
        for places, size, margin in zip(windows, plane, margins, strict=True)
    ]
    divisor: Any = 1
    for dim, count in enumerate(counts):
        divisor = divisor * count.reshape([-1 if d == dim else 1 for d in range(dims)])
    return (total / jnp.asarray(divisor, total.dtype)).astype(x.dtype)


def _avg_pool_backward(dims: int, grad: Array, x: Array, *geometry: Any) -> Array:
    return jax.vjp(lambda x: _avg_pool(dims, x, *geometry), x)[1](grad)[0]


def _adaptive(shape: Sequence[int], output_size: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """The places of windows that differ in size, -1 for none."""
    found = []
    for size, count in zip(shape, output_size, strict=True):
        rows = np.arange(count)
        starts, stops = rows * size // count, -(-(rows + 1) * size // count)
        places = starts[:, None] + np.arange(max(stops - starts, default=0))
        found.append(np.where(places < stops[:, None], places, -1))
    return found


def _adaptive_avg_pool(dims: int, x: Array, output_size: Sequence[int]) -> Array:
    windows = _adaptive(x.shape[-dims:], output_size)
    counts: Any = 1
    for dim, places in enumerate(windows):
        counts = counts * (places >= 0).sum(1).reshape([-1 if d == dim else 1 for d in range(dims)])
    wide = x.astype(opmath(x.dtype))
    total = jnp.sum(_taken(wide, windows, 0), -1)
    return (total / jnp.asarray(counts, total.dtype)).astype(x.dtype)


def _adaptive_avg_pool_backward(dims: int, grad: Array, x: Array) -> Array:
    return jax.vjp(lambda x: _adaptive_avg_pool(dims, x, grad.shape[-dims:]), x)[1](grad)[0]


def _adaptive_max_pool(dims: int, x: Array, output_size: Sequence[int]) -> Any:
    return _maxima(dims, x, _adaptive(x.shape[-dims:], output_size))


lowering(aten.avg_pool1d.default)(partial(_avg_pool, 1))
for _dims in (2, 3):
    for _name, _rule in (
        (f"max_pool{_dims}d_with_indices", _max_pool),
        (f"max_pool{_dims}d_with_indices_backward", _max_pool_backward),
        (f"avg_pool{_dims}d", _avg_pool),
        (f"avg_pool{_dims}d_backward", _avg_pool_backward),
        (f"adaptive_max_pool{_dims}d", _adaptive_max_pool),
        (f"adaptive_max_pool{_dims}d_backward", _max_pool_backward),
        (f"_adaptive_avg_pool{_dims}d", _adaptive_avg_pool),
        (f"_adaptive_avg_pool{_dims}d_backward", _adaptive_avg_pool_backward),
    ):
        lowering(getattr(aten, _name).default)(partial(_rule, _dims))
