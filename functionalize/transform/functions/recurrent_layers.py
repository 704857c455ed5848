"""Recurrent layers on fake tensors, and the packed sequences that they take: decomposed, step by step.

Torch's kernels read the batch size of each step from the data. Here the program asks for these numbers.

Invariant: results are those of torch's kernels. Limits: layers that are not quantized.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear

from functionalize._torch import FakeTensor, no_python_dispatcher
from functionalize._torch.tensors import RECURRENT
from functionalize.transform.functions import cudnn_layers
from functionalize.transform.functions.recurrent_scans import scanned

Tensor = torch.Tensor
State = tuple[Tensor, ...]  # after a step: the hidden state, and the cell of an LSTM
Call = Callable[..., Any]


def _numbers(tensor: Tensor) -> list[int]:
    return [int(number) for number in tensor.tolist()]


def _pack(pack: Call) -> Call:
    """``_pack_padded_sequence``."""

    def packed(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        if not isinstance(input, FakeTensor):
            return pack(input, lengths, batch_first)  # type: ignore[no-any-return]
        steps, numbers = (input.transpose(0, 1) if batch_first else input), _numbers(lengths)
        _check(steps, numbers)
        sizes = [sum(length > step for length in numbers) for step in range(numbers[0])]
        rows = torch.tensor(_rows(sizes, steps.size(1)), device=input.device)
        return steps[: numbers[0]].flatten(0, 1).index_select(0, rows), torch.tensor(sizes)

    return packed


def _check(steps: Tensor, lengths: list[int]) -> None:
    """Raise the kernel's errors."""
    if len(lengths) != steps.size(1):
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {len(lengths)} (batch_size={steps.size(1)})"
        )
    if any(length <= 0 for length in lengths):
        raise RuntimeError(
            "Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0"
        )
    if any(length < after for length, after in itertools.pairwise(lengths)):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence and/or pack_sequence to sidestep this requirement if you "
            "do not need ONNX exportability."
        )
    if lengths[0] > steps.size(0):
        raise RuntimeError(f"Expected sequence lengths to be at most {steps.size(0)}, but got {lengths[0]}")


def _rows(sizes: Sequence[int], batch: int) -> list[int]:
    """The positions of the packed rows, step by step, in the steps of all sequences one after the other."""
    return [step * batch + row for step, size in enumerate(sizes) for row in range(size)]


