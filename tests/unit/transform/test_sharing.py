"""What a traced function returns may be written to: no input that eager would leave alone changes with it.

A copy from an input makes that input's node the written tensor's value; the graph must not hand it out as such.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functionalize.verify import assert_equivalent
from tests.support.graphs import REMOVES, trace

Program = Callable[[Tensor, Tensor], Tensor]
PROGRAMS: dict[str, Program] = {}


def program(func: Program) -> Program:
    PROGRAMS[func.__name__] = func
    return func


@program
def whole(x: Tensor, s: Tensor) -> Tensor:
    y = x + 1
    y.copy_(s)
    return y


@program
def through_a_transpose(x: Tensor, s: Tensor) -> Tensor:
    y = x + 1
    y.t().copy_(s)
    return y


@program
def through_a_reshape(x: Tensor, s: Tensor) -> Tensor:
    y = x + 1
    y.view(-1).copy_(s.view(-1))
    return y


@program
def a_view_is_returned(x: Tensor, s: Tensor) -> Tensor:
    y = x + 1
    flat = y.view(-1)
    y.copy_(s)
    return flat


@program
def a_part_is_returned(x: Tensor, s: Tensor) -> Tensor:
    y = x + 1
    row = y[0]
    y.copy_(s)
    return row


@program
def the_written_part_is_returned(x: Tensor, s: Tensor) -> Tensor:
    y = x + 1
    y[1].copy_(s[1])
    return y[1]


@program
def through_two_copies(x: Tensor, s: Tensor) -> Tensor:
    y, z = x + 1, x + 2
    y.copy_(s)
    z.t().copy_(y.t())
    return z


@program
def to_an_input(x: Tensor, s: Tensor) -> Tensor:
    x.copy_(s)
    return x


@program
def to_a_view_of_an_input(x: Tensor, s: Tensor) -> Tensor:
    x.t().copy_(s)
    return x.view(-1)


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes_to_an_output_leave_the_copied_input_alone(name: str, remove: str) -> None:
    inputs = torch.zeros(3, 3), torch.arange(9.0).view(3, 3)
    graph = trace(PROGRAMS[name], *inputs, remove=remove)
    x, s = (value.clone() for value in inputs)
    graph(x, s).fill_(-1)
    assert torch.equal(s, inputs[1])
    assert_equivalent(PROGRAMS[name], *inputs, remove=remove, tracing_mode="fake")
