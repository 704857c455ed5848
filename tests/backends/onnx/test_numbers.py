"""Operators of ONNX files over zeros, infinities, what is no number, and where plain formulas lose digits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

from functionalize import UnsupportedExportError, capture

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from functionalize.backends import onnx

_INF, _NAN = float("inf"), float("nan")
_SIZES = (0.0, 1e-30, 1e-10, 1e-7, 1e-3, 0.3, 1.0, 2.5, 7.0, 12.0, 18.0, 50.0, 88.0, 200.0, 1e4, 1e10, 1e30, _INF)
EDGES = (*_SIZES, *(-size for size in _SIZES), _NAN)


def of_one(x: Tensor) -> dict[str, Tensor]:
    special, ones = torch.special, torch.ones_like(x)
    return {
        "log1p": x.log1p(),
        "expm1": x.expm1(),
        "sign": x.sign(),
        "sgn": x.sgn(),
        "signbit": x.signbit(),
        "angle": x.angle(),
        "remainder": x.remainder(0.1),
        "heaviside": x.heaviside(ones * 0.5),
        "sign of another": x.reciprocal().copysign(x),
        "erfc": x.erfc(),
        **({"erfcx": special.erfcx(x), "log_ndtr": special.log_ndtr(x)} if x.dtype != torch.float16 else {}),
        "logsigmoid": F.logsigmoid(x),
        "loss": F.binary_cross_entropy_with_logits(x, ones, reduction="none"),
        "weighted": F.binary_cross_entropy_with_logits(x, ones * 0.3, pos_weight=ones * 2, reduction="none"),
    }


def of_two(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {
        "logaddexp": torch.logaddexp(x, y),
        "logaddexp2": torch.logaddexp2(x, y),
        "remainder": torch.remainder(x, y).where((x / y).isfinite(), 0),  # eager has none of a quotient that is not
        "xlogy": torch.xlogy(x, y),
        "copysign": torch.copysign(x, y).where(~y.isnan(), 0),
        "hypot": torch.hypot(x, y),
        "fmax": torch.fmax(x, y),
        "fmin": torch.fmin(x, y),
        "xlog1py": torch.special.xlog1py(x, y),
        **({"atan2": torch.atan2(x, y)} if x.dtype != torch.float64 else {}),  # the engine has no such arctangent
    }


def loaded(function: Any, path: Path, *args: Any, **options: Any) -> Any:
    return onnx.load(capture(function, args, **options).to_onnx(path / "program.onnx"))


@pytest.mark.every(4)
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.full), torch.float16])
@pytest.mark.parametrize("function", [of_one, of_two])
def test_functions_of_numbers(function: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.tensor(EDGES, dtype=dtype)
    pairs = [one.flatten().clone() for one in torch.meshgrid(x, x, indexing="ij")]
    args = [x] if function is of_one else pairs
    limit = {torch.float32: 2e-5, torch.float64: 1e-9, torch.float16: 4e-3}[dtype]
    found, expected = loaded(function, tmp_path, *args)(*args), function(*args)
    for name, wanted in expected.items():
        smallest = 1e-7 if name == "logaddexp2" else torch.finfo(dtype).smallest_normal
        mine = found[name]
        if name == "xlog1py" and dtype == torch.float16:  # whose numbers are too large on the way, or not
            mine, wanted = mine.clamp(-6e4, 6e4), wanted.clamp(-6e4, 6e4)
        options: Any = {"rtol": limit, "atol": smallest, "equal_nan": True}
        torch.testing.assert_close(mine, wanted, msg=name, **options)


@pytest.mark.slow(seconds=3)
def test_functions_of_whole_numbers(tmp_path: Path) -> None:
    x = torch.arange(-3, 4)

    def run(x: Tensor) -> Any:
        two = torch.atan2(x, x.flip(0)), x.remainder(0.3), torch.remainder(x, x.flip(0) * 0.3), torch.xlogy(x, 2)
        return x.log1p(), x.expm1(), x.sign(), x.signbit(), x.angle(), x.heaviside(x), *two

    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x), equal_nan=True)


@pytest.mark.slow(seconds=2)
def test_angles_of_complex_numbers(tmp_path: Path) -> None:
    x = torch.tensor([[0.0, -2.0], [-1.0, 0.0], [-1.0, -0.0], [-0.0, 0.0], [3.0, 4.0]])

    def run(x: Tensor) -> Tensor:
        return torch.view_as_complex(x).angle()

    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x))


@pytest.mark.slow(seconds=3)
def test_cumulated_logarithms_of_sums(tmp_path: Path) -> None:
    x = torch.tensor([[0.0, 200, -1], [0, 90, 100], [-700, 700, 0], [-_INF, -_INF, 2], [1, _INF, 3], [1, _NAN, 2]])

    def run(x: Tensor) -> Any:
        return x.logcumsumexp(0), x.logcumsumexp(-1)

    one = x[0, 0]
    assert loaded(lambda x: x.logcumsumexp(0), tmp_path, one)(one) == one
    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x), equal_nan=True)
    dynamic = loaded(run, tmp_path, x, dynamic_shapes=({0: Dim("rows", min=2)},))
    for rows in (2, 5, 6):
        torch.testing.assert_close(dynamic(x[:rows]), run(x[:rows]), equal_nan=True)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16])
def test_means_of_what_goes_to_one_place(dtype: torch.dtype, tmp_path: Path) -> None:
    source, index = torch.tensor([[4, 8], [-6, 3]], dtype=dtype), torch.tensor([[0, 0], [1, 2]])

    def run(x: Tensor) -> Any:
        means = [
            x.scatter_reduce(dim, index, source, "mean", include_self=own) for dim in (0, 1) for own in (True, False)
        ]
        return *means, x[0, 0].scatter_reduce(0, index[0, 0], source[0, 0], "mean")

    x = torch.tensor([[1, 2, 3], [4, 5, -7], [1, 1, 1]], dtype=dtype)
    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x))


MARGINS = {
    "stops": ([0.1, 0.2, 0.4, 0.8], [0, 1, -1, 2]),
    "stops-for-good": ([0.1, 0.2, 0.4, 0.8], [0, 1, -1, -1]),
    "rows": (
        [[0.3, -1, 2, 0.1], [1, 1.5, -0.2, 0], [0.1, 0.2, 0.3, 0.4]],
        [[0, 3, -1, 2], [3, 2, 1, 0], [-1, 2, 1, 0]],
    ),
}


@pytest.mark.every(5)
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("name", MARGINS)
def test_margin_loss_of_several_targets(name: str, tmp_path: Path) -> None:
    """On every way out: of torch's own, the places behind the last target count for the first class."""
    x, targets = (torch.tensor(one) for one in MARGINS[name])

    def run(x: Tensor, targets: Tensor) -> Any:
        return tuple(F.multilabel_margin_loss(x, targets, reduction=one) for one in ("mean", "sum", "none"))

    program, expected = capture(run, (x, targets)), run(x, targets)
    torch.testing.assert_close(program.to_core_aten().module()(x, targets), expected)
    torch.testing.assert_close(onnx.load(program.to_onnx(tmp_path / "loss.onnx"))(x, targets), expected)
    jax = pytest.importorskip("functionalize.backends.jax")
    _, found = program.to_jax().jit()({}, jax.from_torch(x), jax.from_torch(targets))
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)


