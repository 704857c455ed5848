"""Tensors whose positions share elements (`unfold`, `as_strided`, `expand`): each write reaches every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize.verify import assert_equivalent
from tests.graphs import MODES, REMOVES


def windows(x: Tensor) -> Any:
    y = x + 1
    y.unfold(0, 3, 2).add_(1)
    return y


def windows_with_a_factor_for_each_position(x: Tensor) -> Any:
    y = x + 1
    y.unfold(0, 3, 1).mul_(torch.arange(1.0, 4.0))
    return y


def windows_of_which_the_last_wins(x: Tensor) -> Any:
    y = x + 1
    w = y.unfold(0, 3, 2)
    w.copy_(torch.arange(100.0, 100.0 + w.numel()).view_as(w))
    return y


def windows_that_are_wide(x: Tensor) -> Any:
    y = x + 1
    y.unfold(0, 8, 1).copy_(torch.arange(32.0).view(4, 8))
    return y


def windows_one_by_one(x: Tensor) -> Any:
    y = x + 1
    w = y.unfold(0, 3, 2)
    before = w[0].sum()
    w[1].add_(1)
    w[2].mul_(2)
    after = w[0].sum()
    w[:, 1].zero_()
    return y, w, before, after


def windows_of_a_strided_tensor(x: Tensor) -> Any:
    y = (x + 1)[::2]
    y.unfold(0, 2, 1).add_(y.unfold(0, 2, 1))
    return y


def windows_as_result(x: Tensor) -> Any:
    y = x + 1
    torch.add(y.unfold(0, 3, 2), 1, out=y.unfold(0, 3, 2))
    return y


def strided(x: Tensor) -> Any:
    y = x + 1
    y.as_strided((4, 5), (2, 1)).sub_(x[:5]).mul_(2)
    y.as_strided((5, 4), (1, 2)).pow_(2)
    return y


def strided_in_three_dimensions(x: Tensor) -> Any:
    y = x * 0.1
    v = y.as_strided((3, 3, 3), (1, 1, 1))
    v.addcmul_(v, v, value=0.5)
    return y, v


def strided_with_bounds_for_each_position(x: Tensor) -> Any:
    x.as_strided((3, 4), (2, 1)).clamp_(torch.arange(0.0, 4.0), torch.arange(2.0, 6.0))
    return x * 1


def strided_compared(x: Tensor) -> Any:
    y = x + 1
    y.as_strided((4, 4), (1, 1)).lt_(5)
    return y


def strided_in_the_order_of_the_source(x: Tensor) -> Any:
    y = x + 1
    y.as_strided((4, 4), (1, 1)).copy_(torch.arange(16.0).view(4, 4).t())
    return y


def long_rows(x: Tensor) -> Any:
    y = torch.zeros(40) + x.sum()
    y.as_strided((3, 33), (1, 1)).add_(torch.arange(33.0)).mul_(1.5)
    return y


def one_row_of_expanded(x: Tensor) -> Any:
    y = x + 1
    e = y.expand(3, 11)
    e[1].add_(1)
    e[0, 3:5].mul_(7)
    y[None].expand(3, 11)[1][None].expand(2, 11)[0][2:].sub_(1)
    return y, e


def part_of_the_windows_of_an_input(x: Tensor) -> Any:
    w = x.unfold(0, 3, 1)
    w[2:4].add_(1)
    return w.sum(0)


PROGRAMS = [value for value in list(globals().values()) if getattr(value, "__module__", None) == __name__]


@pytest.mark.every(2)
@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("func", PROGRAMS, ids=lambda func: func.__name__)
def test_writes(func: Callable[..., Any], mode: Any, remove: str) -> None:
    assert_equivalent(func, torch.arange(11.0), remove=remove, tracing_mode=mode)


def update_all(x: Tensor) -> Any:
    return x.add_(1) * 2


def update_a_row(x: Tensor) -> Any:
    x[1].mul_(3)
    return x.sum(0)


def overwrite(x: Tensor) -> Any:
    x.copy_(torch.arange(float(x.numel())).view(x.shape))
    return x * 1


def update_from_its_own_columns(x: Tensor) -> Any:
    x[:, 1:].add_(x[:, :-1] * 1)
    return x + 0


INPUTS = {
    "windows": torch.arange(11.0).unfold(0, 3, 2),
    "wide windows": torch.arange(11.0).unfold(0, 8, 1),
    "equal strides": torch.arange(11.0).as_strided((3, 3), (1, 1)),
    "strided": torch.arange(11.0).as_strided((3, 3), (2, 3)),
    "windows of a part": torch.arange(11.0)[3:7].unfold(0, 2, 1),
}


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize("mode", [None, *MODES], ids=str)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("func", [update_all, update_a_row, overwrite, update_from_its_own_columns])
def test_inputs(func: Callable[..., Any], name: str, mode: Any, remove: str) -> None:
    assert_equivalent(func, INPUTS[name], remove=remove, tracing_mode=mode)
