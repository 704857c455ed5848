"""What the objects that users meet say of themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from functionalize import CapturedProgram, capture


@pytest.fixture(scope="module")
def program() -> CapturedProgram:
    count = torch.zeros(2)

    def counter(x: Tensor) -> Tensor:
        return x + count.add_(1)

    return capture(counter, (torch.zeros(2),))


def test_a_captured_program(program: CapturedProgram) -> None:
    lines = [line.split(maxsplit=1) for line in repr(program).splitlines()]
    assert lines[0][0].startswith("CapturedProgram(") and "counter" in lines[0][0]
    assert dict(lines[1:]) == {
        "inputs": "x",
        "state": "1 tensor",
        "writes": program.mutations[0].target,
        "graph": "2 operators, remove='mutations_and_views'",
        "variants": "1",
    }


def test_its_parts(program: CapturedProgram) -> None:
    (write,) = program.mutations
    assert str(write).startswith(f"{write.target}: aten.add_.Tensor at ")
    assert repr(program.variants) == "[Variant(no decisions)]"


def test_programs_of_jax_and_onnx(program: CapturedProgram) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("onnxruntime")
    from functionalize.backends import onnx

    target = program.mutations[0].target
    assert repr(program.to_jax()) == f"JaxProgram(jax; arguments: x; state: {target}; written: {target})"
    assert repr(onnx.load(program.to_onnx())) == f"OnnxProgram(the model; arguments: x; state: {target})"
