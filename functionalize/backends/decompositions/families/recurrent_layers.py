"""Recurrent layers that torch runs as one operator, and their gradients, by operators of the core ATen set.

Invariant: a row computes what the operator computes; for arguments that it does not take it gives NotImplemented.
Limits: sequences of one length, which is known; gradients of LSTMs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize.transform.functions.recurrent_layers import CELLS, run_layer, weights_of

aten = torch.ops.aten
LSTM = 2  # among the kinds of layers, for oneDNN as for cuDNN
_NAMES = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # by cuDNN's numbers


def recurrent_layer(*args: Any) -> Any:
    """One direction of one layer of an LSTM, step by step: for sequences of one length."""
    inputs, *weights, first, first_cell, reverse, _, mode, _, _, has_biases, _, _, _ = args
    if mode != LSTM or type(inputs.size(0)) is not int:
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


def recurrent_layer_backward(*args: Any) -> Any:
    """Its gradients, of all that it takes: step by step, from the last to the first."""
    inputs, of_input, of_hidden, bias, bias_of_hidden, first, first_cell, output, _, _, *gradients, reverse = args[:14]
    mode, _, _, has_biases = args[14:18]
    if mode != LSTM or type(inputs.size(0)) is not int:
        return NotImplemented
    of_output, at_end, at_end_of_cell = gradients
    hidden, cell = (one.reshape(one.size()[-2:]) for one in (first, first_cell))
    if reverse:
        inputs, output = inputs.flip(0), output.flip(0)
        of_output = None if of_output is None else of_output.flip(0)
    before = torch.cat([hidden.unsqueeze(0), output[:-1]])
    gates = inputs @ of_input.t() + before @ of_hidden.t()
    enters, forgets, new, leaves = ((gates + bias + bias_of_hidden) if has_biases else gates).chunk(4, -1)
    enters, forgets, new, leaves = enters.sigmoid(), forgets.sigmoid(), new.tanh(), leaves.sigmoid()
    cells = [cell]
    for step in range(inputs.size(0)):
        cells.append(forgets[step] * cells[step] + enters[step] * new[step])
    of_now = torch.zeros_like(hidden) if at_end is None else at_end.reshape(hidden.size())
    of_cell = torch.zeros_like(cell) if at_end_of_cell is None else at_end_of_cell.reshape(cell.size())
    of_gates = list[Any]()
    for step in reversed(range(inputs.size(0))):
        i, f, g, o, after = enters[step], forgets[step], new[step], leaves[step], cells[step + 1].tanh()
        of_now = of_now if of_output is None else of_now + of_output[step]
        of_cell = of_cell + of_now * o * (1 - after * after)
        parts = [of_cell * g * i * (1 - i), of_cell * cells[step] * f * (1 - f), of_cell * i * (1 - g * g)]
        of_gates.insert(0, torch.cat([*parts, of_now * after * o * (1 - o)], -1))
        of_now, of_cell = of_gates[0] @ of_hidden, of_cell * f
    rows = torch.stack(of_gates)
    flat, of_bias = rows.flatten(0, 1), rows.sum([0, 1]) if has_biases else torch.zeros_like(bias)
    of_inputs = rows @ of_input
    return (
        of_inputs.flip(0) if reverse else of_inputs,
        flat.t() @ inputs.flatten(0, 1),
        flat.t() @ before.flatten(0, 1),
        of_bias,
        of_bias if has_biases else torch.zeros_like(bias_of_hidden),
        of_now.reshape(first.size()),
        of_cell.reshape(first_cell.size()),
    )


def cudnn_layers(
    data: Any, flat: Sequence[Any], stride: int, buffer: Any, first: Any, cell: Any, mode: int, size: Any,
    projected: Any, count: int, batch_first: bool, dropout: float, train: bool, both: bool, batch_sizes: Sequence[Any],
    state: Any,
) -> Any:  # fmt: skip
    """Recurrent layers of sequences of one length, one above the other."""
    if (dropout and train and count > 1) or batch_first or batch_sizes or type(data.size(0)) is not int:
        return NotImplemented
    projects = bool(projected)
    weights = list(weights_of(flat, stride - projects == 4, projects))
    last, given = list[Any](), [first] if cell is None else [first, cell]
    for number in range(count):
        outputs = []
        for backwards in range(1 + both):
            at = number * (1 + both) + backwards
            output, ended = _layer(mode, data, [one[at] for one in given], weights[at], bool(backwards))
            outputs.append(output)
            last.append(ended)
        data = torch.cat(outputs, 2) if both else outputs[0]
    ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
    unread = data.new_zeros([0], dtype=torch.uint8), data.new_zeros([0])
    return data, ends[0], ends[1] if len(ends) > 1 else data.new_zeros([0]), *unread


def _layer(mode: int, data: Any, first: Sequence[Any], weights: Any, backwards: bool) -> tuple[Any, Sequence[Any]]:
    """One layer in one direction: an LSTM as the CPU's operator for one, of which backends have rows."""
    if mode == LSTM and weights.projection is None:
        biases = weights.input_bias is not None
        two = (weights.input_bias, weights.hidden_bias) if biases else (data.new_zeros([0]), data.new_zeros([0]))
        sizes = weights.hidden.size(1), 1, biases, False, False, False
        given = (one.unsqueeze(0) for one in first)
        op = aten.mkldnn_rnn_layer.default
        output, *last = op(data, weights.input, weights.hidden, *two, *given, backwards, [], mode, *sizes)[:3]
        return output, [one.squeeze(0) for one in last]
    steps, rows = data.size()[:2]
    output, last = run_layer(
        CELLS[_NAMES[mode]], data.reshape(steps * rows, -1), [rows] * steps, tuple(first), weights, backwards
    )
    return output.reshape(steps, rows, -1), last


