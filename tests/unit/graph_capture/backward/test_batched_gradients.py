"""Jacobians through calls: ``torch.autograd.grad`` with a batch of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.sin() * 2,
    "columns": lambda x: x.t().contiguous().t().tanh(),
    "expanded": lambda x: x.exp().sum(0, keepdim=True).expand(2, 3),
}


def jacobian(y: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(y.sum(0), x, torch.eye(3), is_grads_batched=True, **options)[0]


def captured(run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return capture(run, (x,))


def compiled(run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.compile(run, backend="functionalize", fullgraph=True)


@pytest.mark.parametrize("of", [captured, compiled])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("columns", [False, True])
def test_a_batch_of_gradients(name: str, columns: bool, of: Callable[..., Any]) -> None:
    run = PROGRAMS[name]
    x = torch.randn(3, 2).t() if columns else torch.randn(2, 3)
    x = x.requires_grad_()
    torch.testing.assert_close(jacobian(of(run, x)(x), x), jacobian(run(x), x))


def test_a_batch_of_gradients_is_not_differentiated() -> None:
    x = torch.randn(2, 3).requires_grad_()
    with pytest.raises(RuntimeError, match=r"a batch of gradients(.|\n)*one gradient at a time"):
        jacobian(capture(torch.sin, (x,))(x), x, create_graph=True)
