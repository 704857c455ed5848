"""Exceptions, recursion, threads, and what a call leaves behind: no mode, no attribute, no tensor."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as mode_stack

from benchmarks import memory
from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES

EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)


def run(func: Any, x: Tensor, mode: Any, remove: str) -> Any:
    pure = functionalize(func, remove=remove)
    return pure(x) if mode is None else make_fx(pure, tracing_mode=mode)(x)


# Exceptions


@WHILE
@EITHER
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_leaves_what_eager_leaves(error: type[BaseException], mode: Any, remove: str) -> None:
    def f(x: Tensor) -> None:
        x[0].add_(1)
        x.t().mul_(2)
        raise error("mine")

    before, x = list(mode_stack()), torch.ones(2, 2)
    with pytest.raises(error, match="mine"):
        run(f, x, mode, remove)
    assert list(mode_stack()) == before
    assert x.__dict__ == {}
    # Fake modes do not run the function on the input.
    assert x.tolist() == ([[4.0, 4.0], [2.0, 2.0]] if mode in (None, "real") else [[1.0, 1.0], [1.0, 1.0]])
    assert torch.equal(functionalize(memory.program)(x.new_ones(4, 8)), memory.program(x.new_ones(4, 8)))


@WHILE
@EITHER
def test_an_exception_that_is_caught_inside(mode: Any, remove: str) -> None:
    def fails(x: Tensor) -> None:
        x[0].add_(1)
        raise ValueError

    def f(x: Tensor) -> Tensor:
        try:
            functionalize(fails, remove=remove)(x)
        except ValueError:
            x.mul_(2)
        return x * 1

    assert_equivalent(f, torch.ones(2, 2), remove=remove, tracing_mode=mode)


@EITHER
def test_an_operator_that_is_refused_and_caught(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        try:
            y[0].add_(torch.ones(7))
        except RuntimeError:
            y.mul_(2)
        try:
            y.view(-1).add_(torch.ones(4, dtype=torch.complex64))
        except RuntimeError:
            y[1].add_(1)
        return y

    assert_equivalent(f, torch.ones(2, 2), remove=remove)


@EITHER
def test_recursion_without_end(remove: str) -> None:
    def f(x: Tensor) -> Any:
        x.add_(1)
        return f(x)

    before = list(mode_stack())
    with pytest.raises(RecursionError):
        functionalize(f, remove=remove)(torch.ones(2))
    assert list(mode_stack()) == before


# Re-entry


@WHILE
@EITHER
def test_recursion_through_ourselves(mode: Any, remove: str) -> None:
    def descend(x: Tensor, depth: int) -> Any:
        if depth == 0:
            return x.add_(1)
        y = functionalize(descend, remove=REMOVES[depth % 2])(x.t(), depth - 1)
        x[0].mul_(2)
        return y

    def f(x: Tensor) -> Any:
        return descend(x, 4)

    assert_equivalent(f, torch.ones(2, 3), remove=remove, tracing_mode=mode)


@EITHER
def test_a_generator_that_goes_on_after_the_call(remove: str) -> None:
    def f(x: Tensor) -> Iterator[Tensor]:
        y = x * 1
        y[0].add_(1)

        def rows() -> Iterator[Tensor]:
            yield y[0].clone()
            y.add_(1)
            yield y

        return rows()

    for ours, eager in zip(functionalize(f, remove=remove)(torch.ones(2, 2)), f(torch.ones(2, 2)), strict=True):
        assert torch.equal(ours, eager)


@EITHER
def test_threads(remove: str) -> None:
    """Many at once in direct use, while one traces: `make_fx` itself serves one thread at a time."""
    failures: list[Any] = []

    def work(number: int, mode: Any) -> None:
        def f(x: Tensor) -> Tensor:
            y = x * number
            y[0].add_(number)
            y.view(-1)[1:].mul_(2)
            x.add_(1)
            return y

        try:
            for _ in range(5):
                assert_equivalent(f, torch.ones(3, 2), remove=remove, tracing_mode=mode)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number, "fake" if number == 0 else None)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# What is left behind


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@WHILE
@EITHER
@pytest.mark.slow
def test_nothing_passed_or_made_is_kept_alive(mode: Any, remove: str) -> None:
    run(memory.program, torch.ones(4, 8), mode, remove)  # torch keeps the frames of an op's first call
    x = torch.ones(4, 8)
    out = run(memory.program, x, mode, remove)
    references = [weakref.ref(x)] + ([weakref.ref(out)] if mode is None else [])
    del x, out
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.usefixtures("no_collector")
@EITHER
@pytest.mark.slow
def test_intermediates_die_while_the_function_runs(remove: str) -> None:
    alive: list[int] = []

    def f(x: Tensor) -> Tensor:
        storages = []
        for _ in range(4):
            y = x * 2
            y[0].add_(1)
            y.view(-1).mul_(2)
            storages.append(weakref.ref(y))
            del y
            alive.append(sum(storage() is not None for storage in storages))
        return x + 1

    functionalize(f, remove=remove)(torch.ones(2, 3))
    assert alive == [0] * 4


@pytest.mark.usefixtures("no_collector")
@EITHER
@pytest.mark.slow
def test_modules_are_not_kept_alive(remove: str) -> None:
    def call() -> list[weakref.ref[Any]]:
        module = nn.BatchNorm1d(3)
        functionalize(module, remove=remove)(torch.ones(4, 3))
        return [weakref.ref(module), weakref.ref(module.weight), *map(weakref.ref, module.buffers())]

    call()
    assert [reference() for reference in call()] == [None] * 5


@pytest.mark.usefixtures("no_collector")
@EITHER
@pytest.mark.slow
def test_an_exception_keeps_nothing_alive(remove: str) -> None:
    def fails(x: Tensor) -> None:
        x[0].add_(1)
        raise KeyError

    def call() -> weakref.ref[Tensor]:
        x = torch.ones(2, 2)
        try:
            functionalize(fails, remove=remove)(x)
        except KeyError:
            return weakref.ref(x)
        raise AssertionError("the exception was lost")

    call()
    assert call()() is None


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("mode", memory.MODES[:3], ids=str)
def test_memory_stays_flat(mode: Any) -> None:
    """As many objects more as `make_fx` leaves behind by itself, and a few: caches that fill up."""
    traces = 60
    _, plain, _ = memory.growth(memory.program, mode, traces)
    _, ours, outlives = memory.growth(functionalize(memory.program), mode, traces)
    assert ours - plain < 2 * traces and not outlives
