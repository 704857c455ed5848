"""ONNX files of modules with quantized weights of a user's own class: the file has the integers, and dequantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import capture
from tests.support.wrappers import Int8Weight, numbers, two

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from functionalize.backends.onnx import load  # noqa: E402


class Dequantized(Int8Weight):
    """Its operators dequantize it, in ``__torch_dispatch__``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Quantized(nn.Module):
    """A layer of an int8 weight, and a count that is kept in two tensors."""

    calls: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(4, 4)
        self.layer.weight = nn.Parameter(Dequantized.of(numbers(4, 4)), requires_grad=False)
        self.register_buffer("calls", two(2))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.calls.add_(1)
        return self.layer(x).relu(), self.calls


@pytest.mark.slow(seconds=4)
def test_the_file_has_the_integers_and_computes_what_eager_does(tmp_path: Path) -> None:
    module, path, x = Quantized(), tmp_path / "quantized.onnx", numbers(2, 4)
    capture(module, (x,)).to_onnx(path, verify=True)
    weights = onnx.load(path).graph.initializer  # also small ones are not folded, as they would grow
    assert {weight.name: weight.data_type for weight in weights}["layer.weight.q"] == onnx.TensorProto.INT8
    run = load(path)
    for _ in range(2):
        (y, calls), (wanted, counted) = run(x), module(x)
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(calls, {"a": counted.a, "b": counted.b})
    assert run.state["calls.b"].equal(module.calls.b)


def test_arguments_and_results_are_called_by_their_attributes() -> None:
    model = capture(lambda x: (x * 2, x), (two(2, 3),)).to_onnx()
    assert [value.name for value in model.graph.input] == ["x.a", "x.b"]
    assert [value.name for value in model.graph.output] == ["output_0.a", "output_0.b", "output_1.a", "output_1.b"]
