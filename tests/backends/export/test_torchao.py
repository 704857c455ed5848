"""Weights that torchao quantized, captured, compiled and exported: all compute what eager does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from functionalize import capture

quantization: Any = pytest.importorskip("torchao.quantization", reason="needs torchao (pip install torchao)")
WIDTHS = [
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "IntxWeightOnlyConfig",
    "Float8WeightOnlyConfig",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", WIDTHS)
def test_quantized_weights_are_opened(config: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), torch.randn(2, 64)
    quantization.quantize_(model, getattr(quantization, config)())
    with torch.no_grad():
        wanted, program = model(x), capture(model, (x,))
        exported = program.to_exported_program()
        results = [program(x), torch.compile(model, backend="functionalize")(x), exported.module()(x)]
        if config in ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig"):
            onnx = pytest.importorskip("functionalize.backends.onnx", reason="needs onnx")
            results.append(onnx.load(program.to_onnx())(x))
    for result in results:
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    assert exported.state_dict["0.weight.qdata"].itemsize == 1
