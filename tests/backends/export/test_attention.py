"""Steps that differentiate attention, decomposed: by torch's ``run_decompositions``, and to the core ATen set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from functionalize import capture
from tests.support.export_programs import step_of
from tests.support.routes import CORE_ATEN, MODULE, RUN_DECOMPOSITIONS, Route

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")

on_each_route = pytest.mark.parametrize("route", [MODULE, RUN_DECOMPOSITIONS, CORE_ATEN])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "mask": {"attn_mask": torch.tensor([[True, False, True, False, True, True], [False] * 6] * 3)},  # rows of nothing
    "added": {"attn_mask": torch.linspace(-2, 2, 36).reshape(6, 6)},
}


def gradients(options: dict[str, Any], *, rows_first: bool) -> Callable[[Tensor, Tensor], Any]:
    def run(query: Tensor, key: Tensor) -> Any:
        given = [one.detach().requires_grad_() for one in (query, key)]
        turned = [one.transpose(1, 2) for one in given] if rows_first else given
        found = scaled_dot_product_attention(turned[0], turned[1], turned[1].sin(), **options)
        return found, torch.autograd.grad(found.square().sum(), given)

    return run


@pytest.mark.every(5)
@on_each_route
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_attention(name: str, rows_first: bool, route: Route) -> None:
    """Taken apart to core ATen they were thousands off: torch gives another second result than its backward reads."""
    run = gradients(CALLS[name], rows_first=rows_first)
    query, key = torch.randn(2, 6, 6, 4), torch.randn(2, 6, 6, 4)
    called = route(capture(run, (query, key)))
    torch.testing.assert_close(called(query, key), run(query, key), rtol=1e-4, atol=1e-5)


@on_each_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_attention_with_16_bits(dtype: torch.dtype, route: Route) -> None:
    run = gradients({"is_causal": True}, rows_first=False)
    query, key = torch.randn(1, 2, 6, 4, dtype=dtype), torch.randn(1, 2, 6, 4, dtype=dtype)
    called = route(capture(run, (query, key)))
    torch.testing.assert_close(called(query, key), run(query, key), rtol=3e-2, atol=3e-2)


@pytest.mark.every(5)
@on_each_route
def test_steps_of_a_transformer(route: Route) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    other = copy.deepcopy(model)

    steps = [step_of(one, torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)) for one in (model, other)]
    x, reference = torch.randn(3, 5, 8), steps[1]
    called = route(capture(steps[0], (x,)))
    for _ in range(3):
        torch.testing.assert_close(called(x), reference(x), rtol=1e-4, atol=1e-5)
