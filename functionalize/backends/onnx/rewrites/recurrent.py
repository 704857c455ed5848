"""Recurrent layers, step by step."""

from __future__ import annotations

from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import rewrite

aten = torch.ops.aten


_LSTM = 2  # among the kinds of layers


@rewrite(aten.mkldnn_rnn_layer.default)
def recurrent_layer(*args: Any) -> Any:
    """One direction of one layer of an LSTM, step by step."""
    inputs, *weights, first, first_cell, reverse, _, mode, _, _, has_biases, _, _, _ = args
    if mode != _LSTM:
        return NotImplemented
    hidden, cell = (one.reshape(one.size()[-2:]) for one in (first, first_cell))  # some have a dimension of layers
    of_input, of_hidden = weights[:2]
    bias = weights[2] + weights[3] if has_biases else None
    before = inputs @ of_input.t()
    before = before if bias is None else before + bias
    outputs = []
    for step in range(inputs.size(0)):
        gates = before.select(0, inputs.size(0) - 1 - step if reverse else step) + hidden @ of_hidden.t()
        enters, forgets, new, leaves = gates.chunk(4, -1)
        cell = forgets.sigmoid() * cell + enters.sigmoid() * new.tanh()
        hidden = leaves.sigmoid() * cell.tanh()
        outputs.append(hidden)
    outputs = outputs[::-1] if reverse else outputs
    last = hidden.reshape(first.size()), cell.reshape(first_cell.size())
    return torch.stack(outputs), *last, inputs.new_zeros([0], dtype=torch.uint8)
