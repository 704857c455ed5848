"""Programs whose first call differs from later ones: exported by what all calls do, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import (
    UnsupportedExportError,
    UnsupportedProgramError,
    capture,
)
from tests.support.routes import SAVED, STABLEHLO


def parity() -> Any:
    calls = [0]

    def run(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * 2 if calls[0] % 2 else x

    return run


def test_a_first_call_that_decides_otherwise_is_refused() -> None:
    program = capture(parity(), (torch.ones(2),))
    with pytest.raises(UnsupportedExportError, match=r"(?s)takes another branch than later calls.*calls\[0\] % 2"):
        program.to_exported_program()


def test_decisions_by_changed_numbers_are_no_business_of_jax() -> None:
    pytest.importorskip("jax")
    with pytest.raises(UnsupportedProgramError, match="changes this Python object"):
        capture(parity(), (torch.ones(2),)).to_jax()


def _gives_its_gradient(w: Tensor, x: Tensor) -> Any:
    (w * x).sum().backward()
    return w.grad


def _accumulates(w: Tensor, x: Tensor) -> Any:
    loss = (w * x).sum()
    loss.backward()
    return loss.detach()


def _begins_with_zeros(w: Tensor, x: Tensor) -> Any:
    if w.grad is not None:
        w.grad.zero_()
    (w * x).sum().backward()
    return w.detach() * x


@pytest.mark.parametrize("function", [_gives_its_gradient, _accumulates, _begins_with_zeros])
def test_gradients_of_a_first_call_are_added_to_by_later_ones(function: Any, tmp_path: Path) -> None:
    mine, twin = (nn.Parameter(torch.tensor([1.0, 3.0])) for _ in range(2))
    program = capture(lambda x: function(mine, x), (torch.ones(2),))
    module: Any = SAVED(program, tmp_path)
    runs = [module, STABLEHLO(program, tmp_path)]
    for number in range(3):
        x = torch.tensor([1.0, 2.0]) + number
        expected = function(twin, x)
        for run in runs:
            torch.testing.assert_close(run(x), expected)
        torch.testing.assert_close(dict(module.named_buffers()), {"mine_grad": twin.grad})
    assert mine.grad is None


def test_a_first_call_that_asks_for_gradients_is_refused() -> None:
    w = nn.Parameter(torch.tensor([1.0, 3.0]))

    def asks(x: Tensor) -> Tensor:
        result = w * x * 3 if w.grad is None else w * x
        (w * w).sum().backward()
        return result.detach()

    program = capture(asks, (torch.ones(2),), on_guard_failure="recapture")
    with pytest.raises(UnsupportedExportError, match=r"(?s)first call creates `w\.grad`.*try  call the program once"):
        program.to_exported_program()
    assert w.grad is None
    program(torch.ones(2))
    assert torch.equal(program.to_exported_program().module()(torch.ones(2)), w.detach())


def test_a_first_call_that_fails_for_other_data_is_refused() -> None:
    cache: dict[str, Tensor] = {}

    def second_of_those_above(x: Tensor) -> Tensor:
        if "last" not in cache:
            cache["last"] = x[(x > 5).nonzero()[1, 0]].clone()
        result: Tensor = x + cache["last"]
        return result

    program = capture(second_of_those_above, (torch.tensor([9.0, 1.0, 8.0]),))
    with pytest.raises(
        UnsupportedExportError, match=r"(?s)fails for data other than that of the capture.*try  call the"
    ):
        program.to_exported_program()
