"""Captured training steps: optimizers with schedulers, stepped inside of the step and between its calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as schedulers

from functionalize import capture

FEW, CALLS = 3, 8
_NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"lr": 0.1}) for name in (*_NAMES, "Muon")},
    **{f"{name}-foreach": (name, {"lr": 0.1, "foreach": True}) for name in _NAMES},
    "SGD-dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam-amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01}),
}
# A float that Python or a kernel must know makes a variant for each value.
BY_VALUE = {
    **{f"{name}-fused": (name, {"lr": 0.1, "fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")},
    "Adafactor": ("Adafactor", {"lr": 0.1}),
}
Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Schedule] = {
    "LambdaLR": lambda one: schedulers.LambdaLR(one, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda one: schedulers.MultiplicativeLR(one, lambda epoch: 0.95),
    "StepLR": lambda one: schedulers.StepLR(one, 3, 0.5),
    "ConstantLR": lambda one: schedulers.ConstantLR(one, 0.5, 3),
    "LinearLR": lambda one: schedulers.LinearLR(one, 0.5, 1.0, 4),
    "ExponentialLR": lambda one: schedulers.ExponentialLR(one, 0.9),
    "PolynomialLR": lambda one: schedulers.PolynomialLR(one, 6, 2.0),
    "CyclicLR": lambda one: schedulers.CyclicLR(one, 0.01, 0.2, 2, cycle_momentum=False),
    "ChainedScheduler": lambda one: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(one, 0.5, 2), schedulers.ExponentialLR(one, 0.9)], one
    ),
}
# Inside they ask for values: `math.cos`, a dict of milestones, `float(loss)`.
BETWEEN: dict[str, Schedule] = {
    "MultiStepLR": lambda one: schedulers.MultiStepLR(one, [2, 5], 0.5),
    "CosineAnnealingLR": lambda one: schedulers.CosineAnnealingLR(one, 5),
    "OneCycleLR": lambda one: schedulers.OneCycleLR(one, 0.2, total_steps=20),
}


def _world(optimizer: str, schedule: Schedule, inside: bool) -> tuple[Callable[[Tensor], Tensor], Any, Any, Any]:
    """A step of two groups and a parameter without gradient, and what it changes."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Tanh(), torch.nn.Linear(4, 1, bias=False))
    kind, options = (OPTIMIZERS | BY_VALUE)[optimizer]
    first, last = module.parameters()
    idle = torch.nn.Parameter(torch.ones(2, 2))
    groups: list[dict[str, Any]] = [{"params": [first, idle]}, {"params": [last], "lr": 0.05}]
    made = getattr(torch.optim, kind)(groups, **options)
    scheduler = schedule(made)

    def step(x: Tensor) -> Tensor:
        made.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        made.step()
        if inside:
            scheduler.step()
        found: Tensor = loss.detach()
        return found

    return step, module, made, scheduler


def _state(world: Any) -> list[Any]:
    """The leaves of what a world holds; functions left out."""
    leaves, _ = torch.utils._pytree.tree_flatten([one.state_dict() for one in world[1:]])
    return [leaf for leaf in leaves if isinstance(leaf, (Tensor, int, float))]


def captures_of(optimizer: str, schedule: Schedule, inside: bool) -> int:
    """How many captures some calls took; they are held against eager."""
    warnings.simplefilter("ignore")
    mine, eager = (_world(optimizer, schedule, inside) for _ in range(2))
    batches = [torch.randn(5, 3) for _ in range(CALLS)]
    program, made = capture(mine[0], (batches[0],), cache_size=CALLS), 1
    recapture = program._recapture

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return recapture(*args, **kwargs)

    program._recapture = counted
    for batch in batches:
        torch.testing.assert_close(_state(mine), _state(eager), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(program(batch), eager[0](batch), rtol=1e-6, atol=1e-6)
        if not inside:
            mine[3].step(), eager[3].step()
    torch.testing.assert_close(_state(mine), _state(eager), rtol=1e-6, atol=1e-6)
    return made


@pytest.mark.parametrize("scheduler", ["ExponentialLR", "StepLR"])
@pytest.mark.parametrize("optimizer", ["SGD-dampening", "AdamW-foreach", "NAdam"])
def test_a_schedule_needs_few_captures(optimizer: str, scheduler: str) -> None:
    assert captures_of(optimizer, SCHEDULERS[scheduler], inside=False) <= FEW


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer(optimizer: str) -> None:
    assert captures_of(optimizer, SCHEDULERS["ExponentialLR"], inside=False) <= FEW


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", BY_VALUE)
def test_each_optimizer_that_asks_for_values(optimizer: str) -> None:
    assert captures_of(optimizer, SCHEDULERS["ExponentialLR"], inside=False)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS | BETWEEN)
def test_each_scheduler_between_calls(scheduler: str) -> None:
    assert captures_of("Adam", (SCHEDULERS | BETWEEN)[scheduler], inside=False) <= FEW


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_scheduler_inside(scheduler: str) -> None:
    assert captures_of("SGD", SCHEDULERS[scheduler], inside=True) <= FEW
