"""The order in which random numbers fill memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.verify import assert_equivalent
from tests.support.equality import in_every_way


@in_every_way
@pytest.mark.parametrize("length", [15, 16, 17, 34])
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x[:, 1].normal_(),
        lambda x: x.t()[:, ::2].normal_(1, 2),
        lambda x: x[:, 1:].t().uniform_(),
        lambda x: x.t()[:, ::2].bernoulli_(0.5),
        lambda x: torch.rand_like(x[::2].t()),
        lambda x: torch.randn_like(x.t()),
    ],
    ids=["normal of a column", "normal of rows", "uniform", "bernoulli", "rand_like", "randn_like"],
)
def test_random_numbers_come_in_the_order_of_memory(draw: Any, length: int, mode: Any, remove: str) -> None:
    assert_equivalent(draw, torch.zeros(length, 2), remove=remove, tracing_mode=mode)


def test_random_numbers_in_a_data_dependent_order() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.empty_like(x.nonzero(), dtype=torch.float32).uniform_()

    x = torch.tensor([[1, 0, 2], [3, 4, 0]])
    program = capture(f, (x,))
    for value in (x, x.clamp(max=1) - 1, x + 1):
        torch.manual_seed(3)
        expected = f(value)
        torch.manual_seed(3)
        result = program(value)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_random_numbers_for_what_is_transposed_and_has_a_data_dependent_size() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x[x[:, 0] > 0].t(), 0.5)

    x = torch.tensor([[1.0, 0, 2], [3, 4, 0], [0, 0, 1]])
    program, results = capture(f, (x,)), []
    for run in (program, f):
        torch.manual_seed(0)
        results.append(run(x))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("step", [1, 2])
def test_normal_numbers_fill_a_column_with_gaps(step: int) -> None:
    """A column lies in order, whatever the stride of its one-element dimension is."""

    def run(x: Tensor) -> Tensor:
        x.unsqueeze_(0)
        x.diagonal(0, 0, 2).normal_()
        return x

    def column() -> Tensor:
        return torch.zeros(32).as_strided((16, 1), (step, step))

    program = capture(run, (column(),))
    results = []
    for function in (run, program):
        torch.manual_seed(0)
        results.append(function(column()))
    assert torch.equal(*results)