def _pad(pad: Call) -> Call:
    """``_pad_packed_sequence``."""

    def padded(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
        if not isinstance(data, FakeTensor):
            return pad(data, batch_sizes, batch_first, value, total)  # type: ignore[no-any-return]
        sizes = _numbers(batch_sizes)
        if 0 < total < len(sizes):
            raise RuntimeError(
                "Expected total_length to be at least the length of the longest sequence in input, but got "
                f"total_length={total} and max sequence length being {len(sizes)}"
            )
        steps = max(total, len(sizes))
        rows = torch.tensor(_rows(sizes, sizes[0]), device=data.device)
        filled = data.new_full((steps * sizes[0], *data.size()[1:]), value)
        whole = filled.index_copy(0, rows, data).unflatten(0, (steps, sizes[0]))
        lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
        return whole.transpose(0, 1) if batch_first else whole, lengths

    return padded


class _Weights(NamedTuple):
    """The weights of one layer in one direction."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None

    def of_state(self, hidden: Tensor) -> Tensor:
        """What the last state adds to the gates."""
        return linear(hidden, self.hidden, self.hidden_bias)


def _lstm(gates: Tensor, state: State, weights: _Weights) -> State:
    hidden, cell = state
    into, forget, new, out = (weights.of_state(hidden) + gates).chunk(4, 1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    hidden = out.sigmoid() * cell.tanh()
    return hidden if weights.projection is None else linear(hidden, weights.projection), cell


def _gru(gates: Tensor, state: State, weights: _Weights) -> State:
    (hidden,) = state
    added, kept = gates.chunk(3, 1), weights.of_state(hidden).chunk(3, 1)
    reset, update = (kept[0] + added[0]).sigmoid(), (kept[1] + added[1]).sigmoid()
    new = (added[2] + kept[2] * reset).tanh()
    return ((hidden - new) * update + new,)


def _simple(activation: Call) -> Call:
    def step(gates: Tensor, state: State, weights: _Weights) -> State:
        return (activation(weights.of_state(state[0]) + gates),)

    return step


def run_layer(step: Call, data: Tensor, sizes: Sequence[int], first: State, weights: _Weights, backwards: bool) -> Any:
    """The outputs of one layer in one direction at all steps, and its last state of each sequence."""
    gates = linear(data, weights.input, weights.input_bias).split(sizes)
    order = range(len(sizes))[:: -1 if backwards else 1]
    state, ended, outputs = tuple(part[: sizes[order[0]]] for part in first), list[State](), list[Tensor]()
    for at in order:
        size, before = sizes[at], state[0].size(0)
        if size < before:
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        elif size > before:
            state = tuple(torch.cat([part, new[before:size]]) for part, new in zip(state, first, strict=True))
        state = step(gates[at], state, weights)
        outputs.append(state[0])
    last = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True)) if ended else state
    return torch.cat(outputs[::-1] if backwards else outputs), last


def weights_of(flat: Sequence[Tensor], biases: bool, projects: bool) -> Iterator[_Weights]:
    count = (4 if biases else 2) + projects
    for at in range(0, len(flat), count):
        own = list(flat[at : at + count])
        projection = own.pop() if projects else None
        yield _Weights(own[0], own[1], own[2] if biases else None, own[3] if biases else None, projection)


def _layers(name: str, step: Call) -> Call:
    """Torch's recurrent layers, stacked."""
    layer = RECURRENT[name]

    def run(data: Tensor, *args: Any, **options: Any) -> Any:
        if len(args) != 8 or not isinstance(data, FakeTensor):
            return layer(data, *args, **options)
        if isinstance(args[2], (tuple, list)):  # the weights, which come after the sizes
            return _on_packed(step, data, *args)
        if cudnn_layers.runs_there(data):
            return cudnn_layers.layers(name, data, *args)
        _, _, _, count, dropout, train, _, batch_first = args
        if type(data.size(1 if batch_first else 0)) is not int:
            return _of_any_time(name, data, *args)
        if dropout and train and count > 1:
            return _one_by_one(layer, data, *args)
        is_empty = any(type(size) is int and not size for size in data.shape)
        with no_python_dispatcher() if is_empty else contextlib.nullcontext():  # torch's rules there need oneDNN
            return layer(data, *args)

    return run


def _on_packed(
    step: Call,
    data: Tensor,
    batch_sizes: Tensor,
    initial: Any,
    flat: Sequence[Tensor],
    biases: bool,
    count: int,
    dropout: float,
    train: bool,
    both: bool,
) -> tuple[Tensor, ...]:
    """The output of layers on packed data, and the last states."""
    if cudnn_layers.runs_there(data):
        cudnn_layers.refuse_dropout(dropout, train, count)
    sizes = _numbers(batch_sizes)

    def layer(data: Tensor, first: State, weights: _Weights, backwards: bool) -> tuple[Tensor, State]:
        return run_layer(step, data, sizes, first, weights, backwards)  # type: ignore[no-any-return]

    return _stacked(layer, data, initial, flat, biases, count, dropout if train else 0.0, both)


def _of_any_time(
    name: str,
    data: Tensor,
    initial: Any,
    flat: Sequence[Tensor],
    biases: bool,
    count: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The output of layers on sequences of one length, which differs between calls, and the last states."""
    steps = data.transpose(0, 1) if batch_first else data
    layer = functools.partial(scanned, name)
    output, *last = _stacked(layer, steps, initial, flat, biases, count, dropout if train else 0.0, both)
    return output.transpose(0, 1) if batch_first else output, *last


def _stacked(
    layer: Call, data: Tensor, start: Any, flat: Sequence[Tensor], biases: bool, count: int, dropout: float, both: bool
) -> tuple[Tensor, ...]:
    """The output of the last of stacked layers, and the last states of all."""
    states, last = [start] if isinstance(start, Tensor) else start, list[State]()
    weights = list(weights_of(flat, biases, len(states) > 1 and states[0].size(2) != states[1].size(2)))
    for number in range(count):
        outputs = []
        for at in range(number * (1 + both), (number + 1) * (1 + both)):
            first = tuple(part[at] for part in states)
            output, state = layer(data, first, weights[at], at > number * (1 + both))
            outputs.append(output)
            last.append(state)
        data = torch.cat(outputs, -1) if both else outputs[0]
        data = drop(data, dropout) if dropout and number < count - 1 else data
    return data, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _one_by_one(
    layer: Call,
    data: Tensor,
    initial: Any,
    flat: Sequence[Tensor],
    biases: bool,
    count: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The output of layers with dropout between them, and the last states: on symbols torch leaves the dropout out."""
    states, ways, own = [initial] if isinstance(initial, Tensor) else initial, 1 + both, len(flat) // count
    last = list[tuple[Tensor, ...]]()
    for number in range(count):
        first = tuple(part[number * ways : (number + 1) * ways] for part in states)
        weights = flat[number * own : (number + 1) * own]
        rest = weights, biases, 1, 0.0, train, both, batch_first
        data, *state = layer(data, first[0] if isinstance(initial, Tensor) else first, *rest)
        last.append(tuple(state))
        data = drop(data, dropout) if number < count - 1 else data
    return data, *(torch.cat(parts) for parts in zip(*last, strict=True))


CELLS = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _simple(torch.tanh), "rnn_relu": _simple(torch.relu)}
LAYERS: dict[Any, Call] = {
    RECURRENT["_pack_padded_sequence"]: _pack(RECURRENT["_pack_padded_sequence"]),
    RECURRENT["_pad_packed_sequence"]: _pad(RECURRENT["_pad_packed_sequence"]),
    **{RECURRENT[name]: _layers(name, step) for name, step in CELLS.items()},
}
