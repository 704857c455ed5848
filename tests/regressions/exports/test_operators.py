"""Operators that exporters once got wrong, or refused without a clear word."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from functionalize import (
    UnsupportedExportError,
    UnsupportedProgramError,
    capture,
)
from tests.support.routes import ONNX, SAVED

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


def test_complex_inputs_and_state_of_onnx_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    state = torch.zeros(2, dtype=torch.complex64)
    program = capture(lambda z: state.add_(z).abs(), (torch.ones(2, dtype=torch.complex64),))
    with pytest.raises(UnsupportedExportError, match=r"(?s)for 3 causes.*takes `z`, of torch.complex64.*view_as_real"):
        program.to_onnx(tmp_path / "complex.onnx")
    assert not list(tmp_path.iterdir())


def test_arguments_that_no_stablehlo_file_takes_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    program = capture(lambda x, n: x * n, (torch.ones(2), 3))
    with pytest.raises(UnsupportedProgramError, match="takes 3 as an argument"):
        program.to_stablehlo(tmp_path / "program.stablehlo")
    assert not list(tmp_path.iterdir())


def test_what_an_operator_takes_no_gradients_of_has_none(tmp_path: Path) -> None:
    """A scale that is computed of weights, by an observer that reads them without gradients."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    model = nn.Sequential(nn.Linear(3, 2), fake)
    model(torch.ones(2, 3))
    run = SAVED(capture(model, (torch.randn(4, 3),)), tmp_path)
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(run(x), model(x).detach())


@pytest.mark.parametrize(
    "product", [torch.mv, lambda m, v: torch.addmv(v[:3], m, v, beta=2), lambda m, v: m.expand(2, 3, 4) @ v]
)
def test_transposed_matrices_times_vectors_in_onnx(product: Any, tmp_path: Path) -> None:
    """What ONNX Runtime joins the two operators to is wrong for vectors."""
    matrix, vector = torch.randn(4, 3), torch.randn(4)
    run = ONNX(capture(lambda m, v: product(m.t(), v), (matrix, vector)), tmp_path)
    torch.testing.assert_close(run(matrix, vector), product(matrix.t(), vector))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_tensors_that_are_not_strided_are_refused(layout: torch.layout) -> None:
    weight = torch.eye(3).to_sparse(layout=layout)
    program = capture(lambda x: weight @ x, (torch.randn(3, 3),))
    with pytest.raises(UnsupportedExportError, match=rf"(?s)takes a tensor of layout {layout}.*weight @ x"):
        program.to_exported_program()


def whole_quotients(x: Tensor, n: Tensor) -> Any:
    return x // 0.1, 0.7 // x, x // x.flip(0), 7 // n, n // 2.5, torch.div(x, n, rounding_mode="floor")


def truths(x: Tensor, n: Tensor) -> Any:
    b = n > 2
    both = b + ~b, b * b, torch.stack([b, n.to(torch.int8)]), b.masked_fill(b, False), torch.where(b, b, ~b)
    return both, b.amin(), b.amax(0), b.max(0).values, b.sort(), n.to(torch.uint8).neg(), n.to(torch.int8) ** 2


def of_no_elements(x: Tensor, n: Tensor) -> Any:
    none = x[x > 9]
    return none.mean(), (none > 0).any(), (none > 0).all(), none.sum(), x[:0].mean(), x[:0].any(), x[x > 0].mean()


def means_of_no_elements(x: Tensor, n: Tensor) -> Any:
    losses: list[Callable[..., Any]] = [
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.soft_margin_loss,
        functional.binary_cross_entropy_with_logits,
        lambda a, b: functional.binary_cross_entropy(a.sigmoid(), b),
    ]
    parts = x[:0], x[x > 9], x[x > 0]
    spread = [(one.var(), one.std(correction=0), *torch.var_mean(one, 0, keepdim=True)) for one in parts]
    return spread, [loss(one, torch.ones_like(one)) for loss in losses for one in parts]


def without_dimensions(x: Tensor, n: Tensor) -> Any:
    x, n = x[1], n[1]
    zero = torch.tensor(0)
    one = x.topk(1), n.all(0), n.any(0), n.prod(0), x.scatter(0, zero, 2.0), x.amax(), x.aminmax()
    return one, n.sort(stable=True), x.max(0)


@pytest.mark.every(5)
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    "function", [whole_quotients, truths, of_no_elements, means_of_no_elements, without_dimensions]
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_operators_that_onnx_has_otherwise(function: Any, tmp_path: Path) -> None:
    inputs = torch.tensor([1.0, 2.0, -0.7, 3.0]), torch.tensor([2, -3, 7, 1])
    run = ONNX(capture(function, inputs), tmp_path)
    pairs = zip(*(tree_leaves(one) for one in (run(*inputs), function(*inputs))), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_median_of_no_elements_in_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    program = capture(
        lambda x, n: (x.median(), x.nanmedian(), n.median()), (torch.ones(0), torch.ones(0).int())
    ).to_jax()
    floats, other, whole = program(program.initial_state, jnp.ones(0), jnp.ones(0, jnp.int32))[1]
    assert [math.isnan(floats), math.isnan(other), int(whole)] == [True, True, torch.iinfo(torch.int32).min]


SCATTERS: dict[str, Callable[..., Tensor]] = {
    "scatter_add": lambda base, index, values: base.scatter_add(0, index, values),
    "amin": lambda base, index, values: base.scatter_reduce(0, index, values, "amin"),
    "amax of others": lambda base, index, values: base.scatter_reduce(0, index, values, "amax", include_self=False),
    "index_add": lambda base, index, values: base.index_add(0, index, values),
    "index_put": lambda base, index, values: base.index_put((index,), values, accumulate=True),
    "masked": lambda base, index, values: torch.ops.aten._unsafe_masked_index_put_accumulate(
        base, values > 0, [index], values
    ),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bool], ids=str)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_that_reduce_what_the_engine_has_no_kernel_for(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    args = torch.arange(5).to(dtype), torch.tensor([0, 2, 2, 4]), torch.tensor([3, 0, 5, 7]).to(dtype)
    run = ONNX(capture(SCATTERS[name], args), tmp_path)
    assert torch.equal(run(*args), SCATTERS[name](*args))


def test_places_of_a_tensor_without_dimensions(tmp_path: Path) -> None:
    run = ONNX(capture(torch.nonzero, (torch.tensor(0.0),)), tmp_path)
    assert [run(torch.tensor(value)).shape for value in (0.0, 2.0)] == [(0, 0), (1, 0)]


def test_statistics_that_an_evaluation_has_not(tmp_path: Path) -> None:
    def normalized(x: Tensor, mean: Tensor, variance: Tensor) -> Any:
        return torch.native_batch_norm(x, None, None, mean, variance, False, 0.1, 1e-5)

    args = torch.randn(3, 2, 4), torch.rand(2), torch.rand(2)
    found, expected = ONNX(capture(normalized, args), tmp_path)(*args), normalized(*args)
    torch.testing.assert_close(tuple(found), expected)


def test_losses_that_overflow_in_float16(tmp_path: Path) -> None:
    args = torch.tensor([12.0, -12.5, 3.0]).half(), torch.tensor([-1.0, 1.0, 1.0]).half()
    run = ONNX(capture(functional.soft_margin_loss, args), tmp_path)
    torch.testing.assert_close(run(*args), functional.soft_margin_loss(*args))
