"""Training steps' operators for gradients, which neither engine has: by other operators, held to eager by all routes.

Whole: ``python -m tests.sweeps lowerings --backwards --to onnx``, and ``--to jax``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("jax")
pytest.importorskip("onnxruntime")

from functionalize import capture
from functionalize.backends.decompositions.families.backwards import BACKWARDS
from tests.support import routes
from tests.support.export_programs import step_of
from tests.support.ledger import RIGHT
from tests.support.routes import JAX, ONNX, Route
from tests.sweeps.lowerings.rows import Table, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
aten = torch.ops.aten

OPERATORS = [
    "nn.functional.avg_pool2d",
    "nn.functional.adaptive_avg_pool3d",
    "nn.functional.adaptive_max_pool2d",
    "nn.functional.max_pool3d",
    "nn.functional.interpolate.bilinear",
    "nn.functional.interpolate.nearest",
    "nn.functional.pad.replicate",
    "nn.functional.grid_sample",
    "nn.functional.conv_transpose2d",
    "nn.functional.embedding_bag",
    "nn.functional.multilabel_margin_loss",
    "nn.functional.multi_margin_loss",
    "nn.functional.pdist",
    "cdist",
    "masked_scatter",
    "median",
]


@pytest.mark.every(6)
@pytest.mark.slow
@pytest.mark.parametrize("route", [ONNX, JAX])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_operators_of_the_database(name: str, route: Route) -> None:
    table = Table(route, routes.BACKWARDS)
    found = list(rows(name, ["float32"], 3, table.check(), table.ledger()))
    assert {row.status for row in found} == {RIGHT}, found


POOLS = [(3, 4, 0, True, False), (4, 3, 1, True, True), (3, 2, 1, False, False), (2, 2, 0, False, True)]


@pytest.mark.parametrize("geometry", POOLS)
@pytest.mark.parametrize("divisor", [None, 3])
def test_averages_over_windows_of_which_some_are_in_part_outside(geometry: Any, divisor: int | None) -> None:
    x, op = torch.randn(2, 3, 9, 8, dtype=torch.float64), aten.avg_pool2d_backward.default
    kernel, stride, padding, ceil_mode, included = geometry
    rest = ([kernel], [stride], [padding], ceil_mode, included, divisor)
    gradient = torch.randn_like(aten.avg_pool2d(x, *rest))
    given = ([kernel, kernel], [stride, stride], [padding, padding], *rest[3:])
    torch.testing.assert_close(BACKWARDS[op](gradient, x, *rest), op(gradient, x, *given))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances_of_points_that_are_the_same(p: float) -> None:
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    y[1], y[2, 0] = x[0], x[1, 0]
    distances = torch.cdist(x, y, p)
    args = (torch.randn_like(distances), x, y, p, distances)
    op = aten._cdist_backward.default
    torch.testing.assert_close(BACKWARDS[op](*args), op(*args), equal_nan=True)


def _decoder() -> tuple[Any, Callable[[], tuple[Tensor, ...]]]:
    """A training step of what makes small planes of large ones, and back."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="replicate"),
        nn.GroupNorm(2, 4),
        nn.AvgPool2d(2),
        nn.AdaptiveMaxPool2d(3),
        nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.LocalResponseNorm(2),
        nn.AdaptiveAvgPool2d((3, 2)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return step_of(model, optimizer), lambda: (torch.randn(2, 2, 8, 8),)


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("route", [ONNX, JAX])
def test_a_step_of_a_model_that_resamples(route: Route, tmp_path: Path) -> None:
    torch.manual_seed(0)
    step, inputs = _decoder()
    torch.manual_seed(0)
    twin, _ = _decoder()
    run = route(capture(step, inputs()), tmp_path)
    for _ in range(3):
        (x,) = inputs()
        torch.testing.assert_close(run(x), twin(x))


def test_windows_over_constants_are_the_engines(tmp_path: Path) -> None:
    """The reference that torch's exporter computes constants with takes other windows where a step is wide."""
    constant = torch.eye(9).reshape(1, 9, 1, 9)

    def program(x: Tensor) -> Tensor:
        return x @ nn.functional.avg_pool2d(constant, (1, 3), (1, 4), ceil_mode=True).reshape(9, 3)

    x = torch.randn(2, 9)
    torch.testing.assert_close(ONNX(capture(program, (x,)), tmp_path)(x), program(x))
