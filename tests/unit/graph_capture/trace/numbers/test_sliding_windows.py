"""Counters of Python's that a program keeps, and computes positions of: caches with a window, rings, masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from functionalize import capture

Tensor = torch.Tensor
WINDOW = 2
CALLS = 5


class Cache(torch.nn.Module):
    """Keys of the calls so far, and how many there were; ``attend`` gives what a call reads of them."""

    keys: Tensor

    def __init__(self, attend: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.length, self.read = attend, 0, 0
        self.register_buffer("keys", torch.zeros(2, 12, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self, x)

    def write(self, x: Tensor) -> None:
        self.keys[:, self.length : self.length + 1] = x
        self.length += 1


def attention(x: Tensor, keys: Tensor) -> Tensor:
    return torch.softmax(x @ keys.transpose(1, 2), -1) @ keys


def last_ones(cache: Cache, x: Tensor) -> Tensor:
    cache.write(x)
    return attention(x, cache.keys[:, max(cache.length - WINDOW, 0) : cache.length])


def rolled(cache: Cache, x: Tensor) -> Tensor:
    cache.keys = cache.keys.roll(1, 1)
    cache.keys[:, :1] = x
    cache.length += 1
    return attention(x, cache.keys[:, : min(cache.length, WINDOW)])


def ring(cache: Cache, x: Tensor) -> Tensor:
    cache.keys[:, cache.length % WINDOW] = x[:, 0]
    cache.length += 1
    return attention(x, cache.keys[:, : min(WINDOW, cache.length)])


def two_counters(cache: Cache, x: Tensor) -> Tensor:
    cache.write(x)
    cache.read = max(cache.read, cache.length - WINDOW)
    return attention(x, cache.keys[:, cache.read : cache.length])


def of_several(cache: Cache, x: Tensor) -> Tensor:
    cache.write(x)
    start = max([cache.length - WINDOW, cache.read, 0])
    end = min(number for number in (cache.length, 12))
    return cache.keys[:, start:end].sum(1) + x.sum(1)


def clamped(cache: Cache, x: Tensor) -> Tensor:
    cache.length += 1
    count = max(1, min(cache.length - 1, WINDOW))
    return (cache.keys[:, :count] + x).sum(1) / count


def masked(cache: Cache, x: Tensor) -> Tensor:
    cache.write(x)
    places = torch.arange(12)
    seen = (places < cache.length) & (places >= max(0, cache.length - WINDOW))
    return torch.softmax((x @ cache.keys.transpose(1, 2)).masked_fill(~seen, -torch.inf), -1) @ cache.keys


def masked_by_a_ring(cache: Cache, x: Tensor) -> Tensor:
    place = cache.length % WINDOW
    cache.keys[:, place : place + 1] = x
    cache.length += 1
    seen = torch.arange(12) < min(cache.length, WINDOW)
    return torch.softmax((x @ cache.keys.transpose(1, 2)).masked_fill(~seen, -torch.inf), -1) @ cache.keys


def distant(cache: Cache, x: Tensor) -> Tensor:
    cache.length += 1
    distance = abs(cache.length - WINDOW)
    return x * distance + cache.keys[:, distance : distance + 1]


def in_pages(cache: Cache, x: Tensor) -> Tensor:
    page = cache.length // WINDOW
    cache.keys[:, page] += x[:, 0]
    cache.length += 1
    return cache.keys * (page + 1)


SIZES_DIFFER = {f.__name__: f for f in (last_ones, rolled, ring, two_counters, of_several, clamped)}
SIZES_STAY = {f.__name__: f for f in (masked, masked_by_a_ring, distant)}
PROGRAMS = SIZES_DIFFER | SIZES_STAY | {"in_pages": in_pages}


def _calls() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 1, 4) for _ in range(CALLS)]


def _check(name: str, run: Callable[[Tensor], Any]) -> None:
    original = Cache(PROGRAMS[name])
    for x in _calls():
        expected = original(x)
        torch.testing.assert_close(torch.as_tensor(run(x)), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_go_beyond_the_window(name: str) -> None:
    module = Cache(PROGRAMS[name])
    _check(name, capture(module, (_calls()[0],)))
    assert type(module.length) is int and module.length == CALLS


@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_programs_go_beyond_the_window(name: str) -> None:
    _check(name, capture(Cache(PROGRAMS[name]), (_calls()[0],)).to_exported_program().module())


@pytest.mark.parametrize("name", ["last_ones", "of_several", "masked_by_a_ring"])
def test_files_go_beyond_the_window(name: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("functionalize.backends.onnx")
    pytest.importorskip("onnxruntime")
    _check(name, onnx.load(capture(Cache(PROGRAMS[name]), (_calls()[0],)).to_onnx(tmp_path / "cache.onnx")))


@pytest.mark.parametrize("name, compiled", [("masked", True), ("masked_by_a_ring", False), ("distant", False)])
def test_jax_goes_beyond_the_window(name: str, compiled: bool) -> None:
    jnp = pytest.importorskip("jax.numpy")
    program = capture(Cache(PROGRAMS[name]), (_calls()[0],)).to_jax()
    step, states = program.jit() if compiled else program, [program.initial_state]

    def run(x: Tensor) -> Tensor:
        state, result = step(states[-1], jnp.asarray(x.numpy()))
        states.append(state)
        return torch.from_numpy(result.__array__().copy())

    _check(name, run)


@pytest.mark.parametrize("name", ["last_ones", "clamped"])
def test_jax_says_that_sizes_differ(name: str) -> None:
    pytest.importorskip("jax")
    with pytest.raises(RuntimeError, match="data-dependent size"):
        capture(Cache(PROGRAMS[name]), (_calls()[0],)).to_jax()
