"""Programs that step schedulers of learning rates, and read or change them besides: as eager, in few captures."""

from __future__ import annotations

import concurrent.futures
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from functionalize import capture
from functionalize._torch import FakeTensor
from functionalize.errors import InputMismatchError

FEW = 3


class World:
    """A model, an optimizer, a scheduler, and where a program writes what it saw."""

    def __init__(self, scheduler: Callable[[Any], Any], lr: Any = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        rate = lr.clone() if isinstance(lr, Tensor) else lr
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
        self.scheduler = scheduler(self.optimizer)
        self.log: list[Any] = []

    def train(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def rates(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]


def held(world: World) -> str:
    return str((world.model.state_dict(), world.optimizer.state_dict(), world.scheduler.state_dict(), world.log))


def at_the_end(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    return loss


def twice(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    world.scheduler.step()
    return loss


def decided_by_data(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    if loss < 1:
        world.scheduler.step()
    return loss


def returned_afterwards(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    return loss, world.scheduler.get_last_lr()[0], world.rates


def logged_afterwards(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    world.log.append(world.scheduler.get_last_lr())
    return loss


def read_before(world: World, x: Tensor) -> Any:
    epoch = world.scheduler.last_epoch
    loss = world.train(x)
    world.scheduler.step()
    return loss * (epoch + 1)


def before_the_optimizer(world: World, x: Tensor) -> Any:
    world.scheduler.step()
    return world.train(x)


def in_a_loop(world: World, x: Tensor) -> Any:
    for _ in range(2):
        loss = world.train(x)
        world.scheduler.step()
    return loss


def set_before(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.optimizer.param_groups[0]["lr"] *= 0.9
    world.scheduler.step()
    return loss


def set_afterwards(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    world.optimizer.param_groups[0]["lr"] = 0.03
    return loss


def changed_afterwards(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    world.scheduler.gamma = 0.25
    return loss


def its_class_asked(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    return loss, isinstance(world.rates[0], float)


def errors_caught(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    try:
        world.scheduler.step()
        rate = world.rates[0] + 1
    except Exception:
        rate = None
    return loss, rate


def its_state_returned(world: World, x: Tensor) -> Any:
    loss = world.train(x)
    world.scheduler.step()
    return loss, world.scheduler.state_dict(), world.optimizer.state_dict()["param_groups"]


PROGRAMS = [at_the_end, twice, decided_by_data, returned_afterwards, logged_afterwards, read_before]
PROGRAMS += [before_the_optimizer, in_a_loop, set_before, set_afterwards, changed_afterwards, its_class_asked]
PROGRAMS += [errors_caught, its_state_returned]


def check(
    program: Callable[[World, Tensor], Any], scheduler: Callable[[Any], Any], lr: Any = 0.1, few: int = FEW
) -> Any:
    """Some calls, held against eager's; the program."""
    mine, eager = World(scheduler, lr), World(scheduler, lr)
    captures = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers that are stepped first
        captured = capture(lambda x: program(mine, x), (torch.ones(4, 3),))
        recapture = captured._specializations.recapture

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal captures
            captures += 1
            return recapture(*args, **kwargs)

        captured._specializations.recapture = counted
        for number in range(7):
            x = torch.linspace(-1, number, 12).view(4, 3)
            assert str(captured(x)) == str(program(eager, x))
            assert held(mine) == held(eager)
    assert captures < few
    return captured


@pytest.mark.every(5)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_step_a_scheduler(program: Callable[[World, Tensor], Any]) -> None:
    captured = check(program, lambda optimizer: schedulers.StepLR(optimizer, 2, 0.5))
    steps = {"at_the_end": 1, "twice": 2}.get(program.__name__, 0)
    assert program is decided_by_data or {len(one.metadata.steps) for one in captured._specializations.kept} == {steps}


def test_a_step_is_given_the_tensor_as_it_was() -> None:
    def program(world: World, x: Tensor) -> Any:
        loss = world.train(x)
        world.scheduler.step(metrics=loss)
        return loss.mul_(0)

    captured = check(program, lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0))
    assert len(captured.current.metadata.steps) == 1 and len(captured.variants) == 2


@pytest.mark.parametrize("kind", ["rates that are tensors", "functions of the user's", "a class of the user's"])
def test_schedulers_whose_steps_are_followed(kind: str) -> None:
    class Halving(schedulers.LRScheduler):
        def get_lr(self) -> Any:
            return [group["lr"] / 2 for group in self.optimizer.param_groups]

    makes: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "rates that are tensors": (lambda one: schedulers.ExponentialLR(one, 0.9), torch.tensor(0.1)),
        "functions of the user's": (lambda one: schedulers.LambdaLR(one, lambda epoch: 0.9**epoch), 0.1),
        "a class of the user's": (Halving, 0.1),
    }
    make, lr = makes[kind]
    few = 7 if isinstance(lr, Tensor) else FEW  # lists of tensors that are replaced are other state at each call
    captured = check(at_the_end, make, lr, few)
    assert not captured.current.metadata.steps


def test_a_scheduler_that_another_one_without_functions_holds() -> None:
    def make(optimizer: Any) -> Any:
        parts = [schedulers.LambdaLR(optimizer, lambda epoch: 0.5), schedulers.ExponentialLR(optimizer, 0.9)]
        return schedulers.ChainedScheduler(parts)

    assert not check(at_the_end, make).current.metadata.steps


def test_a_call_that_is_refused_steps_nothing() -> None:
    world = World(lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5))
    captured = capture(lambda x: at_the_end(world, x), (torch.ones(4, 3),))
    before = held(world)
    with pytest.raises(InputMismatchError):
        captured(torch.ones(4, 3, dtype=torch.float64))
    assert held(world) == before


def test_captures_leave_schedulers_to_other_threads() -> None:
    world, other = (World(lambda optimizer: schedulers.StepLR(optimizer, 2, 0.5)) for _ in range(2))
    ended = False

    def step_the_other() -> int:
        steps = 0
        other.optimizer.step()
        while not ended:
            other.scheduler.step()
            steps += 1
        return steps

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        steps = pool.submit(step_the_other)
        for _ in range(5):
            capture(lambda x: at_the_end(world, x), (torch.ones(4, 3),))
        ended = True
        total = steps.result()
    assert other.scheduler.last_epoch == total > 0
    assert world.scheduler.last_epoch == 0


def test_caches_that_a_run_has_filled_which_read_a_rate_are_empty() -> None:
    world = World(lambda optimizer: schedulers.StepLR(optimizer, 1, 0.5))
    ones = functools.lru_cache(lambda count: torch.ones(count))

    def program(x: Tensor) -> Any:
        return in_a_loop(world, x) + ones(2)

    captured = capture(program, (torch.ones(4, 3),))
    assert ones.cache_info().currsize == 0
    captured(torch.ones(4, 3))
    assert not any(isinstance(one, FakeTensor) for one in [ones(2)])
