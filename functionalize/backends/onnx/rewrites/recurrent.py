"""Recurrent layers as operators of ONNX, where sequences differ in length: others are decomposed, step by step.

Invariant: weights and gates come in ONNX's order. Limits: LSTM, in inference: nothing is kept for a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functionalize.backends.decompositions.families.recurrent_layers import LSTM
from functionalize.backends.onnx.rewrites.registry import OPSET

aten = torch.ops.aten
_GATES = (0, 3, 1, 2)  # ONNX's input, output, forget and cell, among torch's input, forget, cell and output


def _layer(
    x: Any, of_input: Any, of_hidden: Any, bias: Any, bias_of_hidden: Any, hidden: Any, cell: Any, reverse: bool,
    batch_sizes: Any, mode: int, hidden_size: int, num_layers: int, has_biases: bool, *_: Any,
) -> Any:  # fmt: skip
    """One direction of one layer."""
    if mode != LSTM:
        raise NotImplementedError("a recurrent layer that is not an LSTM")
    op = OPSET

    def gates(weights: Any) -> Any:
        parts = [(n * hidden_size, (n + 1) * hidden_size) for n in _GATES]
        ends = [[op.Constant(value_ints=[end]) for end in (*part, 0)] for part in parts]
        return op.Unsqueeze(op.Concat(*(op.Slice(weights, *part) for part in ends), axis=0), first)

    first = op.Constant(value_ints=[0])
    biases = op.Concat(gates(bias), gates(bias_of_hidden), axis=1) if has_biases else None
    state = [one if len(one.shape) == 3 else op.Unsqueeze(one, first) for one in (hidden, cell)]
    options = {"hidden_size": hidden_size, "direction": "reverse" if reverse else "forward"}
    y, h, c = op.LSTM(x, gates(of_input), gates(of_hidden), biases, None, *state, **options)
    last = [op.Reshape(made, op.Shape(begun)) for made, begun in ((h, hidden), (c, cell))]
    return op.Squeeze(y, op.Constant(value_ints=[1])), *last, op.Constant(value_ints=[0])


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten.mkldnn_rnn_layer.default: _layer}
"""Operators, by functions of values of ONNX that give such."""
