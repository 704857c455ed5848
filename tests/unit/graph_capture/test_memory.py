"""What a captured program holds: neither its example inputs nor what traced it; captures and calls leave nothing."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize._torch.fakes import FakeFactory
from functionalize.graph_capture import recording, session
from functionalize.tracing.fakeify import fakes_of
from functionalize.transform.context import FunctionalizationContext


def row_and_view(x: Tensor, y: Tensor) -> Any:
    x[0].add_(y)
    z = x * 2
    return z.t(), z[0], x[1]


def differentiable(x: Tensor, y: Tensor) -> Any:
    z = (x * y.detach().requires_grad_()).sin()
    return z.t(), z.sum()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        self.last: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.body(x) + y
        return out.relu_()


def moved(x: Tensor, y: Tensor) -> Tensor:
    x.t_()
    y.set_(y.clone())  # type: ignore[call-overload]
    return x + 1


PROGRAMS: list[Callable[[], Callable[..., Any]]] = [lambda: row_and_view, lambda: differentiable, Net, lambda: moved]
NAMES = ["row_and_view", "differentiable", "Net", "moved"]


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 3), torch.randn(3)


@pytest.mark.parametrize("make", PROGRAMS, ids=NAMES)
@pytest.mark.slow
def test_a_program_holds_nothing_of_its_capture(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    def seen(kind: Any) -> None:
        begin = kind.__init__

        def noted(self: Any, *args: Any, **kwargs: Any) -> None:
            made.append(weakref.ref(self))
            begin(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", noted)

    for kind in (FakeFactory, FunctionalizationContext, recording.RecordingSession):
        seen(kind)

    def converted(*args: Any) -> Any:
        fakes = fakes_of(*args)
        made.extend(map(weakref.ref, fakes.values()))
        return fakes

    monkeypatch.setattr(session, "fakes_of", converted)
    func, given = make(), inputs()
    made.extend(map(weakref.ref, given))
    program = capture(func, given)
    del given
    gc.collect()
    assert len(made) >= 7
    assert [type(alive).__name__ for ref in made if (alive := ref()) is not None] == []
    results = program(*inputs())
    assert program.mutations is not None and program.alias_history.bases is not None and results is not None


@pytest.mark.slow
def test_intermediates_die_with_the_run() -> None:
    made: SimpleQueue[Any] = SimpleQueue()  # a list would be put back as it was

    def run(x: Tensor) -> Tensor:
        y = x + 1
        y[0].add_(1)
        z = y.view(-1) * 2
        for traced in (x, y, z):
            made.put(weakref.ref(traced))
        return z.sum()

    program = capture(run, (torch.ones(3),))
    gc.collect()
    assert not any(made.get()() for _ in range(3))
    assert program(torch.ones(3)) == 14


def test_no_garbage_is_collected_while_a_program_is_captured() -> None:
    """A finalizer of an object that the program does not know would run among its ops."""
    buffer, objects = torch.zeros(3), 500_000  # enough for a collection of old objects

    class Finalized:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            buffer.add_(1)

    def allocating(x: Tensor) -> tuple[Tensor, int]:
        return (x + buffer).sin(), len([[] for _ in range(objects)])

    capture(allocating, (torch.ones(3),))
    garbage = Finalized()
    gc.collect()  # it is old from now on
    del garbage
    program = capture(allocating, (torch.ones(3),))
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.add.Tensor,
        torch.ops.aten.sin.default,
    ]
    assert gc.isenabled()
    gc.collect()
    assert torch.equal(buffer, torch.ones(3))


@pytest.mark.slow(seconds=40)
@pytest.mark.every(4)
@pytest.mark.parametrize("make", PROGRAMS, ids=NAMES)
def test_captures_and_calls_leave_no_growth(make: Callable[..., Any]) -> None:
    """A thousand of them; tensors that live afterwards, and Python objects."""
    func = make()

    def step() -> None:
        results = capture(func, inputs())(*inputs())
        leaves = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        if leaves:
            torch.stack([leaf.sum() for leaf in leaves]).sum().backward()
        if isinstance(func, torch.nn.Module):
            func.zero_grad()

    def living() -> tuple[int, int]:
        linecache.clearcache()  # FX keeps the text of each graph that ran, to show it in tracebacks
        gc.collect()
        objects = gc.get_objects()
        return sum(issubclass(type(thing), Tensor) for thing in objects), len(objects)

    for _ in range(20):
        step()
    before = living()
    for _ in range(250):
        step()
    after = living()
    assert after[0] <= before[0] + 5 and after[1] <= before[1] + 1000
