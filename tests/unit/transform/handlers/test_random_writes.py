"""Random numbers written into a tensor whose storage has another order: eager draws in that order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda out: torch.rand(4, 5, out=out.t()),
    "randn": lambda out: torch.randn(4, 5, out=out.t()),
    "randint": lambda out: torch.randint(9, (4, 5), out=out.t()),
    "randint between": lambda out: torch.randint(2, 9, (4, 5), out=out.t()),
    "bernoulli": lambda out: torch.bernoulli(torch.full((4, 5), 0.5), out=out.t()),
    "normal": lambda out: torch.normal(0.0, 1.0, (4, 5), out=out.t()),
    "normal around": lambda out: torch.normal(torch.zeros(4, 5), 2.0, out=out.t()),
    "normal scaled": lambda out: torch.normal(1.0, torch.ones(4, 5), out=out.t()),
    "normal around and scaled": lambda out: torch.normal(torch.ones(4, 1), torch.ones(5), out=out.t()),
    "randperm": lambda out: torch.randperm(5, out=out[:, 0]),
    "of another size": lambda out: torch.rand(20, out=out[:0, 0]),
    "random_ between": lambda out: out.t().random_(2, 9),
    "random_ from": lambda out: out.t().random_(3, None),
}


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_random_write_equals_eager(name: str, remove: str, mode: Any) -> None:
    def f(out: Tensor) -> Tensor:
        torch.manual_seed(0)
        PROGRAMS[name](out)
        return out

    assert_equivalent(f, torch.zeros(5, 4), remove=remove, tracing_mode=mode)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("fill", ["normal_", "uniform_", "exponential_", "random_", "bernoulli_"])
def test_random_write_after_one_through_another_order(fill: str, remove: str, mode: Any) -> None:
    def f(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        x.swapaxes(-1, 0).zero_()
        getattr(x, fill)()
        return torch.nn.functional.dropout(x + 1, 0.5)

    for shape in ((2, 2), (5, 4)):
        assert_equivalent(f, torch.ones(shape), remove=remove, tracing_mode=mode)
