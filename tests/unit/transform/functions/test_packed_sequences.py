"""Packed sequences inside of captured programs, and the recurrent layers that run on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from functionalize import capture

LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(2, 3, batch_first=True),
    "lstm of two layers": lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True, dropout=0.5, batch_first=True),
    "lstm with projections": lambda: nn.LSTM(2, 4, proj_size=3, bias=False, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(2, 3, num_layers=2, batch_first=True),
    "gru both ways": lambda: nn.GRU(2, 3, bidirectional=True, bias=False, batch_first=True),
    "tanh": lambda: nn.RNN(2, 3, batch_first=True),
    "relu": lambda: nn.RNN(2, 3, nonlinearity="relu", bidirectional=True, num_layers=2, batch_first=True),
}


def packing(layer: nn.Module) -> Any:
    def program(x: Tensor, lengths: Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, state = layer(packed)
        return rnn.pad_packed_sequence(output, batch_first=True, padding_value=-1.0, total_length=6), state, output

    return program


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_on_packed_sequences(kind: str) -> None:
    layer = LAYERS[kind]()
    x, lengths = torch.randn(3, 5, 2, requires_grad=True), torch.tensor([2, 5, 1])
    program, original = capture(packing(layer), (x, lengths)), packing(layer)
    for given in (lengths, torch.tensor([4, 1, 4]), lengths):
        found = []
        for run in (program, original):
            torch.manual_seed(1)
            (padded, state, output) = run(x, given)
            leaves = [*padded, *(state if isinstance(state, tuple) else [state]), *output]
            loss = sum(one.cos().sum() for one in leaves if one is not None and one.is_floating_point())
            found.append((leaves, torch.autograd.grad(loss, [x, *layer.parameters()])))
        torch.testing.assert_close(*found)
    assert len(program.variants) == 2


def test_a_state_that_is_given_and_sequences_in_a_list() -> None:
    layer = nn.GRU(2, 3)

    def program(first: Tensor, second: Tensor, state: Tensor) -> Any:
        output, state = layer(rnn.pack_sequence([first, second]), state)
        return rnn.unpack_sequence(output), state

    given = torch.randn(4, 2), torch.randn(2, 2), torch.randn(1, 2, 3)
    captured = capture(program, given)
    torch.testing.assert_close(captured(*given), program(*given))
    assert len(captured.variants) == 1


def test_sequences_that_are_packed_outside() -> None:
    layer = nn.LSTM(2, 3)

    def program(packed: rnn.PackedSequence) -> Any:
        return rnn.pad_packed_sequence(layer(packed)[0])

    def packed(*lengths: int) -> rnn.PackedSequence:
        return rnn.pack_padded_sequence(torch.randn(lengths[0], len(lengths), 2), torch.tensor(lengths))

    captured = capture(program, (packed(4, 2, 1),), on_guard_failure="recapture")
    for one in (packed(4, 2, 1), packed(4, 3, 2), packed(4, 2, 1)):
        torch.testing.assert_close(captured(one), program(one))


@pytest.mark.parametrize("lengths", [[3, 4], [3, 0], [3]])
def test_lengths_that_torch_refuses(lengths: list[int]) -> None:
    def program(x: Tensor, lengths: Tensor) -> Any:
        return rnn.pack_padded_sequence(x, lengths, batch_first=True).data

    x, given = torch.randn(2, 5, 2), torch.tensor(lengths)
    with pytest.raises(RuntimeError) as wanted:
        program(x, given)
    with pytest.raises(RuntimeError) as found:
        capture(program, (x, given))
    assert str(found.value) in str(wanted.value) or str(wanted.value) in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_of_sizes_that_differ(kind: Any) -> None:
    layer, x = kind(2, 3, num_layers=2, dropout=0.5), torch.randn(1, 4, 2)
    program = capture(layer, (x,), dynamic_shapes=({1: torch.export.Dim("batch", min=2)},))
    for given in (x, torch.randn(1, 3, 2)):
        found = []
        for run in (program, layer):
            torch.manual_seed(0)
            found.append(run(given))
        torch.testing.assert_close(*found)
