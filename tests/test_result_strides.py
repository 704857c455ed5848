"""Strides of results that eager's kernels lay out otherwise than torch's decompositions, of which fake tensors tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functionalize import capture

OPERATORS: list[Callable[..., Any]] = [
    *(torch.add, torch.mul, torch.div, torch.atan2, torch.maximum, torch.eq, torch.copysign, torch.xlogy),
    *(torch.logaddexp, torch.logaddexp2, torch.logical_and, torch.logical_or, torch.logical_xor),
]
LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "expanded": lambda dtype: torch.ones((), dtype=dtype).expand(3, 3),
    "transposed": lambda dtype: torch.ones(3, 3, dtype=dtype).t(),
    "rows": lambda dtype: torch.ones(3, 1, dtype=dtype).expand(3, 3),
    "number": lambda dtype: torch.ones((), dtype=dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_of_two_tensors(operator: Callable[..., Any], dtype: torch.dtype) -> None:
    pairs = [(LAYOUTS[one](dtype), LAYOUTS[other](dtype)) for one in LAYOUTS for other in LAYOUTS]
    pairs += [(one.float(), other) for one, other in pairs]

    def run(pairs: Any) -> Any:
        return [operator(*pair) for pair in pairs]

    ours, eager = capture(run, (pairs,))(pairs), run(pairs)
    assert [one.stride() for one in ours] == [one.stride() for one in eager]
    assert [one.dtype for one in ours] == [one.dtype for one in eager]


def test_of_angles() -> None:
    def run(x: torch.Tensor) -> Any:
        return x.t().angle(), x.real.t().angle(), x.real.t().int().angle()

    x = torch.randn(3, 4, dtype=torch.complex64)
    ours, eager = capture(run, (x,))(x), run(x)
    assert [one.stride() for one in ours] == [one.stride() for one in eager]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_of_gradients_of_sums(dtype: torch.dtype) -> None:
    """The gradient of a sum is an expanded one."""

    def run(x: torch.Tensor) -> Any:
        y = x.mT
        return torch.autograd.grad((y * y).sum(), [y])[0].view(3, 1, 1, 3)

    x = torch.randn(3, 3).to(dtype).requires_grad_()
    assert capture(run, (x,))(x).stride() == run(x).stride()
