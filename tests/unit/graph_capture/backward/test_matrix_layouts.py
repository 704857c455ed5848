"""Gradients of functions of matrices are those of eager, however the matrices lie in memory.

Kernels that factor a matrix, or its transpose, by how it lies leave a backward that asks the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from tests.support.graphs import REMOVES

Function = Callable[[Tensor], Tensor]
EITHER = pytest.mark.parametrize("remove", REMOVES)

RIGHT = torch.tensor([[1.0, -2], [0.5, 3], [2, 1]], dtype=torch.float64)
FUNCTIONS: dict[str, Function] = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "logdet": lambda a: torch.logdet(a @ a.mT),
    "solve": lambda a: torch.linalg.solve(a, RIGHT),
    "solve from the right": lambda a: torch.linalg.solve(
        a, RIGHT.t().contiguous().expand(*a.shape[:-2], 2, 3), left=False
    ),
    "inv": torch.linalg.inv,
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "matrix_exp": lambda a: torch.matrix_exp(a.contiguous()),
}
VIEWS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "contiguous": (lambda a: a, (3, 3)),
    "columns of more": (lambda a: a[:, :3], (3, 4)),
    "every other row": (lambda a: a[::2], (6, 3)),
    "transposed": (Tensor.t, (3, 3)),
    "repeated": (lambda a: a.expand(2, 3, 3), (3, 3)),
    "batches exchanged": (lambda a: a.transpose(0, 1), (2, 2, 3, 3)),
    "channels last": (lambda a: a.permute(0, 3, 1, 2), (2, 3, 3, 2)),
}

_IN_CI = ("contiguous", "columns of more", "transposed", "batches exchanged")
SOME = [view if view in _IN_CI else pytest.param(view, marks=pytest.mark.full) for view in VIEWS]


def derivative(function: Function, x: Tensor, order: int) -> Tensor:
    x = found = x.clone().requires_grad_()
    for number in range(order):
        found = function(x) if not number else found
        weights = torch.arange(1.0, found.numel() + 1, dtype=found.dtype).view(found.shape)
        (found,) = torch.autograd.grad((found.square() * weights).sum(), x, create_graph=number + 1 < order)
    return found


@pytest.mark.every(5)
@EITHER
@pytest.mark.parametrize("view", SOME)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_functions_of_matrices(name: str, view: str, remove: str) -> None:
    torch.manual_seed(0)
    function, (part, size) = FUNCTIONS[name], VIEWS[view]
    x = torch.randn(size, dtype=torch.float64)

    def of_part(x: Tensor) -> Tensor:
        return function(part(x))

    program = capture(of_part, (x.clone().requires_grad_(),), remove=remove)
    for order in (1, 2):
        torch.testing.assert_close(derivative(program, x, order), derivative(of_part, x, order))


def slope_of_part(function: Function, part: Function) -> Function:
    def slope(x: Tensor) -> Tensor:
        return derivative(function, part(x).detach(), 1)

    return slope


@EITHER
@pytest.mark.parametrize("view", SOME)
@pytest.mark.parametrize("name", ["det", "slogdet"])
def test_gradients_of_determinants_taken_inside(name: str, view: str, remove: str) -> None:
    torch.manual_seed(0)
    part, size = VIEWS[view]
    slope, x = slope_of_part(FUNCTIONS[name], part), torch.randn(size, dtype=torch.float64)
    program = capture(slope, (x,), remove=remove)
    torch.testing.assert_close(program(x), slope(x))
    torch.testing.assert_close(program.to_exported_program().module()(x), slope(x))


@EITHER
@pytest.mark.parametrize("name", ["det", "slogdet"])
def test_gradients_of_determinants_that_are_compiled(name: str, remove: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)

    def of_columns(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x[:, :3])

    compiled: Any = torch.compile(of_columns, backend="functionalize", options={"remove": remove})
    torch.testing.assert_close(derivative(compiled, x, 1), derivative(of_columns, x, 1))


@pytest.mark.every(8)
@EITHER
@pytest.mark.parametrize("view", ["contiguous", "columns of more", "transposed", "repeated"])
@pytest.mark.parametrize("name", ["det", "slogdet", "solve"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.complex64, marks=pytest.mark.full)], ids=str)
def test_gradients_taken_inside_are_those_of_eager_on_jax(
    name: str, view: str, dtype: torch.dtype, remove: str
) -> None:
    pytest.importorskip("jax")
    from functionalize.backends.jax import from_torch, to_torch

    torch.manual_seed(0)
    part, size = VIEWS[view]

    def of_part(matrix: Tensor) -> Tensor:
        found = torch.linalg.solve(matrix, RIGHT.to(dtype)) if name == "solve" else FUNCTIONS[name](matrix)
        return torch.view_as_real(found) if found.is_complex() else found

    slope, x = slope_of_part(of_part, part), torch.randn(size, dtype=dtype)
    program = capture(slope, (x,), remove=remove).to_jax()
    _, found = program(program.initial_state, from_torch(x))
    torch.testing.assert_close(to_torch(found), slope(x), rtol=1e-3, atol=1e-3)
