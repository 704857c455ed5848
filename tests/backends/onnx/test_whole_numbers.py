"""Numbers in ONNX files: whole ones exactly, floats of the dtype that the program says, or a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.nn import functional

from functionalize import UnsupportedExportError, capture

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from functionalize.backends import onnx

_MATRIX = tensor([[2**53 + 1, 2, 7], [1, 2**60 + 1, 2**40 + 3]])
_NARROW = tensor([2**31 - 1, 100, -7], dtype=torch.int32)
_PLACES = tensor([[0, 1], [1, 0]])
_LARGER = (torch.ones(2, 3), torch.arange(6.0).view(2, 3))
_WIDE = torch.ones(3).double()


def _quotients(a: Tensor, b: Tensor) -> Any:
    return [torch.div(x, y, rounding_mode=how) for how in ("trunc", "floor") for x, y in ((a, b), (a, 3), (a.int(), 3))]


def _powers(a: Tensor, b: Tensor) -> Any:
    return a**b, a**3, a**20, a**0, 3 ** b.abs(), a.int() ** 5, a.to(torch.uint8) ** b.abs().to(torch.uint8)


def _sums(a: Tensor) -> Any:
    return a.sum(), a.sum(1), a.sum((0, 1), keepdim=True), a.sum(0, dtype=torch.int16), a[:, :0].sum(1), a[0, 0].sum()


def _layers(x: Tensor, other: Tensor) -> Any:
    normal = functional.group_norm(x, 3, torch.arange(3.0))
    return normal, functional.cross_entropy(x[..., 0], tensor([0, 1]), weight=torch.arange(3.0)), torch.fft.fft2(x).real


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "quotients": (_quotients, (tensor([2**24 + 1, 100000007, -(2**31) - 3]), tensor([1, -2, 2]))),
    "powers": (_powers, (tensor([300001, 7, 3, -3, -1, 2]), tensor([3, 20, 35, 101, -3, -2]))),
    "sums": (_sums, (_MATRIX,)),
    "sums of 32 bits": (lambda a: (a.sum(dtype=torch.int32), a.sum(), a.prod(), a.prod(0)), (_NARROW,)),
    "products": (lambda a: (a.prod(), a.prod(1), a.prod(0, keepdim=True), a[:, :0].prod(1)), (_MATRIX,)),
    "products of matrices": (lambda a: torch.addmm(a[:, :2], a, a.T, beta=2, alpha=3), (_MATRIX,)),
    "hash": (lambda a: (a * 6364136223846793005 + 1442695040888963407).sum(), (tensor([3, 4]),)),
    "diagonals": (lambda a: [*(a.diagonal(n) for n in range(-3, 4)), a.trace()], (_MATRIX,)),
    "diagonal beside infinity": (lambda x: x.diagonal(), (tensor([[1.0, float("inf")], [float("nan"), 3.0]]),)),
    "diagonal written": (lambda a: a.T.clone().diagonal_scatter(a[0, :2] * 3, -1), (_MATRIX,)),
    "rounded": (lambda a: [a.floor(), a.ceil(), a.round(), a.trunc(), a.isnan(), a.nansum()], (_MATRIX,)),
    "larger source": (lambda x, y: x.scatter(0, _PLACES, y), _LARGER),
    "larger source, added": (lambda x, y: x.scatter_add(0, _PLACES[:1], y), _LARGER),
    "larger source, reduced": (lambda x, y: x.scatter_reduce(0, _PLACES, y, "amax"), _LARGER),
    "determinants": (lambda x: (torch.linalg.det(x), x[0].det()), (torch.eye(3).repeat(2, 1, 1) * 2 + 1,)),
    "numbers alone": (lambda x: (torch.full((3,), 2.0) * x, x.double()), (torch.ones(3),)),
    "counted": (lambda x: x.double().mean() + (torch.arange(3.0) * x).sum(), (torch.ones(3),)),
    "beside 64 bits": (lambda x, other: torch.arange(3.0) * x, (torch.ones(3), _WIDE)),
    "layers beside 64 bits": (_layers, (torch.randn(2, 3, 4), _WIDE)),
}


@pytest.mark.every(12)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_eager(name: str, tmp_path: Path) -> None:
    program, inputs = CASES[name]
    expected = program(*inputs)
    found = onnx.load(capture(program, inputs).to_onnx(tmp_path / "program.onnx"))(*inputs)
    exact = not name.startswith(("determinants", "layers"))
    limit = 0.0 if exact else 1e-5
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: (x + 1).erf() * 2,
        lambda x: functional.conv2d(x, x),
        lambda x: x.bfloat16().flatten(1) @ x.bfloat16().flatten(1).T,
    ],
)
def test_types_without_kernels_are_refused_first(program: Any, tmp_path: Path) -> None:
    captured = capture(program, (torch.randn(1, 1, 3, 3).double(),))
    with pytest.raises(UnsupportedExportError, match="Could not find an implementation") as caught:
        captured.to_onnx(tmp_path / "program.onnx")
    (cause,) = caught.value.causes
    assert re.search(r"^    at   .*test_whole_numbers\.py:\d+ in <lambda>: ", cause, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [(), (0,), (3, 0)])
def test_whether_any_byte_is_set_is_a_byte(size: tuple[int, ...], tmp_path: Path) -> None:
    def run(x: Tensor) -> Any:
        return x.any(), x.all(), x.bool().any()

    x = torch.ones(size, dtype=torch.uint8)
    loaded = onnx.load(capture(run, (x,)).to_onnx(tmp_path / "program.onnx"))
    torch.testing.assert_close(loaded(x), run(x))
