"""Operators that engines have otherwise than torch, or not at all: on ONNX Runtime and on JAX, beside eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils import _pytree as pytree

from functionalize import capture
from tests.support.routes import JAX, ONNX, Route

pytestmark = [  # of torch's, about itself
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:index_reduce:UserWarning"),
]
Program = Callable[..., Any]
Inputs = tuple[Tensor, ...]


def heads(*counts: int, rows: int = 5) -> Inputs:
    return tuple(torch.randn(2, count, rows, 4) for count in counts)


def mask(dtype: torch.dtype) -> Tensor:
    """One query, of all, may look at nothing."""
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[1], seen[3, 2:] = False, False
    return seen if dtype is torch.bool else torch.zeros(5, 5, dtype=dtype).masked_fill(~seen, float("-inf"))


def gradients(program: Program, *inputs: Tensor) -> Any:
    given = [x.detach().requires_grad_(x.is_floating_point() and number < 3) for number, x in enumerate(inputs)]
    return torch.autograd.grad(program(*given).square().sum(), [x for x in given if x.requires_grad])


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    return attention(query, key, value, attn_mask=seen, enable_gqa=query.size(1) != key.size(1))


def shared_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, enable_gqa=True, is_causal=True)


def grouped(a: Tensor, b: Tensor, ends: Tensor | None = None) -> Tensor:
    return torch._grouped_mm(a, b, offs=ends)


def ends(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def solve(matrix: Tensor, right: Tensor, **options: Any) -> Tensor:
    """What is not in the triangle must not count."""
    matrix = matrix + 4 * torch.eye(matrix.size(-1))
    found: Tensor = torch.linalg.solve_triangular(matrix, right, **options)
    return found


def factored(x: Tensor) -> Any:
    """Solutions of systems, and what factors tell of a matrix."""
    linalg = torch.linalg
    definite = x @ x.mT + torch.eye(x.size(-1))
    factors = linalg.cholesky(definite)
    solutions = [
        linalg.solve(definite, x),
        torch.cholesky_solve(x, factors),
        linalg.lu_solve(*linalg.lu_factor(x), x, adjoint=True),
    ]
    told = [
        linalg.det(x),
        *linalg.slogdet(definite),
        linalg.svdvals(x),
        linalg.eigvalsh(definite),
        linalg.pinv(x[..., :3]),
    ]
    return [*solutions, *told, linalg.matrix_exp(x / 4), *linalg.lu(x)]


def middle(x: Tensor) -> Any:
    """A number that is none is the middle of all, unless it does not count."""
    missing = x.masked_fill(x > x.max() - 1e-3, float("nan"))
    return [one(part, *dim) for one in (torch.median, torch.nanmedian) for part in (x, missing) for dim in ((), (1,))]


def numbers(x: Tensor) -> Any:
    """Some that 16 bits round, or that are too large or too small for them."""
    wide = [
        x * 1e5 / 1e5,
        x / 1e-8,
        x[0] * 70001,
        torch.div(x, 0.10001, rounding_mode="floor"),
        torch.addcmul(x, x, x, value=0.10001),
        torch.lerp(x, x.flip(0), 0.10001),
        *(torch.nn.functional.leaky_relu(x, 0.10001), torch.nn.functional.softplus(x, 0.30001)),
    ]
    rounded = [x + 0.10001, 0.10001 - x, x > 1e-9, x == 0.30001, x.clamp(min=1e-9), torch.fmod(x, 0.10001)]
    return [*wide, *rounded, x * torch.tensor(1e-5), x * torch.tensor(70001)]


ON_JAX: dict[str, tuple[Program, Callable[[], Inputs]]] = {
    "factors": (factored, lambda: (torch.randn(2, 4, 4),)),
    "middle": (middle, lambda: (torch.randn(4, 5),)),
    "largest of windows": (
        lambda x: torch.nn.functional.adaptive_max_pool2d(x, (2, 3), return_indices=True),
        lambda: (torch.randn(1, 2, 5, 7),),
    ),
    "means of windows": (
        lambda x: torch.nn.functional.adaptive_avg_pool2d(x.masked_fill(x > 1, float("inf")), (2, 3)),
        lambda: (torch.randn(1, 2, 5, 7),),
    ),
    "rows reduced": (
        lambda x, y: [x.index_reduce(0, torch.tensor([2, 0, 2]), y, how) for how in ("prod", "mean", "amax", "amin")],
        lambda: (torch.randn(4, 3), torch.randn(3, 3)),
    ),
    "numbers beside bfloat16": (numbers, lambda: (torch.tensor([0, 1e-4, 3, -2, 0.3, 100]).bfloat16(),)),
    "16 bits in a row": (
        lambda x: [x * 2 * 3 / 6, (x + 1000) - 1000, (x * x) * 1e-3, torch.nn.functional.gelu(x)],
        lambda: (torch.tensor([0.1, 1 / 3, 6e4, 1e-4, -7e-8]).half(),),
    ),
    "roots": (
        lambda x: [x**0.5, x**-0.5, x.signbit()],
        lambda: (torch.tensor([4.0, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]),),
    ),
}
CASES: dict[str, tuple[Program, Callable[[], Inputs]]] = {
    "heads share keys": (shared_heads, lambda: heads(6, 2, 2)),
    "heads share keys, trained": (partial(gradients, shared_heads), lambda: heads(6, 2, 2)),
    "nothing seen": (masked, lambda: (*heads(2, 2, 2), mask(torch.bool))),
    "nothing seen by scores": (masked, lambda: (*heads(2, 2, 2), mask(torch.float32))),
    "nothing seen, trained": (partial(gradients, masked), lambda: (*heads(4, 2, 2), mask(torch.bool))),
    "groups of rows": (grouped, lambda: (torch.randn(12, 8), torch.randn(3, 8, 4), ends(3, 3, 12))),
    "groups of rows, trained": (
        partial(gradients, grouped),
        lambda: (torch.randn(12, 8), torch.randn(3, 8, 4), ends(4, 4, 12)),
    ),
    "groups of columns": (grouped, lambda: (torch.randn(3, 4, 8), torch.randn(8, 12), ends(4, 8, 12))),
    "groups of matrices": (grouped, lambda: (torch.randn(3, 4, 8), torch.randn(3, 8, 12))),
    "lower triangle": (partial(solve, upper=False), lambda: (torch.randn(2, 5, 5), torch.randn(2, 5, 3))),
    "upper triangle": (partial(solve, upper=True), lambda: (torch.randn(5, 5), torch.randn(2, 5, 3))),
    "ones on the diagonal": (
        partial(solve, upper=False, unitriangular=True),
        lambda: (torch.randn(2, 3, 3), torch.randn(3, 2)),
    ),
    "solved from the right": (partial(solve, upper=True, left=False), lambda: (torch.randn(4, 4), torch.randn(3, 4))),
    "numbers beside float16": (numbers, lambda: (torch.tensor([0, 1e-4, 3, -2, 0.3, 100]).half(),)),
    "all and any": (
        lambda x: (torch._is_all_true(x > 0), torch._is_any_true(x > 0)),
        lambda: (torch.randn(4),),
    ),
}


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("engine", "name"), [*((ONNX, name) for name in CASES), *((JAX, name) for name in CASES | ON_JAX)]
)
def test_equal_to_eager(engine: Route, name: str, tmp_path: Path) -> None:
    program, inputs = (CASES | ON_JAX)[name]
    torch.manual_seed(0)
    args = inputs()
    run = engine(capture(program, args), tmp_path)
    for _ in range(2):
        given = inputs()
        torch.testing.assert_close(
            pytree.tree_leaves(run(*given)), pytree.tree_leaves(program(*given)), rtol=1e-4, atol=1e-5, equal_nan=True
        )


def test_onnx_draws_between_bounds(tmp_path: Path) -> None:
    drawn = ONNX(capture(lambda x: x.clone().uniform_(2, 3), (torch.zeros(64),)), tmp_path)(torch.zeros(64))
    assert drawn.min() >= 2 and drawn.max() <= 3 and drawn.unique().numel() > 1


def test_programs_with_grouped_products_are_decomposed() -> None:
    """Of 32 bits torch's own meta kernel takes no such."""
    inputs = CASES["groups of rows"][1]()
    exported = capture(grouped, inputs).to_exported_program()
    torch.testing.assert_close(exported.run_decompositions().module()(*inputs), grouped(*inputs))
