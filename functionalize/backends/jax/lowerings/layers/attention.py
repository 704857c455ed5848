"""Attention as one operator, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import opmath

aten = torch.ops.aten
Array = Any


def _scores(query: Array, key: Array, mask: Array | None, causal: bool, scale: float | None) -> Array:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    wide = opmath(query.dtype)
    scores = jnp.matmul(query.astype(wide), jnp.swapaxes(key, -1, -2).astype(wide)) * factor
    if causal:
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(allowed, scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask.astype(wide)
    return scores


def _of_heads(query: Array, key: Array) -> Array:
    """Keys, or values, for as many heads as queries have."""
    return jnp.repeat(key, query.shape[-3] // key.shape[-3], -3) if key.shape[-3] != query.shape[-3] else key


@lowering(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    if dropout_p:
        raise ValueError("torch decomposes attention with dropout: on the CPU there is no kernel for it")
    key, value = _of_heads(query, key), _of_heads(query, value)
    scores = _scores(query, key, attn_mask, is_causal, scale)
    nothing = jnp.max(scores, -1, keepdims=True) == -jnp.inf  # a row that may look at nothing gets zeros
    scores = jnp.where(nothing, 0, scores)  # before anything that would have no derivative there
    total = jnp.where(nothing[..., 0], 0, jax.scipy.special.logsumexp(scores, -1))
    weights = jnp.where(nothing, 0, jax.nn.softmax(scores, -1))
    return jnp.matmul(weights.astype(scores.dtype), value.astype(scores.dtype)).astype(query.dtype), total


@lowering(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    def forward(query: Array, key: Array, value: Array) -> Array:
        return attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    found: tuple[Array, Array, Array] = jax.vjp(forward, query, key, value)[1](grad)
    return found
