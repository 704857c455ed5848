"""What layers compute element by element: rectifiers and their kin.

Invariant: 16 bits are computed with 32, the numbers of a call among them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.jax.lowerings.elementwise import rounded
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
    return jnp.clip(x, cast(min_val, x.dtype), cast(max_val, x.dtype))
