"""Captured training steps: optimizers with schedulers, stepped inside of the step and between its calls."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from functionalize import capture

FEW, CALLS = 3, 8
_NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"lr": 0.1}) for name in (*_NAMES, "Muon", "Adafactor")},
    **{f"{name}-foreach": (name, {"lr": 0.1, "foreach": True}) for name in _NAMES},
    "SGD-dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "RMSprop-centered": ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.9}),
    "NAdam-decoupled": ("NAdam", {"lr": 0.1, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "Adam-amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01}),
}
OPTIMIZERS |= {f"{name}-fused": (name, {"lr": 0.1, "fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")}
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
    "CosineAnnealingLR": lambda one: schedulers.CosineAnnealingLR(one, 20),
    "CosineAnnealingWarmRestarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 5),
    "OneCycleLR": lambda one: schedulers.OneCycleLR(one, 0.2, total_steps=20, cycle_momentum=False),
}
SCHEDULERS["MultiStepLR"] = lambda one: schedulers.MultiStepLR(one, [2, 5, 5], 0.5)
SCHEDULERS["ChainedScheduler-tuple"] = lambda one: schedulers.ChainedScheduler(
    (schedulers.ConstantLR(one, 0.5, 2), schedulers.ExponentialLR(one, 0.9))
)
SCHEDULERS["ReduceLROnPlateau"] = lambda one: schedulers.ReduceLROnPlateau(one)
SCHEDULERS |= {  # which go more than three ways in eight steps
    "SequentialLR": lambda one: schedulers.SequentialLR(
        one, [schedulers.ConstantLR(one, 0.5, 5), schedulers.ExponentialLR(one, 0.9)], milestones=[5]
    ),
    "ReduceLROnPlateau-impatient": lambda one: schedulers.ReduceLROnPlateau(one, patience=1),
    "ReduceLROnPlateau-cooldown": lambda one: schedulers.ReduceLROnPlateau(one, patience=0, cooldown=1),
    "ReduceLROnPlateau-least": lambda one: schedulers.ReduceLROnPlateau(one, patience=0, min_lr=0.02),
    "ReduceLROnPlateau-max": lambda one: schedulers.ReduceLROnPlateau(one, "max", patience=1, threshold_mode="abs"),
}


def perceptron() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Tanh(), torch.nn.Linear(4, 1, bias=False))


def _advance(scheduler: Any, loss: Tensor) -> None:
    scheduler.step(*[loss] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else [])


def _world(optimizer: str, schedule: Schedule, inside: bool) -> tuple[Callable[[Tensor], Tensor], Any, Any, Any]:
    """A step of two groups and a parameter without gradient, and what it changes."""
    torch.manual_seed(0)
    module = perceptron()
    kind, options = OPTIMIZERS[optimizer]
    first, last = module.parameters()
    idle = torch.nn.Parameter(torch.ones(2, 2))
    groups: list[dict[str, Any]] = [{"params": [first, idle]}, {"params": [last], "lr": 0.05}]
    made = getattr(torch.optim, kind)(groups, **options)
    scheduler = schedule(made)

    def step(x: Tensor) -> Tensor:
        made.zero_grad()
        loss: Tensor = module(x).square().mean()
        loss.backward()
        made.step()
        if inside:
            _advance(scheduler, loss)
        found: Tensor = loss.detach()
        return found

    return step, module, made, scheduler


def _state(world: Any) -> list[Any]:
    """The leaves of what a world holds; functions left out."""
    leaves, _ = torch.utils._pytree.tree_flatten([one.state_dict() for one in world[1:]])
    return [leaf for leaf in leaves if isinstance(leaf, (Tensor, int, float))]


def captures_of(optimizer: str, schedule: Schedule, inside: bool) -> int:
    """How many captures some calls took; they are held against eager."""
    return captures_of_worlds(lambda: _world(optimizer, schedule, inside), inside)


def captures_of_worlds(make: Callable[[], Any], inside: bool = True) -> int:
    """The same of any worlds: a step, and what it changes, of which the fourth is stepped here unless ``inside``."""
    warnings.simplefilter("ignore")
    mine, eager = make(), make()
    batches = [torch.randn(5, 3) for _ in range(CALLS)]
    program, made = capture(mine[0], (batches[0],), cache_size=CALLS), 1
    recapture = program._specializations.recapture

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return recapture(*args, **kwargs)

    program._specializations.recapture = counted
    for batch in batches:
        torch.testing.assert_close(_state(mine), _state(eager), rtol=1e-6, atol=1e-6)
        got, wanted = program(batch), eager[0](batch)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        if not inside:
            _advance(mine[3], got)
            _advance(eager[3], wanted)
    torch.testing.assert_close(_state(mine), _state(eager), rtol=1e-6, atol=1e-6)
    return made


@pytest.mark.every(5)
@pytest.mark.parametrize("scheduler", ["ExponentialLR", "StepLR"])
@pytest.mark.parametrize("optimizer", ["SGD-dampening", "AdamW-foreach", "NAdam"])
def test_a_schedule_needs_few_captures(optimizer: str, scheduler: str) -> None:
    assert captures_of(optimizer, SCHEDULERS[scheduler], inside=False) <= FEW


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer(optimizer: str) -> None:
    assert captures_of(optimizer, SCHEDULERS["ExponentialLR"], inside=False) <= FEW


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_scheduler_between_calls(scheduler: str) -> None:
    assert captures_of("Adam", SCHEDULERS[scheduler], inside=False) <= FEW


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_scheduler_inside(scheduler: str) -> None:
    assert captures_of("SGD", SCHEDULERS[scheduler], inside=True) <= FEW


@pytest.mark.parametrize("scheduler", ["CosineAnnealingLR", "OneCycleLR"])
def test_closed_forms_inside(scheduler: str) -> None:
    assert captures_of("SGD-fused", SCHEDULERS[scheduler], inside=True) <= FEW


@pytest.mark.parametrize("scheduler", ["ReduceLROnPlateau-cooldown", "SequentialLR"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_schedule_that_goes_many_ways_needs_few_captures(optimizer: str, scheduler: str) -> None:
    assert captures_of(optimizer, SCHEDULERS[scheduler], inside=True) <= FEW


def _step(module: Any, optimizer: Any, scheduler: Any = None, after: Any = lambda: None) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(x).square().mean()
        loss.backward()
        optimizer.step()
        after()
        if scheduler is not None:
            scheduler.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_momentum_that_cycles(kind: str) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        module = perceptron()
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.01)
        if kind == "SGD":
            optimizer.param_groups[0]["momentum"] = 0.9
        scheduler = schedulers.OneCycleLR(optimizer, 0.1, 20)
        return _step(module, optimizer, scheduler), module, optimizer, scheduler

    assert captures_of_worlds(make) <= FEW


@pytest.mark.parametrize("average", ["mean", "one by one", "all at once"])
def test_averaged_models(average: str) -> None:
    utils = torch.optim.swa_utils
    options: dict[str, dict[str, Any]] = {
        "mean": {},
        "one by one": {"avg_fn": utils.get_ema_avg_fn(0.9)},
        "all at once": {"multi_avg_fn": utils.get_ema_multi_avg_fn(0.9)},
    }

    def make() -> Any:
        torch.manual_seed(0)
        module = perceptron()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        averaged = utils.AveragedModel(module, **options[average])
        scheduler = utils.SWALR(optimizer, 0.05, anneal_epochs=20)
        step = _step(module, optimizer, scheduler, lambda: averaged.update_parameters(module))
        return step, module, averaged, optimizer, scheduler

    assert captures_of_worlds(make) <= FEW


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, which initializes nothing of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_without_groups_around_another() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        module = perceptron()
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        wrapped = Wrapped(optimizer)

        def step(x: Tensor) -> Tensor:
            module.zero_grad()
            loss: Tensor = module(x).square().mean()
            loss.backward()
            wrapped.step()
            return loss.detach()

        return step, module, optimizer

    assert captures_of_worlds(make) <= FEW


def test_batch_norm_that_averages_over_all_batches() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, momentum=None))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return _step(module, optimizer), module, optimizer

    assert captures_of_worlds(make) <= FEW


def test_a_schedule_by_what_is_reached_needs_few_captures() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        module = perceptron()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item())
            return loss.detach()

        return step, module, optimizer, scheduler

    assert captures_of_worlds(make) <= FEW


def test_line_searches_decide_by_data() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        module = perceptron()
        optimizer = torch.optim.LBFGS(module.parameters(), 0.1, max_iter=2)

        def step(x: Tensor) -> Any:
            def closure() -> Any:
                optimizer.zero_grad()
                loss: Tensor = module(x).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return step, module

    assert captures_of_worlds(make) <= CALLS


SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SparseAdam": ("SparseAdam", {"lr": 0.1}),
    "SparseAdam-maximize": ("SparseAdam", {"lr": 0.1, "maximize": True}),
}


def _sparse_world(optimizer: str, schedule: Schedule, inside: bool) -> Any:
    """A step on tables where a data-dependent number of rows has gradients."""
    torch.manual_seed(0)
    tables = torch.nn.ModuleList([torch.nn.Embedding(6, 3, sparse=True) for _ in range(2)])
    kind, options = SPARSE[optimizer]
    groups = [{"params": [tables[0].weight]}, {"params": [tables[1].weight], "lr": 0.05}]
    made = getattr(torch.optim, kind)(groups, **options)
    scheduler = schedule(made)

    def step(x: Tensor) -> Tensor:
        made.zero_grad()
        loss: Tensor = sum(table((x.abs() * 4).long() % 6).square().mean() for table in tables)
        loss.backward()
        made.step()
        if inside:
            _advance(scheduler, loss)
        return loss.detach()

    return step, tables, made, scheduler


@pytest.mark.every(5)
@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
@pytest.mark.parametrize("optimizer", SPARSE)
def test_sparse_gradients(optimizer: str, inside: bool) -> None:
    assert captures_of_worlds(lambda: _sparse_world(optimizer, SCHEDULERS["ExponentialLR"], inside), inside) <= FEW


def test_a_sparse_gradient_is_left_sparse() -> None:
    def program(weight: Tensor, indices: Tensor) -> None:
        torch.nn.functional.embedding(indices, weight, sparse=True).square().sum().backward()

    weights = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    indices = torch.tensor([1, 2, 2])
    capture(program, (weights[0], indices))(weights[0], indices)
    program(weights[1], indices)
    ours, theirs = (weight.grad for weight in weights)
    assert ours is not None and theirs is not None and ours.layout == theirs.layout == torch.sparse_coo
    torch.testing.assert_close(ours.to_dense(), theirs.to_dense())


def test_numbers_that_64_bits_do_not_hold() -> None:
    counter = types.SimpleNamespace(count=2**63 - 3)

    def program(x: Tensor) -> Tensor:
        counter.count += 1
        return x + 1

    captured = capture(program, (torch.ones(2),))
    for call in range(5):
        captured(torch.ones(2))
        assert counter.count == 2**63 - 2 + call


class Meter:
    """Counts calls, and those of low numbers in a row."""

    def __init__(self) -> None:
        self.count, self.low, self.width, self.marks = 0, 0, 3, [0, 0]

    def note(self, good: bool) -> None:
        self.count += 1
        self.low = 0 if good else self.low + 1


class MarkingMeter(Meter):
    """Changes a list in its place, of which its class has another one made."""

    def note(self, good: bool) -> None:
        super().note(good)
        if self.low > 9:
            self.marks = [0, 0]
        self.marks[0] = 1


@pytest.mark.parametrize(("kind", "ways"), [(Meter, FEW), (MarkingMeter, FEW + 2)])
def test_numbers_that_the_program_assigns_beside_one_that_changed(kind: type[Meter], ways: int) -> None:
    mine, eager = kind(), kind()

    def program(x: Tensor, meter: Meter) -> Tensor:
        meter.note(bool(x.sum() > 0))
        return x * meter.width + meter.low

    captured = capture(lambda x: program(x, mine), (torch.ones(2),))
    for number in (1, 2, -1, -2, 3, -4, -5):
        x = torch.full((2,), float(number))
        assert torch.equal(captured(x), program(x, eager)) and vars(mine) == vars(eager)
    names = [entry.name for entry in captured.current.metadata.inputs]
    assert len(captured.variants) <= ways and "c_mine_low" in names and "c_mine_width" not in names


@pytest.mark.full
@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_with_each_scheduler(optimizer: str, scheduler: str, inside: bool) -> None:
    ways = 2 * FEW if "RAdam" in optimizer else FEW  # it decides by its steps: that times the ways of a scheduler
    assert captures_of(optimizer, SCHEDULERS[scheduler], inside) <= ways


@pytest.mark.full
@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", SPARSE)
def test_sparse_gradients_with_each_scheduler(optimizer: str, scheduler: str, inside: bool) -> None:
    assert captures_of_worlds(lambda: _sparse_world(optimizer, SCHEDULERS[scheduler], inside), inside) <= FEW


def test_states_are_loaded_after_one_call() -> None:
    """`load_state_dict` gives the options of a group another order."""
    steps = []
    for _ in range(2):
        layer = nn.Linear(3, 3)
        nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
        optimizer = torch.optim.AdamW(layer.parameters())

        def step(x: Tensor, layer: nn.Linear = layer, optimizer: torch.optim.AdamW = optimizer) -> Tensor:
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
            return layer.weight.detach().clone()

        steps.append((step, optimizer))
    x = torch.arange(6.0).view(2, 3)
    (step, optimizer), (other, its_optimizer) = steps
    program = capture(step, (x,))
    for _ in range(3):
        assert torch.equal(program(x), other(x))
        for loading in (optimizer, its_optimizer):
            loading.load_state_dict(copy.deepcopy(loading.state_dict()))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_step_of_a_transposed_parameter(name: str) -> None:
    """Kernels of fused steps go through the memory of a parameter and its gradient alike."""
    weights = [nn.Parameter(torch.arange(12.0).view(4, 3).t() / 10) for _ in range(2)]
    optimizers = [getattr(torch.optim, name)([weight], lr=0.1, fused=True) for weight in weights]

    def step(weight: nn.Parameter, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        optimizer.zero_grad()
        (x @ weight).pow(2).mean().backward()
        optimizer.step()

    x = torch.arange(15.0).view(5, 3) / 10
    captured = capture(functools.partial(step, weights[0], optimizers[0]), (x,))
    for _ in range(FEW):
        captured(x)
        step(weights[1], optimizers[1], x)
        torch.testing.assert_close(*weights)
