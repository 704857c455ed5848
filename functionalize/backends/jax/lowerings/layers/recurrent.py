"""Recurrent layers that torch runs as one operator: a scan over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.decompositions.families.recurrent_layers import LSTM
from functionalize.backends.jax.lowerings.registry import lowering

aten = torch.ops.aten
Array = Any


@lowering(aten.mkldnn_rnn_layer.default)
def mkldnn_rnn_layer(
    x: Array,
    of_input: Array,
    of_hidden: Array,
    bias: Array,
    bias_of_hidden: Array,
    hidden: Array,
    cell: Array,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Array, Array, Array, Array]:
    if mode != LSTM or batch_sizes:
        raise ValueError("of oneDNN's layers, only the LSTM for sequences of one length is supported")
    gates = jnp.matmul(x, of_input.T)
    if has_biases:
        gates = gates + bias + bias_of_hidden

    def step(state: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        i, f, g, o = jnp.split(row + jnp.matmul(h, of_hidden.T), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    begun = tuple(one.reshape(x.shape[1], hidden_size) for one in (hidden, cell))
    (h, c), rows = jax.lax.scan(step, begun, gates, reverse=reverse)
    return rows, h.reshape(hidden.shape), c.reshape(cell.shape), jnp.zeros((0,), jnp.uint8)
