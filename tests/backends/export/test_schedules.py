"""Training steps with schedulers of learning rates, exported: eager's losses and rates, whichever way a step goes."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from functionalize import UnsupportedExportError, UnsupportedProgramError, capture
from tests.sweeps.fuzz.schedules import verdict

CALLS = 11
Scheduler = Callable[[torch.optim.Optimizer], Any]
Step = Callable[[Tensor], Any]


def warm_cosine(epoch: int, *, warm: int, total: int) -> float:
    """As libraries write it, with a decision and `float`."""
    if epoch < warm:
        return float(epoch) / float(max(1, warm))
    progress = float(epoch - warm) / float(max(1, total - warm))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def _in_sequence(one: torch.optim.Optimizer) -> Any:
    parts: list[Any] = [schedulers.ConstantLR(one, 0.1, 2), schedulers.ExponentialLR(one, 0.9)]
    return schedulers.SequentialLR(one, parts, [3])


def _in_a_chain(one: torch.optim.Optimizer) -> Any:
    return schedulers.ChainedScheduler([schedulers.ConstantLR(one, 0.1, 2), schedulers.ExponentialLR(one, 0.9)])


SCHEDULERS: dict[str, Scheduler] = {
    "StepLR": lambda one: schedulers.StepLR(one, 2),
    "MultiStepLR": lambda one: schedulers.MultiStepLR(one, [2, 5, 5], 0.5),
    "ConstantLR": lambda one: schedulers.ConstantLR(one, 0.5, 3),
    "LinearLR": lambda one: schedulers.LinearLR(one, total_iters=5),
    "ExponentialLR": lambda one: schedulers.ExponentialLR(one, 0.9),
    "PolynomialLR": lambda one: schedulers.PolynomialLR(one, 6),
    "CosineAnnealingLR": lambda one: schedulers.CosineAnnealingLR(one, 4),
    "CosineAnnealingWarmRestarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 3, 2),
    "CyclicLR": lambda one: schedulers.CyclicLR(one, 0.01, 0.2, 3, cycle_momentum=False),
    "OneCycleLR": lambda one: schedulers.OneCycleLR(one, 0.5, total_steps=CALLS + 1),
    "LambdaLR": lambda one: schedulers.LambdaLR(one, functools.partial(warm_cosine, warm=3, total=12)),
    "MultiplicativeLR": lambda one: schedulers.MultiplicativeLR(one, lambda epoch: 0.95 if epoch < 4 else 0.5),
    "SequentialLR": _in_sequence,
    "ChainedScheduler": _in_a_chain,
    "ReduceLROnPlateau": lambda one: schedulers.ReduceLROnPlateau(one, patience=1, cooldown=1),
}


def made(scheduler: Scheduler, optimizer: Any) -> tuple[Any, Step]:
    """An optimizer with two rates, and a step of training."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    one = optimizer([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.03}], lr=0.1)
    schedule = scheduler(one)
    needs_loss = isinstance(schedule, schedulers.ReduceLROnPlateau)

    def step(x: Tensor) -> Tensor:
        one.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        one.step()
        schedule.step(*([loss.detach()] if needs_loss else []))
        return loss

    return one, step


def check(scheduler: Scheduler, optimizer: Any, route: Callable[[Any], tuple[Step, Callable[[], Any]]]) -> None:
    _, step = made(scheduler, optimizer)
    known, reference = made(scheduler, optimizer)
    inputs = [torch.randn(4, 3) for _ in range(CALLS)]
    run, state = route(capture(step, (inputs[0],)))
    for x in inputs:
        torch.testing.assert_close(torch.as_tensor(run(x)).detach(), reference(x).detach(), rtol=1e-4, atol=1e-6)
        rates = [float(value) for name, value in state().items() if name.endswith(".lr")]
        assert rates == pytest.approx([group["lr"] for group in known.param_groups], rel=1e-6, abs=1e-12)


def by_module(program: Any) -> tuple[Step, Callable[[], Mapping[str, Tensor]]]:
    """What was saved and loaded."""
    file = io.BytesIO()
    torch.export.save(program.to_exported_program(), file)
    file.seek(0)
    module: Any = torch.export.load(file).module()
    return module, lambda: dict(module.named_buffers())


@pytest.mark.every(6)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_step_goes_each_way_in_one_exported_program(name: str) -> None:
    check(SCHEDULERS[name], torch.optim.SGD, by_module)


