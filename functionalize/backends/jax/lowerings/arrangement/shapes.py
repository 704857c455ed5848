"""Operators that move elements about: views as copies, what puts a part back, and joining.

Invariant: nothing is computed; the elements are those of the arguments.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import cast, dtype_of, promoted

aten = torch.ops.aten
Array = Any


lowering(aten.t)(jnp.transpose)
lowering(aten.unsqueeze)(jnp.expand_dims)
lowering(aten.diagonal)(jnp.diagonal)
lowering(aten.tril)(jnp.tril)
lowering(aten.triu)(jnp.triu)


@lowering(aten.view.default, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten._reshape_copy)
def view(x: Array, size: Sequence[int], stride: Any = None) -> Array:
    return jnp.reshape(x, tuple(size))


@lowering(aten.view.dtype)
def view_dtype(x: Array, dtype: torch.dtype) -> Array:
    wanted = dtype_of(dtype)
    ratio = wanted.itemsize / x.dtype.itemsize
    if ratio == 1:
        return jax.lax.bitcast_convert_type(x, wanted) if x.dtype != bool else x.view(wanted)
    if ratio > 1:
        x = x.reshape(*x.shape[:-1], -1, int(ratio))
        return jax.lax.bitcast_convert_type(x, wanted)
    found = jax.lax.bitcast_convert_type(x, wanted)
    return found.reshape(*found.shape[:-2], -1)


@lowering(aten.permute)
def permute(x: Array, dims: Sequence[int]) -> Array:
    return jnp.transpose(x, tuple(dims))


@lowering(aten.transpose.int)
def transpose(x: Array, dim0: int, dim1: int) -> Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowering(aten.expand)
def expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    lead = len(size) - x.ndim
    wanted = [have if n == -1 else n for n, have in zip(size, [1] * lead + list(x.shape), strict=True)]
    return jnp.broadcast_to(x, wanted)


@lowering(aten.squeeze.default)
def squeeze(x: Array) -> Array:
    return jnp.squeeze(x)


@lowering(aten.squeeze.dim, aten.squeeze.dims)
def squeeze_dims(x: Array, dim: Any) -> Array:
    dims = {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)} if x.ndim else set()
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


@lowering(aten.select.int)
def select(x: Array, dim: int, index: Any) -> Array:
    if isinstance(index, int):
        return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)
    return jax.lax.dynamic_index_in_dim(x, index, dim % x.ndim, keepdims=False)


def bounds(size: int, start: Any, end: Any) -> tuple[int, int]:
    """Where a slice begins and ends, of so many elements; numbers may be symbols of ``jax.export``'s."""
    begin = 0 if start is None else _inside(start, size)
    stop = size if end is None or (type(end) is int and end >= sys.maxsize) else _inside(end, size)
    return begin, max(begin, stop)


def _inside(place: Any, size: Any) -> Any:
    return min(max(place + size if place < 0 else place, 0), size)


def _begin(size: int, start: Array) -> Array:
    """Where a slice begins, if that is data-dependent."""
    return jnp.clip(jnp.where(start < 0, start + size, start), 0, size)


