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


def row(cache: Cache, x: Tensor) -> Tensor:
    cache.rows[:, cache.position] = x[:, 0]
    cache.position += 1
    return cache.rows * 1


def rows_at_both_ends(cache: Cache, x: Tensor) -> Tensor:
    cache.rows[:, -cache.position].add_(x[:, 0])
    return row(cache, x)


def trained(cache: Cache, x: Tensor) -> Tensor:
    weight = x.detach().requires_grad_()
    return torch.autograd.grad((append(cache, x) * weight).square().sum(), weight)[0]


STEPS: dict[str, Step] = {
    "given": append,
    "summed": lambda cache, x: append(cache, x).sum(1),
    "in place": prefix_in_place,
    "window": window,
    "rest": rest,
    "row": row,
    "rows at both ends": rows_at_both_ends,
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


def in_jax(program: Any) -> Callable[..., Any]:
    """A program in JAX on torch's tensors, which goes on from the state that the call before left."""
    import jax

    step = program.to_jax()
    states = [step.initial_state]

    def run(*args: Tensor) -> Any:
        states[0], outputs = step(states[0], *(jax.numpy.asarray(arg.numpy()) for arg in args))
        return pytree.tree_map(
            lambda one: torch.from_numpy(jax.device_get(one).copy()), getattr(outputs, "returned", outputs)
        )

    return run


@pytest.mark.every(5)
@pytest.mark.parametrize("name", STEPS)
def test_two_captures(name: str) -> None:
    ours, twin = Cache(STEPS[name]), Cache(STEPS[name])
    program = capture(ours, (torch.ones(2, 1, 4),), on_guard_failure="recapture")
    assert_equal_calls(program, twin, strict=True)
    torch.testing.assert_close(ours.rows, twin.rows)
    assert ours.position == twin.position
    assert len(program.variants) <= 2


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("to", "name"),
    [
        ("jax", "row"),
        *(("module", name) for name in STEPS),
        *(("onnx", name) for name in ("given", "in place", "rows at both ends", "attended", "trained")),
    ],
)
def test_exported(to: str, name: str, tmp_path: Path) -> None:
    program, twin = capture(Cache(STEPS[name]), (torch.ones(2, 1, 4),)), Cache(STEPS[name])
    if to == "module":
        assert_equal_calls(program.to_exported_program().module(), twin, strict=False)
        return
    if to == "jax":
        pytest.importorskip("jax")
        assert_equal_calls(in_jax(program), twin, strict=False)
        return
    pytest.importorskip("onnxruntime")
    from functionalize.backends import onnx

    assert_equal_calls(onnx.load(program.to_onnx(tmp_path / "program.onnx")), twin, strict=False)


def written(rows: Tensor, x: Tensor, at: Tensor) -> Tensor:
    rows = rows.clone()
    rows[at] = x
    return rows


def added(rows: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.clone()
    rows[:, at] += x
    rows[at, at] = 7
    return rows, rows[at]


def selected(rows: Tensor, x: Tensor, at: Any) -> Tensor:
    rows = rows.clone()
    rows.select(1, at.item()).mul_(2)
    rows[at.item()].add_(x)
    return rows


@pytest.mark.every(5)
@pytest.mark.parametrize("to", ["decide", "raise", "jax", "onnx"])
@pytest.mark.parametrize("write", [written, added, selected])
def test_positions_of_either_sign(write: Callable[..., Any], to: Any, tmp_path: Path) -> None:
    rows, x = torch.randn(4, 4), torch.randn(4)
    program = capture(write, (rows, x, torch.tensor(2)), on_data="raise" if to == "raise" else "decide")
    run: Callable[..., Any] = program
    if to == "jax":
        pytest.importorskip("jax")
        run = in_jax(program)
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        from functionalize.backends import onnx

        run = onnx.load(program.to_onnx(tmp_path / "program.onnx"))
    for at in map(torch.tensor, (1, -1, -4, 3)):
        for one, other in zip(*(pytree.tree_leaves(call(rows, x, at)) for call in (run, write)), strict=True):
            assert torch.equal(one, other)
    assert len(program.variants) == 1
    if to in ("decide", "raise"):
        for at in map(torch.tensor, (4, -5)):
            with pytest.raises(IndexError, match="out of range"):
                run(rows, x, at)