def cudnn_layers_backward(
    data: Any, flat: Sequence[Any], stride: int, buffer: Any, first: Any, cell: Any, output: Any, of_output: Any,
    at_end: Any, at_end_of_cell: Any, mode: int, size: Any, projected: Any, count: int, batch_first: bool,
    dropout: float, train: bool, both: bool, batch_sizes: Sequence[Any], *_: Any,
) -> Any:  # fmt: skip
    """Of LSTMs; what is between layers is computed once more."""
    if (dropout and train and count > 1) or batch_first or batch_sizes or type(data.size(0)) is not int:
        return NotImplemented
    if mode != LSTM or projected:
        return NotImplemented
    weights, ways = list(weights_of(flat, stride == 4, False)), range(1 + both)
    inputs, found = [data], list[Any]()
    for number in range(count - 1):
        places = [(number * len(ways) + way, bool(way)) for way in ways]
        parts = [_layer(mode, inputs[-1], [first[at], cell[at]], weights[at], back)[0] for at, back in places]
        inputs.append(torch.cat(parts, 2))
    below = output.new_zeros(output.size()) if of_output is None else of_output
    states: list[Any] = [None if one is None else one.split(1) for one in (first, cell, at_end, at_end_of_cell)]
    for number in reversed(range(count)):
        of_ways = []
        for way, of_way in zip(ways, below.chunk(len(ways), 2), strict=True):
            at = number * len(ways) + way
            h, c, of_h, of_c = (None if one is None else one[at] for one in states)
            above = _layer(mode, inputs[number], [first[at], cell[at]], weights[at], bool(way))[0]
            own = weights[at]
            biases = own.input_bias is not None
            two = (own.input_bias, own.hidden_bias) if biases else (data.new_zeros([0]), data.new_zeros([0]))
            gradients = of_way, of_h, of_c, bool(way)
            taken = inputs[number], own.input, own.hidden, *two, h, c, above, None, None
            of_ways.append(recurrent_layer_backward(*taken, *gradients, mode, size, 1, biases))
        below = sum(one[0] for one in of_ways)
        found = of_ways + found
    of_weights = [part for one in found for part in one[1 : 1 + stride]]
    return below, torch.cat([one[5] for one in found]), torch.cat([one[6] for one in found]), of_weights


LAYERS: dict[Any, Callable[..., Any]] = {
    aten.mkldnn_rnn_layer.default: recurrent_layer,
    aten.mkldnn_rnn_layer_backward.default: recurrent_layer_backward,
    aten._cudnn_rnn.default: cudnn_layers,
    aten._cudnn_rnn_backward.default: cudnn_layers_backward,
}
