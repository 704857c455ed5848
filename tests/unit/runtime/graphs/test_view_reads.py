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


def images(x: Tensor, weight: Tensor) -> Tensor:
    kernels = weight.flatten()[:864].view(8, 12, 3, 3)
    return torch.nn.functional.conv2d(x.double().view(2, 4, 4, 12).permute(0, 3, 1, 2), kernels.double())


@pytest.mark.parametrize("function", [experts, product, total, images])
def test_results_are_eagers_bit_by_bit(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = torch.randn(16, 24), torch.randn(4, 32, 24)
    assert torch.equal(capture(function, (x, weight))(x, weight), function(x, weight))


def test_gradients_of_convolutions_are_eagers_bit_by_bit() -> None:
    shapes = (2, 64, 8), (8, 8, 3, 3), (2, 8, 6, 6)
    x, weight, seed = (torch.randn(shape, dtype=torch.float64) for shape in shapes)

    def gradients(call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        return [*torch.autograd.grad(call(*leaves), leaves, seed)]

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x.view(2, 8, 8, 8).permute(0, 3, 1, 2), weight)

    program = capture(run, (x.requires_grad_(), weight.requires_grad_()))
    assert all(map(torch.equal, gradients(program), gradients(run)))
