"""Interpolation and pooling by exporters: scales, sizes, what decompositions ask of sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from functionalize import (
    InputMismatchError,
    capture,
)
from tests.support.routes import ONNX


# Kernels that copy along a dimension that stays as it is, and others that take the scale there as well.
@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("mode", "dims"),
    [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("nearest", 1), ("nearest", 2), ("nearest-exact", 2)],
)
@pytest.mark.parametrize("factor", [1.3, pytest.param(2.4, marks=pytest.mark.full)])
def test_scales_count_where_eager_takes_them(mode: str, dims: int, factor: float) -> None:
    x = torch.randn(1, 1, *[3] * dims)

    def interpolated(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, mode=mode, scale_factor=(factor, *[2.0] * (dims - 1)))

    program, expected = capture(interpolated, (x,)), interpolated(x)
    torch.testing.assert_close(program.to_core_aten().module()(x), expected)
    pytest.importorskip("jax")
    from functionalize.backends.jax import from_torch, to_torch

    lowered = program.to_jax()
    torch.testing.assert_close(to_torch(lowered(lowered.initial_state, from_torch(x))[1]), expected)


@pytest.mark.every(6)
@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(("mode", "dims"), [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("nearest", 2)])
@pytest.mark.parametrize("factor", [1.3, pytest.param(2.4, marks=pytest.mark.full)])
def test_scales_count_where_eager_takes_them_in_onnx(mode: str, dims: int, factor: float, tmp_path: Path) -> None:
    x = torch.randn(1, 1, *[3] * dims)

    def interpolated(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, mode=mode, scale_factor=(factor, *[2.0] * (dims - 1)))

    torch.testing.assert_close(ONNX(capture(interpolated, (x,)), tmp_path)(x), interpolated(x))


@pytest.mark.parametrize("size", [(3, 9), (8, 8), (5, 6)])
def test_nearest_exact_in_onnx(size: tuple[int, int], tmp_path: Path) -> None:
    x = torch.randn(1, 1, 5, 6)

    def interpolated(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, size, mode="nearest-exact")

    torch.testing.assert_close(ONNX(capture(interpolated, (x,)), tmp_path)(x), interpolated(x))


def test_what_decompositions_ask_of_sizes_is_held_to_in_onnx(tmp_path: Path) -> None:
    """Torch takes pooling to a size apart for sizes that it divides, or for others."""
    x, dynamic = torch.randn(1, 1, 8, 6), {"x": {2: Dim("h", min=4, max=64), 3: Dim("w", min=4, max=64)}}

    def halved(x: Tensor) -> Any:
        return nn.functional.interpolate(x, scale_factor=0.5, mode="area"), nn.functional.adaptive_avg_pool2d(x, 2)

    run = ONNX(capture(halved, (x,), dynamic_shapes=dynamic), tmp_path)
    other = torch.randn(1, 1, 8, 6)
    torch.testing.assert_close(run(other), halved(other))
    with pytest.raises(InputMismatchError, match="the program was captured for sizes with"):
        run(torch.randn(1, 1, 7, 9))
