"""What a program's graph grows with: its writes and reads, not its views or the length of their chains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.graphs import REMOVES, operators, skeleton, trace

Program = Callable[[Tensor], Tensor]
EITHER = pytest.mark.parametrize("remove", REMOVES)


def rows_side_by_side(count: int) -> Program:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        rows = [y[index] for index in range(count)]
        for row in rows:
            row.add_(1)
        for row in rows:
            row.mul_(2)
        return y

    return f


def columns_that_read_rows(count: int) -> Program:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        for index in range(count):
            y[:, index].add_(y[index])
        return y

    return f


def writes_down_a_chain(count: int) -> Program:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        end = y
        for _ in range(count):
            end = end.t()
        for _ in range(5):
            end.add_(1)
        return y

    return f


def size(program: Program, remove: str) -> int:
    return len(operators(trace(program, torch.zeros(40, 40), remove=remove)))


@EITHER
@pytest.mark.parametrize("family", [rows_side_by_side, columns_that_read_rows])
def test_views_cost_linearly(family: Callable[[int], Program], remove: str) -> None:
    few, some, many = (size(family(count), remove) for count in (8, 16, 32))
    assert many - some == 2 * (some - few)


@EITHER
def test_the_length_of_a_chain_costs_nothing(remove: str) -> None:
    assert size(writes_down_a_chain(3), remove) == size(writes_down_a_chain(201), remove)


@EITHER
def test_a_program_without_views_and_writes_stays_as_it_is(remove: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x @ y, x.exp()]).sum(0) * 2

    inputs = torch.ones(3, 3), torch.ones(3, 3)
    assert skeleton(trace(f, *inputs, remove=remove)) == skeleton(make_fx(f, tracing_mode="fake")(*inputs))
