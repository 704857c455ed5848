"""What no functional program can express is refused by name, with the line of the program, the reason and a way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import UnsupportedMutationError, functionalize
from tests.graphs import REMOVES


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
    pytest.param(running_sum_of_positions_that_share_elements, (WHOLE,), "fake", "share", id="shared elements, traced"),
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
