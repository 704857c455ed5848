"""An export is of the program as a call would run it now: with the state and in the mode that the model has.

Each exporter is asked after a capture, after calls, after another capture, and after changes to the model in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import InputMismatchError, UnsupportedExportError, UnsupportedProgramError, capture
from functionalize._torch import pytree
from tests.support.export_programs import PROGRAMS, made, step_of
from tests.support.routes import JAX, MODULE, ONNX, Route

Program = Callable[..., Any]
on_each_route = pytest.mark.parametrize("route", [MODULE, ONNX, JAX])


class Merging(nn.Module):
    """Adds its low-rank update to its weight at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.merged = nn.Parameter(torch.randn(3, 3)), False
        self.down, self.up = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.merged:
            with torch.no_grad():
                self.weight.add_(self.down @ self.up)
            self.merged = True
        result: Tensor = x @ self.weight
        return result


def _adam() -> Program:
    model = nn.Linear(3, 2)
    return step_of(model, torch.optim.Adam(model.parameters(), lr=0.1))


def _dampened() -> Program:
    model = nn.Linear(3, 2)
    return step_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5))


FIRST_CALLS: dict[str, Callable[[], Program]] = {"merging": Merging, "adam": _adam, "dampened": _dampened}
ALL = (*PROGRAMS, *FIRST_CALLS)
# What the first call does alone is refused where one graph is for each call, before it was made: JAX has two graphs.
REFUSED_BEFORE_A_CALL = {("merging", "module"), ("merging", "onnx"), ("dampened", "module"), ("dampened", "onnx")}


def _made(name: str) -> tuple[Program, Callable[[], tuple[Tensor, ...]]]:
    if name in PROGRAMS:
        return made(name)
    torch.manual_seed(0)
    return FIRST_CALLS[name](), lambda: (torch.randn(4, 3),)


