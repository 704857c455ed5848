"""Derivative formulas that ask for data-dependent sizes: each differentiated call branches on its tensor values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functionalize import capture
from tests.support.graphs import REMOVES

Function = Callable[[Tensor], Tensor]

OF_PARTS: dict[str, Function] = {
    "cumsum": lambda y: y.cumsum(0),
    "cumsum of powers": lambda y: y.cumsum(0) ** 3,
    "cumprod": lambda y: y.cumprod(0),
    "logcumsumexp": lambda y: y.logcumsumexp(0),
    "std": Tensor.std,
    "var": Tensor.var,
    "mean beside": lambda y: torch.stack(torch.std_mean(y)),
    "prod": Tensor.prod,
    "prod of rows": lambda y: y.prod(0),
    "trapezoids": torch.cumulative_trapezoid,
    "spectrum": lambda y: torch.fft.rfft(y).abs(),
    "windows": lambda y: F.adaptive_avg_pool1d(y[None, None], 2),
}
# Three elements, two of them, one, none; and a zero.
ROWS = ([1.0, 2, 3], [1.5, -2, 3], [-1.0, 4, -1], [-1.0, -1, -1], [2.0, 0, 3], [0.5, 2, 1])


def slope(function: Function, row: list[float]) -> Any:
    """The result and the gradient; the kind of the error where there is none."""
    x = torch.tensor(row, requires_grad=True)
    try:
        y = function(x)
        (y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum().backward()
    except RuntimeError as error:
        return type(error)
    return y.detach(), x.grad


@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("name", OF_PARTS)
def test_gradients_of_what_the_data_size(name: str, remove: str) -> None:
    def run(x: Tensor) -> Tensor:
        return OF_PARTS[name](x[x > -0.5])

    program = capture(run, (torch.tensor(ROWS[0], requires_grad=True),), remove=remove)
    for row in ROWS:
        found, expected = slope(program, row), slope(run, row)
        if isinstance(expected, type):
            assert found is expected
        else:
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_exported_programs_and_calls_without_gradients_do_not_decide_by_the_backward() -> None:
    def run(x: Tensor) -> Tensor:
        return x[x > 0].cumsum(0)

    program = capture(run, (torch.tensor([1.0, 2], requires_grad=True),), gradients="now")
    one = torch.tensor([1.0, -2])
    assert [decision.of_backward for decision in program.variants[0].decisions] == [True]
    assert torch.equal(program.variants[0].with_assertions()(one)[0], run(one))
    assert torch.equal(program.to_exported_program().module()(one), run(one))
