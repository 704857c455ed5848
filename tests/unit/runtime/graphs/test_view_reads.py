"""Operators that read views in a call, though the graph copies these: results are eager's, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functionalize import capture


def experts(x: Tensor, weight: Tensor) -> Tensor:
    offsets = torch.tensor([1, 3, 9, 16], dtype=torch.int32)
    return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight[0].t()


def total(x: Tensor, weight: Tensor) -> Tensor:
    return weight.transpose(0, 2).sum(1)


@pytest.mark.parametrize("function", [experts, product, total])
def test_results_are_eagers_bit_by_bit(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = torch.randn(16, 24), torch.randn(4, 32, 24)
    assert torch.equal(capture(function, (x, weight))(x, weight), function(x, weight))