def _leaves(value: Any) -> list[Any]:
    leaves = (leaf for leaf in pytree.tree_leaves(value) if leaf is not None)  # to JAX it is no leaf
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@on_each_route
@pytest.mark.parametrize("history", ["captured", "called", "recaptured", "original-called"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(36)
@pytest.mark.slow(seconds=3)
def test_three_calls_go_on_with_the_state_that_there_is(name: str, history: str, route: Route, tmp_path: Path) -> None:
    program, inputs = _made(name)
    twin, _ = _made(name)
    captured = capture(program, inputs(), on_guard_failure="recapture")
    calls: dict[str, tuple[Program, ...]] = {
        "captured": (),
        "called": (captured, captured),
        "recaptured": (captured,),
        "original-called": (program,),
    }
    for call in calls[history]:
        args = inputs()
        torch.testing.assert_close(_leaves(call(*copy.deepcopy(args))), _leaves(twin(*args)))
    if history == "recaptured":
        for model in (program, twin):
            if isinstance(model, nn.Module):
                model.eval()
    if history == "captured" and (name, route.name) in REFUSED_BEFORE_A_CALL:
        with pytest.raises(UnsupportedExportError, match="first call"):
            route(captured, tmp_path)
        return
    if (name, route) == ("sizes-by-data", JAX):
        with pytest.raises(UnsupportedProgramError, match="of data-dependent size"):
            route(captured, tmp_path)
        return
    run = route(captured, tmp_path)
    for _ in range(3):
        args = inputs()
        given = copy.deepcopy(args)
        want, got = twin(*args), run(*given)
        torch.testing.assert_close(_leaves(got), _leaves(want), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(given, args, rtol=1e-4, atol=1e-5)


class Model(nn.Module):
    """What a model may change between a capture and an export."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.offset: Tensor = nn.Buffer(torch.ones(3))
        self.scale, self.quick = 2.0, True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layers(x)) * self.scale + self.offset
        return y if self.quick else y * 5


def _mode(model: Model) -> None:
    model.eval()


def _submodule(model: Model) -> None:
    model.layers[0] = nn.Linear(3, 3)


def _another_class(model: Model) -> None:
    model.layers[1] = nn.ReLU()


def _number(model: Model) -> None:
    model.scale = 3.0


def _flag(model: Model) -> None:
    model.quick = False


def _buffer(model: Model) -> None:
    model.offset = torch.full((3,), 7.0)


def _buffer_in_place(model: Model) -> None:
    model.offset.fill_(9.0)


def _dtype(model: Model) -> None:
    model.offset = torch.ones(3, dtype=torch.float64)


def _size(model: Model) -> None:
    model.offset = torch.ones(1)


def _hook(model: Model) -> None:
    model.layers[0].register_forward_hook(lambda layer, args, output: output * 2)


def _hook_before(model: Model) -> None:
    model.register_forward_pre_hook(lambda layer, args: (args[0] * 2,))


def _data(model: Model) -> None:
    weight: Any = model.layers[0].weight
    weight.data = weight.data * 2


def _parameter(model: Model) -> None:
    model.layers[0].weight = nn.Parameter(torch.ones(3, 3))


def _frozen(model: Model) -> None:
    model.requires_grad_(False)


def _forward(model: Model) -> None:
    model.forward = lambda x: x * 100  # type: ignore[method-assign]


# Whether a call, and so an export, follows; else both refuse, where they are not to be captured again.
CHANGES: dict[Callable[[Model], None], bool] = {
    _mode: False,
    _submodule: True,
    _another_class: False,
    _number: True,
    _flag: False,
    _buffer: True,
    _buffer_in_place: True,
    _dtype: False,
    _size: False,
    _hook: False,
    _hook_before: False,
    _data: True,
    _parameter: True,
    _frozen: True,
    _forward: False,
}


@on_each_route
@pytest.mark.parametrize("on_guard_failure", ["raise", "recapture"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.every(8)
@pytest.mark.slow(seconds=2)
def test_what_changed_since_the_capture_is_followed_or_refused(
    change: Callable[[Model], None], on_guard_failure: Any, route: Route, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 3)
    twin = copy.deepcopy(model)
    captured = capture(model, (x,), on_guard_failure=on_guard_failure)
    for changed in (model, twin):
        torch.manual_seed(1)
        change(changed)
    if on_guard_failure == "raise" and not CHANGES[change]:
        for refused in (lambda: captured(x), lambda: route(captured, tmp_path)):
            with pytest.raises(InputMismatchError, match="when the program was captured"):
                refused()
        return
    run = route(captured, tmp_path)
    for _ in range(2):
        torch.testing.assert_close(_leaves(run(x)), _leaves(twin(x)), rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.slow
def test_the_advice_to_call_once_and_export_then() -> None:
    """What a refusal says when the first call does something else: follow it, on each route to JAX and torch."""
    model = Merging()
    twin = copy.deepcopy(model)
    captured = capture(model, (torch.ones(2, 3),))
    with pytest.raises((UnsupportedExportError, UnsupportedProgramError), match="call"):
        captured.to_exported_program()
    x = torch.randn(2, 3)
    torch.testing.assert_close(captured(x), twin(x))
    torch.testing.assert_close(captured.to_exported_program().module()(x), twin(x))


def test_sparse_arguments_are_refused_in_the_exporters_words() -> None:
    captured = capture(lambda x: x.to_dense() * 2, (torch.eye(3).to_sparse(),))
    for route in (captured.to_jax, captured.to_exported_program):
        with pytest.raises((UnsupportedExportError, UnsupportedProgramError)):
            route()


@on_each_route
@pytest.mark.filterwarnings("ignore::functionalize.DecisionsAssertedWarning")
def test_a_capture_for_the_export_takes_the_branches_of_the_last_call(route: Route, tmp_path: Path) -> None:
    def grown(x: Tensor) -> Tensor:
        while x.sum() < 8:
            x = x * 2
        return x

    with torch.no_grad():
        captured = capture(grown, (torch.ones(2),))
    torch.testing.assert_close(route(captured, tmp_path)(torch.ones(2)), grown(torch.ones(2)))
