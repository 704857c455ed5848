"""Products in place in low precision: eager rounds the factor first, and so do graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import capture, functionalize
from tests.support.export_programs import step_of

aten = torch.ops.aten
LOW = [torch.bfloat16, torch.float16]


def by_one(x: Tensor) -> Tensor:
    torch._foreach_mul_([x], 0.999)
    return x


def by_several(x: Tensor) -> Tensor:
    wide = x.float()
    torch._foreach_mul_([x, wide], [0.37, 0.999])
    return x + wide


def of_two_dtypes(x: Tensor) -> Tensor:
    wide = x.double()
    torch._foreach_mul_([wide, x], 1.3)
    return x + wide


def by_the_operator(x: Tensor) -> Tensor:
    return aten.mul_.Scalar(x, 1.3)  # type: ignore[no-any-return]


def of_whole_numbers(x: Tensor) -> Tensor:
    torch._foreach_mul_([x], 257)
    return x


def not_in_place(x: Tensor) -> Tensor:
    return torch._foreach_mul([x], 0.37)[0] + x.mul(1.3)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
@pytest.mark.parametrize(
    "program", [by_one, by_several, of_two_dtypes, by_the_operator, of_whole_numbers, not_in_place]
)
def test_products_are_those_of_eager(program: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.linspace(-2, 3, 40).to(dtype)
    expected, written = program(mine := x.clone()), mine
    function = functionalize(program, remove="mutations_and_views")
    for call in (function, make_fx(function)(x.clone()), capture(program, (x.clone(),))):
        given = x.clone()
        torch.testing.assert_close(call(given), expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(given, written, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.SGD])
def test_optimizers_over_lists_in_low_precision(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 3).to(dtype)]
    models.append(copy.deepcopy(models[0]))
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}

    def made(model: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = make(model.parameters(), lr=0.01, foreach=True, weight_decay=0.1, **options)
        return step_of(model, optimizer)

    run, program = map(made, models)
    x = torch.randn(5, 4).to(dtype)
    captured = capture(program, (x,), on_guard_failure="recapture")
    for _ in range(3):
        torch.testing.assert_close(captured(x), run(x), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0, equal_nan=True)
