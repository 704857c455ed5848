"""Derivatives that JAX takes of a program are those of eager, where formulas differ: kinks, ties, zero over zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functionalize import capture

jax = pytest.importorskip("jax")

from functionalize.backends.jax import from_torch  # noqa: E402

INFINITY = float("inf")
Function = Callable[[Tensor], Tensor]

ELEMENTS = torch.tensor([0.0, -0.0, 1, -1, 0.5, -0.5, 3, -3, 6, 2.5])
OF_ELEMENTS: dict[str, Function] = {
    "abs": torch.abs,
    "absolute times x": lambda x: x.abs() * x,
    "l1 loss": lambda x: F.l1_loss(x, torch.ones(10), reduction="none"),
    "sinc": torch.sinc,
    "i0": torch.i0,
    "lgamma": torch.lgamma,
    "logit": lambda x: torch.logit(x),
    "logit within": lambda x: torch.logit(x, 0.25),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.full((10,), 0.5), reduction="none"),
    "clamp": lambda x: x.clamp(-0.5, 1),
    "clamp crossed": lambda x: x.clamp(1, -1),
    "clamp below": lambda x: x.clamp(min=0),
    "clamp above": lambda x: torch.clamp_max(x, 1),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(0.0), torch.tensor(1.0)),
    "bounds": lambda x: torch.tensor([1.0]).clamp(x, x + 1),
    "power of zero": lambda x: x**0,
    "power by tensor": lambda x: x ** torch.tensor([0.0, 2, 0, 2, 1, 3, 0, -1, 2, 0.5]),
    "zero by power": lambda x: 0**x,
    "two by power": lambda x: 2**x,
    "maximum": lambda x: torch.maximum(x, torch.zeros(())),
    "minimum": lambda x: torch.minimum(x, x * 2),
    "fmax": lambda x: torch.fmax(x, torch.zeros(())),
    "fmin": lambda x: torch.fmin(torch.zeros(()), x),
    "atan2": lambda x: torch.atan2(x, x),
    "hypot": lambda x: torch.hypot(x, x),
    "copysign": lambda x: torch.copysign(x, x),
}
ROWS = torch.tensor([[1.0, 1, 2], [2, 2, 2], [0, 0, 0]])
OF_ROWS: dict[str, Function] = {
    "softmax of nothing": lambda x: torch.ops.aten._safe_softmax(x.masked_fill(x == 0, -INFINITY), -1) * ROWS,
    "norm": lambda x: x.norm(dim=1),
    "norm of nothing": lambda x: (x * 0).norm(),
    "norm of absolutes": lambda x: x.norm(1),
    "norm of order 0": lambda x: torch.linalg.vector_norm(x, 0),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "norm of order 1.5": lambda x: torch.linalg.vector_norm(x, 1.5, dim=1),
    "norm of order 0.5": lambda x: torch.linalg.vector_norm(x, 0.5, dim=1),
    "largest": lambda x: torch.linalg.vector_norm(x, INFINITY, dim=1),
    "smallest": lambda x: torch.linalg.vector_norm(x, -INFINITY, dim=1),
    "matrix": lambda x: torch.linalg.matrix_norm(x),
    "distance": lambda x: torch.dist(x, ROWS),
    "distances": lambda x: torch.cdist(x, x),
    "distances of order 1": lambda x: torch.cdist(x, ROWS, p=1),
    "normalized": lambda x: F.normalize(x, dim=1, eps=1),
    "shares": lambda x: (x + 1) / (x + 1).sum(1, keepdim=True),
    "deviation": lambda x: x.std(1),
    "deviation and mean": lambda x: torch.std_mean(x, 1)[0],
    "maximum": lambda x: x.max(1)[0],
    "minimum": lambda x: x.min(0, keepdim=True)[0],
    "maximum of all": lambda x: x.max(),
    "greatest": lambda x: x.amax(1),
    "median": lambda x: x.median(),
    "median of rows": lambda x: x.median(1)[0],
}

# In eager: none, or no number.
_WITHOUT_SECOND = {"hardsigmoid", "logit", "distances", "distances of order 1", "norm of nothing", "zero by power"}


@pytest.mark.slow
@pytest.mark.parametrize(("table", "at"), [(OF_ELEMENTS, ELEMENTS), (OF_ROWS, ROWS)], ids=["elements", "rows"])
def test_derivatives_are_those_of_eager(table: dict[str, Function], at: Tensor) -> None:
    def all_of(x: Tensor) -> Tensor:
        return torch.stack([function(x).sum() for function in table.values()])

    expected: Any = torch.autograd.functional.jacobian(all_of, at)
    program = capture(all_of, (at.clone(),)).to_jax()
    with jax.enable_x64(True):
        found = jax.jit(jax.jacrev(lambda x: program(program.initial_state, x)[1]))(from_torch(at))
    for name, one, other in zip(table, expected.numpy(), np.asarray(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "at"),
    [
        (OF_ELEMENTS, torch.tensor([0.3, 0.7, 1.4, 0.1, 0.9, 0.2, 0.6, 0.8, 1.3, 0.4])),
        (OF_ROWS, ROWS + torch.tensor([[0.3, 0.4, 0.2], [0.5, 0.1, 0.6], [0.3, 0.9, 0.7]])),
    ],
    ids=["elements", "rows"],
)
def test_so_are_second_derivatives(table: dict[str, Function], at: Tensor) -> None:
    kept = {name: one for name, one in table.items() if name not in _WITHOUT_SECOND}

    def slopes(x: Tensor) -> Tensor:
        return sum((function(x).sum() * n for n, function in enumerate(kept.values(), 1)), torch.zeros(()))

    expected: Any = torch.autograd.functional.hessian(slopes, at)
    program = capture(slopes, (at,)).to_jax()
    with jax.enable_x64(True):
        found = jax.jit(jax.hessian(lambda x: program(program.initial_state, x)[1]))(from_torch(at))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_divisor_that_is_broadcast(compiled: bool) -> None:
    """XLA's own simplifications hide an infinity times zero that a compiled derivative has."""

    def shares(x: Tensor, sums: Tensor) -> Tensor:
        return (x / sums).pow(2).sum() + (x / 3).sum()

    x, sums = torch.randn(3, 4), torch.tensor([[2.0], [-3.0], [0.5]])
    expected = torch.autograd.functional.jacobian(shares, (x, sums))
    program = capture(shares, (x, sums)).to_jax()
    gradients = jax.grad(lambda x, sums: program(program.initial_state, x, sums)[1], argnums=(0, 1))
    found = (jax.jit(gradients) if compiled else gradients)(from_torch(x), from_torch(sums))
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted.numpy(), rtol=1e-5)
