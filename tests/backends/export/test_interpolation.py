"""Interpolation on backends: spelt out where engines give it another meaning, refused where only torch's kernels do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.nn.functional import interpolate

from functionalize import InputMismatchError, UnsupportedExportError, UnsupportedProgramError, capture
from tests.support.routes import CORE_ATEN, JAX, ONNX, Route

on_each_route = pytest.mark.parametrize("route", [CORE_ATEN, ONNX, JAX])
CALLS: tuple[dict[str, Any], ...] = (
    {"size": (5, 9)},
    {"size": (5, 7), "align_corners": True},
    {"size": (1, 3), "align_corners": True},
    {"scale_factor": 0.6},
    {"scale_factor": (2.3, 0.9)},
)


@pytest.mark.every(4)
@on_each_route
@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing(mode: str, options: Any, route: Route, tmp_path: Path) -> None:
    def run(x: Tensor) -> Any:
        return interpolate(x, mode=mode, antialias=True, **options)

    x = torch.randn(2, 2, 8, 6)
    program = capture(run, (x,))
    torch.testing.assert_close(route(program, tmp_path)(x), run(x), rtol=1e-5, atol=3e-6)
    if route is CORE_ATEN:
        assert not [node for node in program.to_core_aten().graph.nodes if "_aa" in str(node.target)]


@pytest.mark.every(5)
@on_each_route
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_gradients_of_antialiasing(mode: str, route: Route, tmp_path: Path) -> None:
    """They were wrong in core ATen, where torch's kernel was asked for one column."""

    def run(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(interpolate(x, (5, 9), mode=mode, antialias=True).square().sum(), x)[0]

    x = torch.randn(1, 2, 8, 8)
    torch.testing.assert_close(route(capture(run, (x,)), tmp_path)(x), run(x), rtol=1e-5, atol=1e-5)


@pytest.mark.every(5)
@on_each_route
def test_sizes_that_a_decomposition_asked_for(route: Route, tmp_path: Path) -> None:
    """Spelt out for sizes at which the image becomes smaller: JAX did so at others too, and gave other numbers."""

    def run(x: Tensor) -> Tensor:
        return interpolate(x, (5, 7), mode="bilinear", antialias=True, align_corners=True)

    dynamic = {"x": {2: Dim("h", min=4, max=64), 3: Dim("w", min=4, max=64)}}
    called = route(capture(run, (torch.randn(1, 1, 8, 9),), dynamic_shapes=dynamic), tmp_path)
    smaller = torch.randn(1, 1, 12, 8)
    torch.testing.assert_close(called(smaller), run(smaller), rtol=1e-5, atol=3e-6)
    with pytest.raises((InputMismatchError, AssertionError), match=r">= 1"):
        called(torch.randn(1, 1, 4, 20))


def column(x: Tensor) -> Tensor:
    return interpolate(x, (5, 1), mode="bilinear", antialias=True)


def of_bytes(x: Tensor) -> Tensor:
    return interpolate(x.to(torch.uint8), (5, 7), mode="bilinear")


def antialiased_bytes(x: Tensor) -> Tensor:
    return interpolate(x.to(torch.uint8), (5, 7), mode="bicubic", antialias=True)


@on_each_route
@pytest.mark.parametrize(
    ("run", "why"),
    [(column, "one column wide"), (of_bytes, "takes uint8"), (antialiased_bytes, "takes uint8")],
)
def test_what_only_torchs_kernels_compute_so(
    run: Callable[[Tensor], Tensor], why: str, route: Route, tmp_path: Path
) -> None:
    x = torch.rand(1, 2, 8, 8) * 200
    program = capture(run, (x,))
    torch.testing.assert_close(program.to_exported_program().module()(x), run(x), rtol=0, atol=0)
    with pytest.raises((UnsupportedExportError, UnsupportedProgramError), match=why) as caught:
        route(program, tmp_path)
    assert "test_interpolation.py" in str(caught.value)
    assert not list(tmp_path.iterdir())


@on_each_route
def test_bytes_that_are_the_nearest(route: Route, tmp_path: Path) -> None:
    def run(x: Tensor) -> Tensor:
        return interpolate(x, scale_factor=1.7)

    x = torch.randint(0, 256, (1, 2, 5, 7), dtype=torch.uint8)
    torch.testing.assert_close(route(capture(run, (x,)), tmp_path)(x), run(x), rtol=0, atol=0)
