"""Special functions, searches and choices that ONNX has no operator for, at their poles and on few elements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from functionalize.backends import onnx

_INF, _NAN = float("inf"), float("nan")
_ARGUMENTS = (0.0, -0.0, 1e-30, 1e-7, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5, 6.99, 7.0, 30.0, 1e4, 1e10)
POINTS = (*_ARGUMENTS, -1e-7, -0.3, -0.5, -1.5, -2.5, -7.25, -30.1, _NAN)
POLES = (_INF, -_INF, -1.0, -2.0, -30.0)


def run(function: Callable[..., Any], *calls: tuple[Tensor, ...], path: Path) -> list[tuple[Any, Any]]:
    """What each call gives, of the file and of eager; the first one is what is captured."""
    loaded = onnx.load(capture(function, calls[0]).to_onnx(path / "program.onnx"))
    return [(loaded(*args), function(*args)) for args in calls]


@pytest.mark.every(5)
@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_functions(dtype: torch.dtype, tmp_path: Path) -> None:
    def functions(x: Tensor, regular: Tensor) -> dict[str, Tensor]:
        return {"lgamma": x.lgamma(), "digamma": x.digamma(), "trigamma": regular.polygamma(1)}

    args = torch.tensor(POINTS + POLES, dtype=dtype), torch.tensor(POINTS, dtype=dtype)
    ((mine, expected),) = run(functions, args, path=tmp_path)
    for name, wanted in expected.items():
        limit = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        if name == "trigamma":  # of which eager's own series has fewer digits
            limit = {torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
        torch.testing.assert_close(mine[name], wanted, rtol=limit, atol=limit, equal_nan=True, msg=name)


def test_gradients_of_gamma_functions(tmp_path: Path) -> None:
    def gradients(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x.lgamma() + x.digamma() * x).sum(), x)

    for mine, expected in run(gradients, (torch.rand(9) + 0.1,), (torch.rand(9) * 20 + 0.1,), path=tmp_path):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_inverse_error_function(tmp_path: Path) -> None:
    points = torch.tensor([0.0, 1e-20, 0.3, -0.5, 0.9, 0.99, -0.9999, 0.999999, 1.0, -1.0, 1.5, _NAN])
    ((mine, expected),) = run(torch.erfinv, (points,), path=tmp_path)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


def searches(boundaries: Tensor, values: Tensor) -> dict[str, Tensor]:
    ordered, order = boundaries.sort()
    return {
        "rows": torch.searchsorted(ordered, values),
        "right": torch.searchsorted(ordered, values, right=True, out_int32=True),
        "side": torch.searchsorted(ordered, values, side="right"),
        "sorter": torch.searchsorted(boundaries, values, sorter=order),
        "one row": torch.searchsorted(ordered[0], values),
        "a number": torch.searchsorted(ordered[0], 0.5),
        "isin": torch.isin(values, boundaries[0, 0]),
        "among": torch.isin(values.round(), boundaries.round()),
    }


def test_searches(tmp_path: Path) -> None:
    numbers = torch.tensor([[1.0, -_INF, 0.5, _NAN, 2.0, 0.5], [3.0, 3.0, 3.0, -1.0, _INF, 0.0]])
    values = torch.tensor([[0.5, _NAN, _INF, -_INF], [3.0, 0.1, -2.0, 4.0]])
    calls = [(torch.randn(2, 6), torch.randn(2, 4)), (numbers, values), (numbers.flip(0), values)]
    for mine, expected in run(searches, *calls, path=tmp_path):
        for name, wanted in expected.items():
            torch.testing.assert_close(mine[name], wanted, rtol=0, atol=0, msg=name)


def choices(x: Tensor, mask: Tensor) -> dict[str, Any]:
    return {
        "chosen": torch.masked_select(x, mask > 0),
        "few": torch.nonzero_static(x > 0, size=3),
        "many": torch.nonzero_static(x > 0, size=20, fill_value=-7),
        "alone": torch.nonzero_static(x[0, 0] > 0, size=2),
        "wide": x.double().nonzero(),
        "runs": torch.unique_consecutive(x.sign(), return_inverse=True, return_counts=True),
    }


def test_a_data_dependent_number_of_choices(tmp_path: Path) -> None:
    ones = torch.ones(3, 4)
    calls = [(torch.randn(3, 4), torch.randn(4)) for _ in range(3)] + [(ones, -ones[0]), (ones - 1, ones[0])]
    for mine, expected in run(choices, *calls, path=tmp_path):
        for name, wanted in expected.items():
            torch.testing.assert_close(mine[name], wanted, rtol=0, atol=0, msg=name)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_scatters_that_reduce(dtype: torch.dtype, tmp_path: Path) -> None:
    def scatters(base: Tensor, index: Tensor, source: Tensor) -> tuple[Tensor, ...]:
        return (
            base.scatter(1, index, source, reduce="add"),
            base.scatter(1, index, source, reduce="multiply"),
            base.scatter(1, index, 2, reduce="add"),
            base[0, 0].scatter_add(0, index[0, 0] * 0, source[0, 0]),
        )

    def call() -> tuple[Tensor, ...]:
        base, source = (torch.randn(3, 4).mul(3).to(dtype) for _ in range(2))
        return base, torch.randint(4, (3, 4)), source

    for mine, expected in run(scatters, call(), call(), path=tmp_path):
        torch.testing.assert_close(mine, expected)


def test_slopes_that_are_drawn(tmp_path: Path) -> None:
    def slopes(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        found = torch.nn.functional.rrelu(x, 0.25, 0.5, training=True)
        return found, torch.autograd.grad(found.sum(), x)[0]

    x = torch.linspace(-3, 3, 1000)
    (((found, gradient), _),) = run(slopes, (x,), path=tmp_path)
    torch.testing.assert_close(found, x * gradient)
    below = gradient[x <= 0]
    assert (gradient[x > 0] == 1).all() and 0.25 <= below.min() < 0.3 < 0.45 < below.max() <= 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8])
def test_the_second_derivative_of_lgamma_at_its_poles(dtype: torch.dtype, tmp_path: Path) -> None:
    """There eager's kernel divides by the sine of a rounded product, which is no zero."""
    x = torch.tensor([-8, -7, -3, -1, 1, 5]).to(dtype)
    ((mine, expected),) = run(lambda x: torch.polygamma(1, x), (x,), path=tmp_path)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=0)
