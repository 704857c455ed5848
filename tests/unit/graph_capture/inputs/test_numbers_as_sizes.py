"""Tensors that stand for sizes, positions or counts: one program for all their values, also where it is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from functionalize import capture

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")

Tensor = torch.Tensor


def written(x: Tensor, n: Tensor) -> Tensor:
    y = x.clone()
    y[:, :n] = 7.0
    y[0, n:] += 1
    return y


def cached(x: Tensor, n: Tensor) -> Tensor:
    cache = torch.zeros(2, 20)
    cache[:, n : n + 12] = x
    return cache[:, : n + 12].sum(1)


def regulated(x: Tensor, n: Tensor) -> Tensor:
    """Each of two rows repeated as often as its duration says, padded to the longest."""
    durations = torch.stack([n, n + 1])
    rows = torch.zeros(2, int(durations.max()), 12)
    for row in range(2):
        rows[row, : durations[row]] = x[row]
    return rows


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a slice": lambda x, n: x[:, :n] * 2,
    "a begin": lambda x, n: x.t()[n:] * 2,
    "a step": lambda x, n: x[:, 1:n:2] * 2,
    "from the end": lambda x, n: x[:, -n:] * 2,
    "a window": lambda x, n: x[:, n : n + 2] * 2,
    "beside others": lambda x, n: x[..., None, slice(None, n)] * 2,
    "of one element": lambda x, n: x[:, : n.reshape(1)] * 2,
    "of few bits": lambda x, n: x[:, : n.to(torch.int32)] * 2,
    "a constant first": lambda x, n: F.pad(x, [0, int(12 - n)]),
    "a constant first, converted": lambda x, n: torch.zeros(int(1 + n)) + 1,
    "written": written,
    "cached": cached,
    "regulated": regulated,
}
CALLS = [3, 5, 2]


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_values_have_one_program(name: str) -> None:
    x, program = torch.arange(24.0).reshape(2, 12), PROGRAMS[name]
    captured = capture(program, (x, torch.tensor(3)))
    exported = captured.to_exported_program()
    routes = captured, exported.module(), exported.run_decompositions().module()
    for value in CALLS:
        n = torch.tensor(value)
        for route in routes:
            torch.testing.assert_close(route(x, n), program(x, n))
    assert len(captured.variants) == 1


@pytest.mark.parametrize("name", ["from the end", "cached"])
def test_onnx_files(name: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("functionalize.backends.onnx")
    x, program = torch.arange(24.0).reshape(2, 12), PROGRAMS[name]
    loaded = onnx.load(capture(program, (x, torch.tensor(3))).to_onnx(tmp_path / "program.onnx"))
    for value in CALLS:
        n = torch.tensor(value)
        torch.testing.assert_close(loaded(x, n), program(x, n))


@pytest.mark.every(5)
@pytest.mark.parametrize("value", [0, -2, 12, -12, 40, -40])
def test_slices_beyond_the_ends(value: int) -> None:
    x, n = torch.arange(24.0).reshape(2, 12), torch.tensor(value)
    for name in ("a slice", "a begin", "from the end", "written"):
        exported = capture(PROGRAMS[name], (x, torch.tensor(3))).to_exported_program().module()
        torch.testing.assert_close(exported(x, n), PROGRAMS[name](x, n))


def test_gradients_through_a_slice() -> None:
    x, n = torch.arange(24.0).reshape(2, 12).requires_grad_(), torch.tensor(5)
    program = capture(lambda x, n: x[:, :n].square(), (x, torch.tensor(3)))
    (gradient,) = torch.autograd.grad(program(x, n).sum(), x)
    torch.testing.assert_close(gradient, torch.where(torch.arange(12) < 5, 2 * x.detach(), 0.0))


class Lazy(torch.nn.Module):
    """Makes its state at the first call, and repeats itself as often as its data say."""

    h: Tensor | None = None

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        if self.h is None:
            self.h = torch.zeros(2)
        for _ in range(int(n)):
            self.h = self.h + x
        return self.h * (2 if x.sum() > 0 else 3)


def test_state_of_a_first_call_that_decides_by_data() -> None:
    eager, x, n = Lazy(), torch.ones(2), torch.tensor(3)
    module = capture(Lazy(), (x, n)).to_exported_program().module()
    for _ in range(3):
        torch.testing.assert_close(module(x, n), eager(x, n))
    with pytest.raises(RuntimeError, match="range"):
        module(x, torch.tensor(4))
