"""What layers compute element by element: rectifiers and their kin.

Invariant: 16 bits are computed with 32, the numbers of a call among them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.arithmetic.derivatives import absolute, bounded, held
from functionalize.backends.jax.lowerings.arithmetic.elementwise import rounded
from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import cast

aten = torch.ops.aten
Array = Any


@lowering(aten.relu)
def relu(x: Array) -> Array:
    return jnp.where(x > 0, x, jnp.where(jnp.isnan(x), x, 0)).astype(x.dtype)


@lowering(aten.gelu)
def gelu(x: Array, approximate: str = "none") -> Array:
    return rounded(lambda x: jax.nn.gelu(x, approximate=approximate == "tanh"), x)


@lowering(aten.elu)
def elu(x: Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Array:
    below = jnp.where(x > 0, 0, x)  # so that the branch not taken has no infinite derivative
    return rounded(
        lambda x, below: jnp.where(x > 0, x * scale, jnp.expm1(below * input_scale) * (alpha * scale)), x, below
    )


@lowering(aten.leaky_relu)
def leaky_relu(x: Array, negative_slope: Any = 0.01) -> Array:
    return rounded(lambda x: jnp.where(x > 0, x, x * cast(negative_slope, x.dtype)), x)


@lowering(aten.hardtanh)
def hardtanh(x: Array, min_val: Any = -1, max_val: Any = 1) -> Array:
    low, high = cast(min_val, x.dtype), cast(max_val, x.dtype)
    return held((x > low) & (x < high), x, bounded(x, low, high))


@lowering(aten.hardsigmoid)
def hardsigmoid(x: Array) -> Array:
    return rounded(lambda x: held(_within(x), (x + 3) / 6, bounded(x + 3, jnp.zeros_like(x), _six(x)) / 6), x)


@lowering(aten.hardswish)
def hardswish(x: Array) -> Array:
    def computed(x: Array) -> Array:
        inside, above = x * (x + 3) / 6, x * _six(x) / 6
        outside = x * bounded(x + 3, jnp.zeros_like(x), _six(x)) / 6
        return jnp.where(x >= 3, above, held(_within(x), inside, outside))

    return rounded(computed, x)


def _within(x: Array) -> Array:
    return (x > -3) & (x < 3)


def _six(x: Array) -> Array:
    return jnp.full_like(x, 6)


@lowering(aten.log_sigmoid_forward.default, takes_call=True)
def log_sigmoid(call: Call, x: Array) -> tuple[Array, Array]:
    """And what its backward takes, where the kernel of the device gives such."""
    kept = jax.lax.stop_gradient(rounded(lambda x: jnp.exp(-absolute(x)), x))
    return rounded(jax.nn.log_sigmoid, x), kept if call.value[1].dim() == x.ndim else kept.reshape(-1)[:0]