@pytest.mark.slow(seconds=2)
def test_operators_that_check_a_matrix_have_no_translation(tmp_path: Path) -> None:
    for op in (torch.linalg.inv, torch.linalg.cholesky):
        with pytest.raises(UnsupportedExportError, match="no translation") as caught:
            capture(op, (torch.eye(3),)).to_onnx(tmp_path / "matrix.onnx")
        assert len(caught.value.causes) == 1


@pytest.mark.slow(seconds=3)
def test_whole_numbers_of_python(tmp_path: Path) -> None:
    def made() -> Any:
        kept = {"n": 10}

        def run(x: Tensor, m: Any) -> Any:
            kept["n"] -= 7
            n, k = kept["n"], m.item()
            whole = n // 3, n // -4, -17 // (n * n + 1), *divmod(k, 4), k // -7, n % -4, math.floor(n / 7)
            bits = n << 2, n >> 1, k >> 70, n & 3, n & -4, n | 3
            powers = n**2, n**3, (k * 100001) ** 3, 2 ** (n * n % 7)
            return whole, bits, powers, n / 7, n * 0.1, x.double() * (k / 7), x * (k / 7), torch.tensor(n // 2)

        return run

    x, theirs = torch.tensor([1.0, 2.0]), made()
    mine = loaded(made(), tmp_path, x, torch.tensor(5))
    for number in (5, -5, 0, -9, 13):
        given = x, torch.tensor(number)
        torch.testing.assert_close(mine(*given), theirs(*given), rtol=1e-6, atol=0)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_floats_that_are_computed_from_sizes(dtype: torch.dtype, tmp_path: Path) -> None:
    """They have 64 bits, as Python's."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        count = x.size(0)
        third = count / 3
        return (
            x * (count * 0.1),
            x / math.sqrt(count),
            x + count**0.5,
            torch.full((3,), third, dtype=torch.float64),
            torch.add(x, x, alpha=third),
            torch.where(x > third, x, third),
            x.clamp(max=third, min=1 / count),
            x.masked_fill(x > 5, third),
            x * torch.tensor(third, dtype=dtype),
        )

    program = capture(run, (torch.arange(10, dtype=dtype),), dynamic_shapes=({0: Dim.AUTO},))
    runner = onnx.load(program.to_onnx(tmp_path / "floats.onnx"))
    close = 1e-15 if dtype == torch.float64 else 1e-6
    for count in (10, 13, 31):
        x = torch.arange(count, dtype=dtype) + 0.3
        torch.testing.assert_close(runner(x), run(x), rtol=close, atol=close)


@pytest.mark.slow(seconds=2)
def test_functions_of_python_without_a_translation_are_named(tmp_path: Path) -> None:
    def run(x: Tensor, n: Any) -> Any:
        return x * (3 << n.item())

    with pytest.raises(UnsupportedExportError, match=r"lshift(.|\n)*test_numbers\.py"):
        loaded(run, tmp_path, torch.ones(2), torch.tensor(2))


@pytest.mark.slow(seconds=3)
def test_functions_of_64_bits(tmp_path: Path) -> None:
    x = torch.tensor([0.5, 10, 3, 1e-300, -0.3, -20, -1000, 1000, 0, -0.0, _INF, -_INF, _NAN], dtype=torch.float64)

    def run(x: Tensor) -> Any:
        return x.log2(), x.log10(), x.sinc(), x.sigmoid(), F.silu(x), x.half().sinc()

    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x), rtol=1e-13, atol=1e-16, equal_nan=True)


@pytest.mark.slow(seconds=3)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_corrections_of_more_than_there_is(tmp_path: Path) -> None:
    def run(x: Tensor) -> Any:
        spread = x.var(0, correction=5), x.std(0, correction=3, keepdim=True), x.var(correction=8), x.var(1)
        return spread, torch.var_mean(x, 0, correction=5), x[:1].std(0), x[0, 0].var(), x.half().var(0, correction=4)

    x = torch.arange(6.0).view(3, 2)
    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x), equal_nan=True)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float32])
def test_several_clamps_of_one_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    def run(x: Tensor) -> Any:
        return x.clamp(-2, 5), x.clamp(0, 2), x.clamp(5, 2), x.clamp(1, 3).relu()

    x = torch.tensor([3, -1, 9], dtype=dtype)
    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x))


@pytest.mark.slow(seconds=4)
def test_scans_and_windows(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, 3, 3, -2], [_INF, _NAN, 0, _INF], [-_INF, 1, _INF, 2]])
    whole = torch.tensor([[3, -1, 9, 3], [2, 2, -7, 0]])
    long = torch.tensor([1e30, 1e30, 1e-30, 1e-30, 1e38])

    def run(x: Tensor, whole: Tensor, long: Tensor) -> Any:
        products = x.cumprod(0), x.half().cumprod(1), whole.cumprod(-1), x[0, 0].cumprod(0), long.cumprod(0)
        extremes = x.cummax(0), x.cummin(1), whole.cummax(1), whole.to(torch.int8).cummin(-1), x[0, 0].cummax(0)
        windows = torch.hamming_window(5), torch.hamming_window(4, periodic=False)
        return products, [tuple(one) for one in extremes], windows

    torch.testing.assert_close(
        loaded(run, tmp_path, x, whole, long)(x, whole, long), run(x, whole, long), equal_nan=True
    )


@pytest.mark.slow(seconds=2)
def test_shifts_by_tensors(tmp_path: Path) -> None:
    x, by = torch.tensor([[3, -1, 9, 3], [2, 2, -7, 0]]), torch.tensor([64, -1, 63, 3])

    def run(x: Tensor, by: Tensor) -> Any:
        return x << by, x >> by, x.int() >> by.clamp(0, 5), x >> by.clamp(0, 5).int(), x.int() << by.clamp(0, 5).int()

    torch.testing.assert_close(loaded(run, tmp_path, x, by)(x, by), run(x, by))


@pytest.mark.slow(seconds=2)
def test_norms_of_what_is_no_number(tmp_path: Path) -> None:
    x = torch.tensor([[_INF, _NAN, 0], [-_INF, 1, 2], [1, 2, 3]])

    def run(x: Tensor) -> Any:
        norm = torch.linalg.vector_norm
        return (
            norm(x, _INF),
            norm(x, -_INF),
            norm(x, _INF, 1),
            norm(x, -_INF, 0, keepdim=True),
            norm(x.double(), 0.3, 1),
        )

    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x), equal_nan=True)


@pytest.mark.slow(seconds=2)
def test_what_the_exporter_fails_at_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedExportError, match=r"aten\.cholesky_inverse(.|\n)*test_numbers\.py"):
        loaded(lambda x: torch.cholesky_inverse(x), tmp_path, torch.eye(3))


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_bounds_on_one_side_keep_infinities(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.tensor([-_INF, -7, -1, 0.5, 9, _INF, _NAN], dtype=dtype)
    zero = torch.tensor(0.0, dtype=dtype)

    def run(x: Tensor) -> Any:
        by_tensors = torch.clamp_min(x, zero), torch.clamp_max(x, zero), torch.clamp_max(x, x.flip(0))
        return x.clamp(max=0.0), x.clamp(min=0), torch.clamp_min(x, 1), torch.clamp_max(x, 1.0), *by_tensors, F.relu6(x)

    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x), equal_nan=True)


@pytest.mark.slow(seconds=3)
def test_maxima_of_infinities_below(tmp_path: Path) -> None:
    x = torch.full((2, 6, 6), -_INF)
    x[0, 0, 0], x[0, 5, 5] = 1, torch.finfo(torch.float32).min

    def run(x: Tensor) -> Any:
        flat = F.max_pool1d(x, 3, 2, 1), F.max_pool2d(x, 3), *F.max_pool2d(x, 4, 4, 1, 1, True, return_indices=True)
        deep = F.max_pool3d(x.unsqueeze(0), (1, 3, 3), 2, (0, 1, 1)), F.adaptive_max_pool3d(x.unsqueeze(0), (1, 3, 3))
        return *flat, F.max_pool2d(x, 3, 2, 1), F.adaptive_max_pool2d(x, 3), F.max_pool2d(x, 2, 1, 1, 2), *deep

    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x))


@pytest.mark.slow(seconds=2)
def test_extremes_of_infinities_that_go_to_one_place(tmp_path: Path) -> None:
    x, index = torch.tensor([-_INF, -_INF, 1]), torch.tensor([0, 0, 1])

    def run(x: Tensor) -> Any:
        most = torch.zeros(3).scatter_reduce(0, index, x, "amax", include_self=False)
        least = torch.zeros(3).scatter_reduce(0, index, -x, "amin", include_self=False)
        return most, least, torch.zeros([]).scatter_reduce(0, index[0], x[0], "amax", include_self=False)

    torch.testing.assert_close(loaded(run, tmp_path, x)(x), run(x))


@pytest.mark.slow(seconds=4)
def test_products_that_are_added_to_nothing(tmp_path: Path) -> None:
    """On every way out."""
    nothing, x = torch.full((2, 2), _NAN), torch.tensor([[1.0, 2], [3, 4]])

    def run(nothing: Tensor, x: Tensor, number: Tensor) -> Any:
        whole, both = nothing.unsqueeze(0), torch.stack([x, x])
        matrices = torch.addmm(nothing, x, x, beta=0), torch.addmm(nothing, x, x, beta=0, alpha=number.item())
        batches = (
            torch.baddbmm(whole, x[None], x[None], beta=0.0, alpha=2),
            torch.addbmm(nothing, both, both, beta=0),
        )
        return *matrices, *batches, torch.addmv(nothing[0], x, x[0], beta=0), torch.addr(nothing, x[0], x[1], beta=0)

    args = nothing, x, torch.tensor(2.0)
    program, expected = capture(run, args), run(*args)
    torch.testing.assert_close(program.to_core_aten().module()(*args), expected)
    torch.testing.assert_close(onnx.load(program.to_onnx(tmp_path / "products.onnx"))(*args), expected)
    jax = pytest.importorskip("functionalize.backends.jax")
    _, found = program.to_jax().jit()({}, *map(jax.from_torch, args))
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted)
