"""ONNX files written by several threads, and torch's own exporter beside ours: each file as if nobody else exported."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from tests.unit.runtime.test_threads import together

pytest.importorskip("onnx")
onnxscript = pytest.importorskip("onnxscript")

from torch.onnx._internal.exporter import _building, _core, _registration  # noqa: E402


def scale(x: Tensor) -> Tensor:
    """In float64, so that the exporter's way to write numbers is replaced; 1e-9 is no 0, 1.0000001 no 1."""
    return (x * 1.0000001 + 1e-9) / 3.1


def norm() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


class Pool(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(x.float().clamp(0, 1).clamp(0.1, 0.9) + 1e-9, 2)


def settings() -> list[Any]:
    """What torch's exporter and onnxscript hold for the process, and our route uses or goes around."""
    return [
        _building._determine_input_dtype,
        vars(_registration.ONNXRegistry)["from_torchlib"],
        _core.export,
        onnxscript.rewriter._DEFAULT_REWRITE_RULES,
        [(value._rel_tol, value._abs_tol) for value in _constants()],
        list(onnxscript.optimizer._constant_folding.DEFAULT_CONSTANT_FOLD_BLACKLIST),
        [logging.getLogger(name).level for name in (_registration.__name__, "onnxscript", "onnx_ir")],
        list(warnings.filters),
    ]


def _constants() -> list[Any]:
    patterns = [rule._target_pattern for rule in onnxscript.rewriter._DEFAULT_REWRITE_RULES]
    values = [value for pattern in patterns for node in pattern for value in node.inputs]
    return [value for value in values if hasattr(value, "_abs_tol")]


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.full)])
def test_two_exports_in_two_threads(rounds: int, tmp_path: Path) -> None:
    programs = {
        "scale": capture(scale, (torch.ones(3, dtype=torch.float64),)),
        "norm": capture(norm(), (torch.ones(4, 3),)),
    }
    alone = {name: program.to_onnx(tmp_path / f"{name}.onnx").read_bytes() for name, program in programs.items()}
    before = settings()

    def export(name: str) -> Callable[[], None]:
        def work() -> None:
            for _ in range(rounds):
                written = programs[name].to_onnx(tmp_path / f"{name}.again.onnx").read_bytes()
                assert written == alone[name]

        return work

    assert together(*map(export, programs), seconds=300) == []
    assert settings() == before


@pytest.mark.slow(seconds=5)
def test_torch_exports_while_ours_is_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours waits where it has replaced what it replaces; torch's export gives then what it gave before."""

    def theirs() -> bytes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its pytree specs
            program = torch.onnx.export(Pool(), (torch.ones(1, 1, 4, 4).double(),), dynamo=True, verbose=False)
        assert program is not None
        written: bytes = program.model_proto.SerializeToString()
        return written

    before, alone = settings(), theirs()
    waits, goes_on = threading.Event(), threading.Event()
    export = _core.export

    def waiting(program: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is ours:
            waits.set()
            assert goes_on.wait(120)
        return export(program, *args, **kwargs)

    captured = capture(scale, (torch.ones(3, dtype=torch.float64),))
    expected = captured.to_onnx(tmp_path / "alone.onnx").read_bytes()
    path = tmp_path / "beside.onnx"
    ours = threading.Thread(target=captured.to_onnx, args=(path,), daemon=True)
    monkeypatch.setattr(_core, "export", waiting)
    ours.start()
    assert waits.wait(120)
    beside = theirs()
    goes_on.set()
    ours.join(120)
    monkeypatch.undo()
    assert beside == alone
    assert path.read_bytes() == expected
    assert settings() == before


@pytest.mark.slow
def test_an_export_that_is_refused_leaves_nothing_replaced(tmp_path: Path) -> None:
    before = settings()
    refused = capture(lambda x: torch.linalg.svd(x)[1], (torch.eye(3, dtype=torch.float64),))
    with pytest.raises(Exception, match="ONNX"):
        refused.to_onnx(tmp_path / "refused.onnx")
    assert settings() == before
