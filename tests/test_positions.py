"""Caches whose position is a number of Python's: parts up to it, from it, around it, read and written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils import _pytree as pytree

from functionalize import capture

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # of torch's, about its own specs
Step = Callable[["Cache", Tensor], Any]


class Cache(torch.nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.rows = torch.nn.Buffer(torch.linspace(-1, 1, 96).view(2, 12, 4))
        self.position, self.step = 2, step

    def forward(self, x: Tensor) -> Any:
        return self.step(self, x)


def append(cache: Cache, x: Tensor) -> Tensor:
    """Write one row, and give those so far."""
    cache.rows[:, cache.position : cache.position + 1] = x
    cache.position += 1
    return cache.rows[:, : cache.position]


def prefix_in_place(cache: Cache, x: Tensor) -> Tensor:
    append(cache, x).mul_(1.5)
    cache.rows[:, : cache.position][:, 1:].add_(x)
    return cache.rows[:, -cache.position :].sum(1)


def window(cache: Cache, x: Tensor) -> Tensor:
    append(cache, x)
    return cache.rows[:, cache.position - 2 : cache.position] * 2


def rest(cache: Cache, x: Tensor) -> Tensor:
    cache.rows[:, cache.position :] *= 2
    cache.rows[:, -cache.position :] -= x
    cache.position += 2
    return cache.rows.clone()


def swapped(cache: Cache, x: Tensor) -> Tensor:
    cache.position += 1
    cache.rows[:, : cache.position].copy_(cache.rows[:, -cache.position :].flip(1) + x)
    return cache.rows.view(2, 6, 2, 4)[:, : cache.position - 2][:, :, 0].mul_(2).sum(1)


def attended(cache: Cache, x: Tensor) -> Tensor:
    keys = append(cache, x)
    seen = torch.ones(1, cache.position, dtype=torch.bool)
    return attention(x, keys, cache.rows[:, : cache.position], attn_mask=seen)


def trained(cache: Cache, x: Tensor) -> Tensor:
    weight = x.detach().requires_grad_()
    return torch.autograd.grad((append(cache, x) * weight).square().sum(), weight)[0]


STEPS: dict[str, Step] = {
    "given": append,
    "summed": lambda cache, x: append(cache, x).sum(1),
    "in place": prefix_in_place,
    "window": window,
    "rest": rest,
    "swapped": swapped,
    "attended": attended,
    "trained": trained,
    "split": lambda cache, x: [
        part + append(cache, x).sum() for part in cache.rows.split([cache.position, 12 - cache.position], 1)
    ],
}


def assert_equal_calls(run: Callable[..., Any], twin: Cache, strict: bool) -> None:
    torch.manual_seed(0)
    for _ in range(4):
        x = torch.randn(2, 1, 4)
        for one, other in zip(*map(pytree.tree_leaves, (run(x), twin(x))), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            assert not strict or one.stride() == other.stride()


@pytest.mark.parametrize("name", STEPS)
def test_two_captures(name: str) -> None:
    ours, twin = Cache(STEPS[name]), Cache(STEPS[name])
    program = capture(ours, (torch.ones(2, 1, 4),), on_guard_failure="recapture")
    assert_equal_calls(program, twin, strict=True)
    torch.testing.assert_close(ours.rows, twin.rows)
    assert ours.position == twin.position
    assert len(program.variants) <= 2


@pytest.mark.parametrize(
    ("to", "name"),
    [*(("module", name) for name in STEPS), *(("onnx", name) for name in ("given", "in place", "attended", "trained"))],
)
def test_exported(to: str, name: str, tmp_path: Path) -> None:
    program, twin = capture(Cache(STEPS[name]), (torch.ones(2, 1, 4),)), Cache(STEPS[name])
    if to == "module":
        assert_equal_calls(program.to_exported_program().module(), twin, strict=False)
        return
    pytest.importorskip("onnxruntime")
    from functionalize.backends import onnx

    assert_equal_calls(onnx.load(program.to_onnx(tmp_path / "program.onnx")), twin, strict=False)
