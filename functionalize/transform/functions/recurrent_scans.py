"""Recurrent layers over a number of steps that differs between calls: one scan, and one for its gradients.

Torch decomposes these layers step by step: a graph would have as many steps as the example.

Invariant: a scan computes what torch's kernels compute at each step. Limits: first gradients only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
aten = torch.ops.aten
_scan: Any = torch.ops.higher_order.scan
_LSTM = 2  # oneDNN's number for the kind of layer


def scanned(name: str, data: Tensor, first: Tensors, weights: Any, backwards: bool) -> tuple[Tensor, Tensors]:
    """The outputs of one layer in one direction at all steps, and its last state."""
    if name == "lstm" and weights.projection is None and _in_one_kernel(data, first, weights):
        return _by_one_kernel(data, first, weights, backwards)
    gates = linear(data, weights.input, weights.input_bias)
    gates = gates.flip(0) if backwards else gates
    apply: Any = _Layer.apply
    outputs, *last = apply(name, gates, weights.hidden, weights.hidden_bias, weights.projection, *first)
    return outputs.flip(0) if backwards else outputs, tuple(last)


def _in_one_kernel(data: Tensor, first: Tensors, weights: Any) -> bool:
    """Whether eager has oneDNN compute the layer."""
    tensors = (data, *first, *(part for part in weights if part is not None))
    floats = all(part.dtype == torch.float32 and part.device.type == "cpu" for part in tensors)
    return floats and bool(torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available())


def _by_one_kernel(data: Tensor, first: Tensors, weights: Any, backwards: bool) -> tuple[Tensor, Tensors]:
    none = weights.input.new_zeros([weights.input.size(0)])
    biases = [none if bias is None else bias for bias in (weights.input_bias, weights.hidden_bias)]
    how: Any = [], _LSTM, weights.hidden.size(1), 1, weights.input_bias is not None, False, False, False
    data, states = data.contiguous(), [part.unsqueeze(0).contiguous() for part in first]
    outputs, *last = aten.mkldnn_rnn_layer(data, weights.input, weights.hidden, *biases, *states, backwards, *how)[:3]
    return outputs, tuple(part.squeeze(0) for part in last)


class _Layer(torch.autograd.Function):
    """A layer on gates that have what the input adds; returns all hidden states, the last one, and the last cell."""

    @staticmethod
    def forward(ctx: Any, name: str, gates: Tensor, hidden: Tensor, bias: Any, projection: Any, *first: Tensor) -> Any:
        step, count = _STEPS[name], len(first)

        def body(*args: Tensor) -> Any:
            state, gate, used = args[:count], args[count], iter(args[count + 1 :])
            kept = linear(state[0], next(used), None if bias is None else next(used))
            new = step(gate, kept, state)
            new = new if projection is None else (linear(new[0], next(used)), *new[1:])
            return *new, *(part.clone() for part in new)

        weights = tuple(part for part in (hidden, bias, projection) if part is not None)
        results = _scan(body, tuple(part.contiguous() for part in first), (gates,), weights)
        states = results[count:]
        ctx.kind = name
        ctx.save_for_backward(gates, hidden, bias, projection, *first, *states)
        return states[0], *results[:count]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_given: Tensor, *of_last: Tensor) -> Any:
        gates, hidden, bias, projection, *rest = ctx.saved_tensors
        count = len(of_last)
        first, states = rest[:count], rest[count:]
        before = [torch.cat([part.unsqueeze(0), later])[:-1] for part, later in zip(first, states, strict=True)]
        factors, output = _FACTORS[ctx.kind](gates, linear(before[0], hidden, bias), before, states)
        step = _GRADIENTS[ctx.kind]

        def body(*args: Tensor) -> Any:
            of_hidden = args[0] + args[count]
            now, weights = args[count + 1 : count + 1 + len(factors)], args[count + 1 + len(factors) :]
            of_output = of_hidden if projection is None else of_hidden @ weights[1]
            of_gates, of_kept, of_before = step((of_output, *args[1:count]), now)
            of_before = (of_kept @ weights[0] + of_before[0], *of_before[1:])
            return *of_before, of_gates, of_kept, of_hidden.clone()

        weights = (hidden,) if projection is None else (hidden, projection)
        along = tuple(part.flip(0) for part in (of_given, *factors))
        results = _scan(body, tuple(part.contiguous() for part in of_last), along, weights)
        of_gates, of_kept, of_hidden = (part.flip(0) for part in results[count:])
        rows = of_kept.flatten(0, 1)
        return (
            *(None, of_gates, rows.t() @ before[0].flatten(0, 1)),
            None if bias is None else rows.sum(0),
            None if projection is None else of_hidden.flatten(0, 1).t() @ output.flatten(0, 1),
            *results[:count],
        )


def _simple(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensors], Tensors]:
    return lambda gates, kept, state: (activation(kept + gates),)


def _gru(gates: Tensor, kept: Tensor, state: Tensors) -> Tensors:
    _, update, new, _ = _parts_of_gru(gates, kept)
    return ((state[0] - new) * update + new,)


def _parts_of_gru(gates: Tensor, kept: Tensor) -> Tensors:
    of_input, of_state = gates.chunk(3, -1), kept.chunk(3, -1)
    reset, update = (of_state[0] + of_input[0]).sigmoid(), (of_state[1] + of_input[1]).sigmoid()
    return reset, update, (of_input[2] + of_state[2] * reset).tanh(), of_state[2]


def _lstm(gates: Tensor, kept: Tensor, state: Tensors) -> Tensors:
    into, forget, new, out = (kept + gates).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _factors_of_tanh(gates: Tensor, kept: Tensor, before: Any, states: Any) -> tuple[Tensors, Any]:
    return (1 - states[0] * states[0],), None


def _factors_of_relu(gates: Tensor, kept: Tensor, before: Any, states: Any) -> tuple[Tensors, Any]:
    return ((states[0] > 0).to(kept.dtype),), None


def _factors_of_gru(gates: Tensor, kept: Tensor, before: Any, states: Any) -> tuple[Tensors, Any]:
    reset, update, new, of_state = _parts_of_gru(gates, kept)
    to_new = (1 - update) * (1 - new * new)
    to_update = (before[0] - new) * update * (1 - update)
    return (to_new, to_update, of_state * reset * (1 - reset), reset, update), None


def _factors_of_lstm(gates: Tensor, kept: Tensor, before: Any, states: Any) -> tuple[Tensors, Any]:
    """Returns, too, the layer's output before its projection."""
    into, forget, new, out = (kept + gates).chunk(4, -1)
    into, forget, new, out, shown = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid(), states[1].tanh()
    to_gates = new * into * (1 - into), before[1] * forget * (1 - forget), into * (1 - new * new)
    return (*to_gates, shown * out * (1 - out), out * (1 - shown * shown), forget), out * shown