@lowering(aten.slice.Tensor, takes_call=True)
def slice_(call: Call, x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    dim = dim % x.ndim
    if isinstance(start, jax.Array):
        count = call.value.shape[dim]
        span = jax.lax.dynamic_slice_in_dim(x, _begin(x.shape[dim], start), max((count - 1) * step + 1, 0), dim)
        return jax.lax.slice_in_dim(span, 0, None, step, dim)
    begin, stop = bounds(x.shape[dim], start, end)
    return jax.lax.slice_in_dim(x, begin, stop, step, dim)


@lowering(aten.unfold)
def unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    if not x.ndim:
        return x.reshape(1)[:size]
    axis = dimension % x.ndim
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    found = jnp.take(x, starts[:, None] + np.arange(size), axis=axis)
    return jnp.moveaxis(found, axis + 1, -1)


@lowering(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(x: Array, split_size: int, dim: int = 0) -> list[Array]:
    length = x.shape[dim]
    if not split_size:
        return [x]
    starts = range(0, max(length, 1), split_size)
    return [jax.lax.slice_in_dim(x, start, min(start + split_size, length), 1, dim % x.ndim) for start in starts]


@lowering(aten.split_with_sizes, aten.unsafe_split_with_sizes)
def split_with_sizes(x: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    ends = np.cumsum(split_sizes)
    pairs = zip(ends - np.asarray(split_sizes), ends, strict=True)
    return [jax.lax.slice_in_dim(x, int(start), int(stop), 1, dim % x.ndim) for start, stop in pairs]


@lowering(aten.unbind.int)
def unbind(x: Array, dim: int = 0) -> list[Array]:
    return [select(x, dim, index) for index in range(x.shape[dim])]


# Parts put back


@lowering(aten.select_scatter)
def select_scatter(x: Array, src: Array, dim: int, index: Any) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, cast(src, x.dtype), index, dim % x.ndim)


@lowering(aten.slice_scatter)
def slice_scatter(x: Array, src: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    dim = dim % x.ndim
    if isinstance(start, jax.Array) and step == 1:
        return jax.lax.dynamic_update_slice_in_dim(x, cast(src, x.dtype), _begin(x.shape[dim], start), dim)
    if isinstance(start, jax.Array):
        places = _begin(x.shape[dim], start) + np.arange(src.shape[dim]) * step
        return x.at[(*[slice(None)] * dim, places)].set(cast(src, x.dtype))
    begin, stop = bounds(x.shape[dim], start, end)
    part = list(x.shape)
    part[dim] = max(stop - begin, 0) if step == 1 else len(range(begin, stop, step))
    src = jnp.broadcast_to(cast(src, x.dtype), part)
    if step == 1:
        return jax.lax.dynamic_update_slice_in_dim(x, src, begin, dim)
    where = tuple(slice(begin, stop, step) if d == dim else slice(None) for d in range(x.ndim))
    return x.at[where].set(src)


@lowering(aten.diagonal_scatter)
def diagonal_scatter(x: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    rows = max(-offset, 0) + np.arange(src.shape[-1])
    columns = max(offset, 0) + np.arange(src.shape[-1])
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    return jnp.moveaxis(moved.at[..., rows, columns].set(cast(src, x.dtype)), (-2, -1), (dim1, dim2))


# Strides: a value has none, so its elements are found by those of torch's tensor


@lowering(aten.as_strided, takes_call=True)
def as_strided(call: Call, x: Array, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Array:
    found = _addressed(call.meta(0), x.shape, size, stride, storage_offset)
    return jnp.take(x.reshape(-1), found)


@lowering(aten.as_strided_scatter, takes_call=True)
def as_strided_scatter(
    call: Call, x: Array, src: Array, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None
) -> Array:
    found = _addressed(call.meta(0), x.shape, size, stride, storage_offset)
    return x.reshape(-1).at[found].set(cast(src, x.dtype)).reshape(x.shape)


def _addressed(tensor: torch.Tensor, shape: Any, size: Any, stride: Any, offset: Any) -> np.ndarray[Any, Any]:
    """For each element of a strided view, which element of a tensor it is, in the order of its dimensions.

    Raises:
        ValueError: it is none.
    """
    strides = [int(step) for step in tensor.stride()] if tensor.numel() else []
    own = _offsets(shape, strides).reshape(-1) if strides else np.zeros(math.prod(shape), int)
    first = int(tensor.storage_offset())
    wanted = _offsets(size, stride) + (first if offset is None else offset) - first
    room = int(max(own.max(initial=0), wanted.max(initial=0))) + 1
    numbers = np.full(room, -1)
    numbers[own] = np.arange(own.size)
    if wanted.size and (wanted.min() < 0 or (numbers[wanted] < 0).any()):
        raise ValueError("the view reads elements of a storage outside the tensor")
    found: np.ndarray[Any, Any] = numbers[wanted]
    return found


def _offsets(size: Sequence[int], stride: Sequence[int]) -> np.ndarray[Any, Any]:
    found = np.zeros(tuple(size), int)
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        found += (np.arange(n) * step).reshape([-1 if d == dim else 1 for d in range(len(size))])
    return found


# Joined, repeated, padded


@lowering(aten.cat)
def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    parts = promoted(*tensors)
    filled = [part for part in parts if part.ndim != 1 or part.shape[0]] or parts[:1]  # torch lets such pass
    return jnp.concatenate(filled, dim)


@lowering(aten.stack)
def stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(promoted(*tensors), dim)


@lowering(aten.repeat)
def repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x.reshape([1] * (len(repeats) - x.ndim) + list(x.shape)), tuple(repeats))


@lowering(aten.flip)
def flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@lowering(aten.roll)
def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    if not x.size:
        return x
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowering(aten.constant_pad_nd)
def constant_pad_nd(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    widths = [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return jax.lax.pad(x, cast(value, x.dtype), [(0, 0, 0)] * (x.ndim - len(widths)) + widths)
