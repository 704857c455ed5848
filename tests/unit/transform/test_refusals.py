"""What no functional program can express is refused by name, with the line of the program, the reason and a way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, capture, functionalize
from tests.support.graphs import REMOVES


def running_sum_of_positions_that_share_elements(x: Tensor) -> Tensor:
    y = x + 1
    y.unfold(0, 3, 2).cumsum_(0)
    return y


def write_to_the_values_of_a_sparse_tensor(x: Tensor) -> Tensor:
    sparse = x.diag().to_sparse()
    sparse._values().add_(1)
    return sparse.to_dense()


WHOLE = torch.arange(7.0)
REFUSED = [
    pytest.param(
        running_sum_of_positions_that_share_elements, (WHOLE,), "fake", "depends", id="shared elements, traced"
    ),
    pytest.param(write_to_the_values_of_a_sparse_tensor, (WHOLE,), "real", "sparse", id="sparse, traced"),
]


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.parametrize(("func", "inputs", "mode", "reason"), REFUSED)
def test_refused(func: Callable[..., Any], inputs: tuple[Tensor, ...], mode: Any, reason: str, remove: str) -> None:
    pure = functionalize(func, remove=remove)
    call = pure if mode is None else make_fx(pure, tracing_mode=mode)
    with pytest.raises(UnsupportedMutationError) as raised:
        call(*inputs)
    _, place, why, way_out = str(raised.value).split("\n    ")
    assert re.match(r"at   .*test_refusals\.py:\d+ in", place)
    assert why.startswith("why  ") and reason in why
    assert way_out.startswith("try  ")


def test_sparse_values_are_written_in_direct_use() -> None:
    assert torch.equal(functionalize(write_to_the_values_of_a_sparse_tensor)(torch.ones(3)), 2 * torch.eye(3))


@pytest.mark.parametrize("op", [torch.amax, torch.amin])
def test_an_out_of_another_dtype_is_refused_as_in_eager(op: Callable[..., Any]) -> None:
    """Fake kernels of these write a result of any dtype."""
    x, out = torch.arange(8, dtype=torch.int32).view(2, 4), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="dtype for input and out to match"):
        op(x, 0, out=out)
    with pytest.raises(RuntimeError, match="dtype for input and out to match"):
        capture(lambda x, out: op(x, 0, out=out), (x, out))
    total = capture(lambda x, out: torch.sum(x, 0, dtype=torch.int64, out=out), (x, out))
    assert torch.equal(total(x, out), x.sum(0))