def _simple_gradients(of_state: Tensors, factors: Tensors) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    of_gates = of_state[0] * factors[0]
    return of_gates, of_gates.clone(), (0,)


def _gru_gradients(of_state: Tensors, factors: Tensors) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    to_new, to_update, to_reset, reset, update = factors
    of_new, of_update = of_state[0] * to_new, of_state[0] * to_update
    both = torch.cat([of_new * to_reset, of_update], -1)
    return torch.cat([both, of_new], -1), torch.cat([both, of_new * reset], -1), (of_state[0] * update,)


def _lstm_gradients(of_state: Tensors, factors: Tensors) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    to_into, to_forget, to_new, to_out, to_cell, forget = factors
    of_cell = of_state[1] + of_state[0] * to_cell
    of_gates = torch.cat([of_cell * to_into, of_cell * to_forget, of_cell * to_new, of_state[0] * to_out], -1)
    return of_gates, of_gates.clone(), (0, of_cell * forget)


# By kind of layer: a step; the factors of the gradients at all steps; and a step of the gradients, which returns those
# of the gates, of what the last state adds to the gates, and of the state before.
_STEPS: dict[str, Any] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _simple(torch.tanh), "rnn_relu": _simple(torch.relu)}
_FACTORS: dict[str, Any] = {
    "lstm": _factors_of_lstm,
    "gru": _factors_of_gru,
    "rnn_tanh": _factors_of_tanh,
    "rnn_relu": _factors_of_relu,
}
_GRADIENTS: dict[str, Any] = {
    "lstm": _lstm_gradients,
    "gru": _gru_gradients,
    "rnn_tanh": _simple_gradients,
    "rnn_relu": _simple_gradients,
}
