"""Convolutions and their gradients.

Invariant: a gradient is the derivative of the very row that computes the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import opmath

aten = torch.ops.aten
Array = Any


@lowering(aten.convolution.default)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    dims = weight.ndim - 2
    batched = x.ndim == weight.ndim
    x = x if batched else x[None]
    stride, padding, dilation, more = (each(one, dims) for one in (stride, padding, dilation, output_padding))
    if transposed:
        found = _transposed(x, weight, stride, padding, dilation, more, groups)
    else:
        pads = [(n, n) for n in padding]
        options: Any = {"feature_group_count": groups, "preferred_element_type": opmath(x.dtype)}
        found = jax.lax.conv_general_dilated(x, weight, stride, pads, None, dilation, **options)
    if bias is not None:
        found = found + bias.reshape([-1] + [1] * dims)
    return (found if batched else found[0]).astype(x.dtype)


def each(values: Sequence[int], count: int) -> list[int]:
    """Values for so many dimensions: a single value counts for all."""
    return list(values) * count if len(values) == 1 else list(values)


def _transposed(x: Array, weight: Array, stride: Any, padding: Any, dilation: Any, more: Any, groups: int) -> Array:
    """The gradient of a convolution for its input, as a convolution of a dilated input with the flipped kernel."""
    inputs, outputs, *kernel = weight.shape
    weight = weight.reshape(groups, inputs // groups, outputs, *kernel)
    weight = jnp.swapaxes(weight, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)
    weight = jnp.flip(weight, tuple(range(2, weight.ndim)))
    reach = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    pads = [(far - pad, far - pad + extra) for far, pad, extra in zip(reach, padding, more, strict=True)]
    steps = [1] * len(kernel)
    options: Any = {"feature_group_count": groups, "preferred_element_type": opmath(x.dtype)}
    return jax.lax.conv_general_dilated(x, weight, steps, pads, stride, dilation, **options)


@lowering(aten.convolution_backward.default)
def convolution_backward(
    grad: Array, x: Array, weight: Array, bias_sizes: Any, *options: Any
) -> tuple[Array | None, Array | None, Array | None]:
    *geometry, mask = options

    def forward(x: Array, weight: Array) -> Array:
        return convolution(x, weight, None, *geometry)

    of_input, of_weight = jax.vjp(forward, x, weight)[1](grad)
    axes = tuple(d for d in range(grad.ndim) if d != grad.ndim - weight.ndim + 1)
    of_bias = jnp.sum(grad, axes) if mask[2] else None
    return (of_input if mask[0] else None), (of_weight if mask[1] else None), of_bias
