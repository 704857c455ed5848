"""Training steps with schedulers of learning rates, exported: refused where the program steps them, right outside."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from functionalize import UnsupportedExportError, UnsupportedProgramError, capture

CALLS = 5
Scheduler = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Scheduler] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1),
}


class World:
    """A model, an optimizer, and a scheduler."""

    def __init__(self, scheduler: Scheduler, lr: float | Tensor = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.scheduler = scheduler(self.optimizer)

    def train(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train_and_schedule(self, x: Tensor) -> Tensor:
        loss = self.train(x)
        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()
        return loss

    def read_the_rate(self, x: Tensor) -> Any:
        loss = self.train(x)
        self.scheduler.step()
        return loss, self.scheduler.get_last_lr()[0]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_program_that_steps_a_scheduler_is_not_exported(name: str) -> None:
    program = capture(World(SCHEDULERS[name]).train_and_schedule, (torch.ones(4, 3),))
    with pytest.raises(UnsupportedExportError) as refused:
        program.to_exported_program()
    message = str(refused.value)
    assert "the program steps a scheduler of learning rates\n" in message
    assert "try  call scheduler.step() outside the captured program" in message
    assert name == "LambdaLR" or "self.scheduler.step(" in message  # the line, unless the step was traced


@pytest.mark.parametrize("to", ["torch", "ONNX", "JAX"])
def test_each_export_refuses_steps_of_schedulers(to: str, tmp_path: Path) -> None:
    exports: dict[str, Callable[[Any], Any]] = {
        "torch": lambda program: program.to_core_aten(),
        "ONNX": lambda program: program.to_onnx(tmp_path / "step.onnx"),
        "JAX": lambda program: program.to_jax(),
    }
    pytest.importorskip({"torch": "torch", "ONNX": "onnxruntime", "JAX": "jax"}[to])
    program = capture(World(SCHEDULERS["StepLR"]).read_the_rate, (torch.ones(4, 3),))
    with pytest.raises(UnsupportedExportError, match="steps a scheduler of learning rates"):
        exports[to](program)


def test_a_rate_that_is_a_tensor_is_set_outside_of_an_exported_program() -> None:
    """The way out that the refusal names."""
    world = World(SCHEDULERS["StepLR"], torch.tensor(0.1))
    file = io.BytesIO()
    torch.export.save(capture(world.train, (torch.ones(4, 3),)).to_exported_program(), file)
    file.seek(0)
    module: Any = torch.export.load(file).module()
    (rate,) = (value for name, value in module.named_buffers() if name.endswith(".lr"))
    for call in range(CALLS):
        x = torch.full((4, 3), call / 2)
        torch.testing.assert_close(module(x), world.train(x))
        world.scheduler.step()
        rate.copy_(world.optimizer.param_groups[0]["lr"])


def test_calls_step_schedules_by_themselves_after_a_refused_export() -> None:
    ours, eager = World(SCHEDULERS["StepLR"]), World(SCHEDULERS["StepLR"])
    program = capture(ours.train_and_schedule, (torch.randn(3, 3),), on_guard_failure="recapture")
    with pytest.raises(UnsupportedExportError):
        program.to_exported_program()
    for rows in (3, 5):
        x = torch.ones(rows, 3)
        assert torch.equal(program(x), eager.train_and_schedule(x))
    assert ours.scheduler.state_dict() == eager.scheduler.state_dict()
    assert len(program.specialization.metadata.steps) == 1


def test_a_schedule_that_libraries_write_is_right_in_few_captures() -> None:
    """As transformers has it: a function of the counter, with decisions, `float` and `math`."""

    def warm_linear(epoch: int, *, warm: int, total: int) -> float:
        if epoch < warm:
            return float(epoch) / float(max(1, warm))
        return max(0.0, float(total - epoch) / float(max(1, total - warm)))

    factor = functools.partial(warm_linear, warm=3, total=12)
    ours, eager = (World(lambda optimizer: schedulers.LambdaLR(optimizer, factor)) for _ in range(2))
    program = capture(ours.train_and_schedule, (torch.ones(4, 3),), on_guard_failure="recapture")
    for call in range(15):
        x = torch.full((4, 3), call / 2)
        assert torch.equal(program(x), eager.train_and_schedule(x))
        assert ours.scheduler.state_dict() == eager.scheduler.state_dict()
    assert len(program.variants) <= 4


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