@pytest.mark.parametrize("name", ["OneCycleLR", "StepLR"])
def test_what_a_schedule_changes_besides_rates_changes(name: str) -> None:
    check(SCHEDULERS[name], torch.optim.AdamW, by_module)  # betas, in tuples


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingWarmRestarts", "SequentialLR", "LambdaLR"])
def test_onnx_runtime_goes_each_way(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from functionalize.backends import onnx

    def by_onnx(program: Any) -> tuple[Step, Callable[[], Mapping[str, Tensor]]]:
        loaded = onnx.load(program.to_onnx(tmp_path / "step.onnx"))
        return loaded, lambda: loaded.state

    check(SCHEDULERS[name], torch.optim.SGD, by_onnx)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["StepLR", "MultiStepLR", "SequentialLR", "LambdaLR"])
def test_jitted_jax_goes_each_way(name: str) -> None:
    pytest.importorskip("jax")

    def by_jax(program: Any) -> tuple[Step, Callable[[], Mapping[str, Any]]]:
        function = program.to_jax()
        jitted, state = function.jit(), [function.initial_state]

        def run(x: Tensor) -> Any:
            state[0], loss = jitted(state[0], x.numpy())
            return torch.tensor(float(loss))

        return run, lambda: state[0]

    check(SCHEDULERS[name], torch.optim.SGD, by_jax)


def test_a_schedule_that_ends_raises_as_it_does() -> None:
    _, step = made(lambda one: schedulers.OneCycleLR(one, 0.5, total_steps=3), torch.optim.SGD)
    module: Any = capture(step, (torch.randn(4, 3),)).to_exported_program().module()
    for _ in range(3):
        module(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"schedule\.step"):  # eager's ValueError: an assertion tells the line
        module(torch.randn(4, 3))


def test_calls_step_schedules_by_themselves_after_an_export() -> None:
    _, step = made(SCHEDULERS["StepLR"], torch.optim.SGD)
    program = capture(step, (torch.randn(3, 3),), on_guard_failure="recapture")
    program.to_exported_program()
    program(torch.randn(5, 3))
    assert len(program.specialization.metadata.steps) == 1


def test_a_function_of_a_schedule_may_count() -> None:
    def counting() -> tuple[dict[str, int], Step]:
        count = {"late": 0}

        def factor(epoch: int) -> float:
            if epoch > 2:
                count["late"] += 1
            return 0.5 if epoch > 3 else 1.0

        return count, made(lambda one: schedulers.LambdaLR(one, factor), torch.optim.SGD)[1]

    (_, step), (count, reference) = counting(), counting()
    module: Any = capture(step, (torch.randn(4, 3),)).to_exported_program().module()
    for _ in range(5):
        module(torch.ones(4, 3)), reference(torch.ones(4, 3))
    (counted,) = (value for name, value in module.named_buffers() if name.endswith("late"))
    assert count == {"late": int(counted)} == {"late": 6}  # three epochs for each of two groups


def test_a_function_of_a_schedule_may_write_to_a_tensor() -> None:
    """It is followed then, and writes once."""

    def counting() -> tuple[Tensor, Step]:
        count = torch.zeros(())

        def factor(epoch: int) -> float:
            count.add_(1)
            return 0.5 if epoch > 30 else 1.0

        return count, made(lambda one: schedulers.LambdaLR(one, factor), torch.optim.SGD)[1]

    (count, step), (expected, reference) = counting(), counting()
    program = capture(step, (torch.randn(4, 3),))
    program(torch.ones(4, 3)), reference(torch.ones(4, 3))
    module: Any = program.to_exported_program().module()
    for _ in range(3):
        module(torch.ones(4, 3)), reference(torch.ones(4, 3))
    counted = [value for value in module.buffers() if value.shape == () and value == expected]
    assert len(counted) == 1 and expected == 10 and count == 4


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("shard", range(2))
def test_random_functions_as_schedules(shard: int) -> None:
    assert not [found for seed in range(4 * shard, 4 * shard + 4) if (found := verdict(seed))]


def test_steps_of_every_second_call_are_refused() -> None:
    """The first call makes gradients that the second one adds to, and steps by: each call is a program of its own."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).pow(2).sum()
        loss.backward()
        calls[0] += 1
        if calls[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    program = capture(step, (torch.randn(3, 4),))
    with pytest.raises(
        UnsupportedExportError, match=r"the first call takes another branch than later calls: .*% 2 == 0"
    ):
        program.to_exported_program()


def test_numbers_of_another_type_after_the_first_call_are_named() -> None:
    last = {"size": 0.5}

    def program(x: torch.Tensor) -> torch.Tensor:
        result = x * last["size"]
        last["size"] = x.shape[0]
        return result

    with pytest.raises((UnsupportedExportError, UnsupportedProgramError), match="size"):
        capture(program, (torch.randn(3, 4),)).to_exported_program()
