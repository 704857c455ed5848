"""Recurrent layers over a time that differs from call to call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from functionalize import capture

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
Tensor = torch.Tensor
LAYERS: dict[str, Any] = {
    "gru": lambda **o: nn.GRU(3, 4, **o),
    "two grus, both ways": lambda **o: nn.GRU(3, 4, 2, bidirectional=True, **o),
    "a gru without biases": lambda **o: nn.GRU(3, 4, bias=False, **o),
    "tanh": lambda **o: nn.RNN(3, 4, **o),
    "relu, both ways": lambda **o: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, **o),
    "two lstms, both ways": lambda **o: nn.LSTM(3, 4, 2, bidirectional=True, **o),
    "a projection": lambda **o: nn.LSTM(3, 4, proj_size=2, **o),
    "lstm of doubles": lambda **o: nn.LSTM(3, 4, **o).double(),
}


def made(kind: str, batch_first: bool = True) -> tuple[Any, list[Tensor], Any]:
    """A layer, inputs of several lengths, and which dimension is dynamic."""
    torch.manual_seed(0)
    layer = LAYERS[kind](batch_first=batch_first)
    dtype = next(layer.parameters()).dtype
    sizes = [(2, time, 3) if batch_first else (time, 2, 3) for time in (5, 7, 2)]
    inputs = [torch.randn(size, dtype=dtype) for size in sizes]
    return layer, inputs, ({1 if batch_first else 0: Dim("time", min=2, max=64)},)


def leaves(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_eager(kind: str) -> None:
    layer, inputs, sizes = made(kind, batch_first=False)
    program = capture(layer, (inputs[0].clone().requires_grad_(),), dynamic_shapes=sizes)
    for x in inputs:
        gradients = []
        for call in (layer, program):
            given = x.clone().requires_grad_()
            results = leaves(call(given))
            total = sum((one * torch.linspace(-1, 1, one.numel()).reshape(one.shape)).sum() for one in results)
            gradients.append([results, torch.autograd.grad(total, [given, *layer.parameters()])])
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", ["a gru without biases", "a projection"])
def test_exported_programs(kind: str) -> None:
    layer, inputs, sizes = made(kind)
    module = capture(layer, (inputs[0],), dynamic_shapes=sizes).to_exported_program().module()
    with torch.no_grad():  # torch compiles the gradients of a scan
        for x in inputs:
            torch.testing.assert_close(leaves(module(x)), leaves(layer(x)))


@pytest.mark.parametrize("kind", ["a gru without biases", "relu, both ways"])
def test_onnx_files(kind: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("functionalize.backends.onnx")
    layer, inputs, sizes = made(kind)
    loaded = onnx.load(capture(layer, (inputs[0],), dynamic_shapes=sizes).to_onnx(tmp_path / "layer.onnx"))
    for x in inputs:
        torch.testing.assert_close(leaves(loaded(x)), leaves(layer(x)), atol=1e-5, rtol=1e-4)


def test_jax_and_stablehlo(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    from functionalize.backends.jax import load

    layer, inputs, sizes = made("gru")
    program = capture(layer, (inputs[0],), dynamic_shapes=sizes)
    function, loaded = program.to_jax(), load(program.to_stablehlo(tmp_path / "layer.stablehlo"))
    for x in inputs:
        _, results = function(function.initial_state, x.numpy())
        for given in (results, loaded(x.numpy())):
            for one, other in zip(leaves(given), leaves(layer(x)), strict=True):
                torch.testing.assert_close(torch.tensor(one.tolist()), other, atol=1e-5, rtol=1e-4)


def test_dropout_between_layers_draws_as_eager() -> None:
    layer = nn.GRU(3, 4, 2, dropout=0.5)
    program = capture(layer, (torch.randn(5, 2, 3),), dynamic_shapes=({0: Dim("time", min=2, max=9)},))
    x = torch.randn(4, 2, 3)
    torch.manual_seed(1)
    expected = layer(x)
    torch.manual_seed(1)
    torch.testing.assert_close(program(x), expected)


def test_bodies_of_higher_order_operators_have_views_in_onnx_files(tmp_path: Path) -> None:
    onnx = pytest.importorskip("functionalize.backends.onnx")

    def choose(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x[:, :2].clone() * 2, lambda x: x[:, 1:3].t().t() * 3, (x,))

    loaded = onnx.load(capture(choose, (torch.ones(2, 3),)).to_onnx(tmp_path / "choose.onnx"))
    for x in (torch.arange(6.0).reshape(2, 3), -torch.arange(6.0).reshape(2, 3)):
        torch.testing.assert_close(loaded(x), choose(x))


def test_batches_without_rows_are_captured_again() -> None:
    layer = nn.LSTM(3, 4, batch_first=True)
    program = capture(layer, (torch.randn(2, 5, 3),), dynamic_shapes=({0: Dim.AUTO},), on_guard_failure="recapture")
    for x in (torch.randn(0, 5, 3), torch.randn(1, 5, 3), torch.randn(3, 5, 3)):
        torch.testing.assert_close(program(x), layer(x))
