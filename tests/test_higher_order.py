"""Higher-order operators: bodies become free of mutation, operands become values. Eager is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as higher_order_map
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.graphs import MODES, REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)
map_over: Any = higher_order_map  # typed for tuples only


@WHILE
@EITHER
def test_cond_with_writes_to_intermediates(mode: Any, remove: str) -> None:
    def yes(x: Tensor) -> Tensor:
        y = x + 1
        y[0].add_(1)
        return y

    def no(x: Tensor) -> Tensor:
        y = x.sin()
        return y.mul_(2)

    def f(x: Tensor) -> Any:
        x = x.clone()
        x.add_(1)
        z = torch.cond(x.sum() > 3, yes, no, (x,))
        return z.add_(1)

    for example in (torch.ones(3), torch.zeros(3)):
        assert_equivalent(f, example, remove=remove, tracing_mode=mode)


@EITHER
@pytest.mark.parametrize("mode", [None, "fake"], ids=str)
def test_cond_whose_branch_writes_to_an_operand_is_refused(mode: Any, remove: str) -> None:
    def writes(x: Tensor) -> Tensor:
        x.add_(1)
        return x.sin()

    def f(x: Tensor) -> Any:
        return torch.cond(x.sum() > 3, writes, torch.cos, (x,))

    pure = functionalize(f, remove=remove)
    call = pure if mode is None else make_fx(pure, tracing_mode=mode)
    with pytest.raises(RuntimeError, match="input mutation"):
        call(torch.ones(3))


@WHILE
@EITHER
def test_cond_in_a_branch_of_cond(mode: Any, remove: str) -> None:
    def inner(x: Tensor) -> Tensor:
        y = x.cos()
        return y.add_(1)

    def outer(x: Tensor) -> Any:
        y = x + 1
        y[0].add_(1)
        return torch.cond(y.sum() > 2, inner, torch.sin, (y,))

    def f(x: Tensor) -> Any:
        x = x + 0
        x.t().mul_(2)
        return torch.cond(x.sum() > 3, outer, torch.sin, (x,))

    assert_equivalent(f, torch.ones(2, 2), remove=remove, tracing_mode=mode)


@WHILE
@EITHER
def test_map_with_writes_in_its_body(mode: Any, remove: str) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        z[0].mul_(2)
        return z.relu_()

    def f(xs: Tensor, y: Tensor) -> Any:
        xs = xs.clone()
        xs[1].add_(1)
        return map_over(body, xs, y).add_(1)

    assert_equivalent(f, torch.randn(3, 2), torch.randn(2), remove=remove, tracing_mode=mode)
