"""DistributedDataParallel in captured steps, and captured alone: its reducer averages gradients, as in eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from functionalize import capture
from functionalize._torch.distributed.worlds import fake_world
from functionalize.errors import UnsupportedProgramError
from tests.support.ranks import Program, assert_right, refusals


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Unused(nn.Module):
    """A module with a layer that gets no gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


class UsedByRank(Unused):
    """A module whose ranks use different layers."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.unused if torch.distributed.get_rank() else self.used
        return layer(x)  # type: ignore[no-any-return]


class Heads(Unused):
    """A module with two results, of which the loss is computed from one."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.used(x), "other": self.unused(x)}


class Step(nn.Module):
    """A training step, as a module, so that its state is compared."""

    captured: Any = None  # the model, if it alone is captured

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        result = (self.captured or self.model)(x)
        loss = (result["loss"] if isinstance(result, dict) else result).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]


class Accumulated(Step):
    def forward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        run = self.captured or self.model
        with self.model.no_sync():
            run(x).square().mean().backward()
        loss = run(x * 2).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]


class ByHand(Step):
    def forward(self, x: Tensor) -> Tensor:
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad((self.captured or self.model)(x).square().mean(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient * 0.1)
        return gradients[0].clone()


class Skipping(Step):
    """A step that branches on its reduced gradients, as a scaler of gradients does."""

    def forward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.captured or self.model)(x).square().mean()
        loss.backward()
        if torch.stack([p.grad.isfinite().all() for p in self.model.parameters()]).all():
            self.optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A kind of step, and how its module is wrapped."""

    step: type[Step] = Step
    module: Callable[[], nn.Module] = network
    hook: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0  # before the capture


CASES = {
    "buckets": Case(options={"bucket_cap_mb": 0.00003}),
    "views of buckets": Case(options={"gradient_as_bucket_view": True}),
    "a hook that compresses": Case(hook=fp16_compress_hook),
    "a built-in hook": Case(hook="FP16_COMPRESS"),
    "buffers of its own": Case(options={"broadcast_buffers": False}),
    "unused parameters": Case(module=Unused, options={"find_unused_parameters": True}),
    "parameters that another rank uses": Case(module=UsedByRank, options={"find_unused_parameters": True}),
    "a result that is not used": Case(module=Heads, options={"find_unused_parameters": True, "bucket_cap_mb": 0.00003}),
    "no_sync": Case(Accumulated),
    "gradients by hand": Case(ByHand),
    "a branch on gradients": Case(Skipping, options={"bucket_cap_mb": 0.00003}),
    "after two steps": Case(options={"bucket_cap_mb": 0.0001}, steps=2),
    "a static graph": Case(options={"static_graph": True, "bucket_cap_mb": 0.0001}, steps=1),
    "a static graph of both": Case(options={"static_graph": True, "find_unused_parameters": True}, steps=1),
}
OUTSIDE = {
    "a static graph with unused parameters": Case(module=Unused, options={"static_graph": True}, steps=1),
}


def program(name: str, rank: int, world: int, group: Any) -> Program:
    """A step of a module that, if it is new, reduces gradients in other buckets from its second step on."""
    case = {**CASES, **OUTSIDE}[name]
    model = nn.parallel.DistributedDataParallel(case.module(), **case.options)
    if isinstance(case.hook, str):
        distributed: Any = torch.distributed  # does not export it
        model._register_builtin_comm_hook(getattr(distributed.BuiltinCommHookType, case.hook))
    elif case.hook is not None:
        model.register_comm_hook(None, case.hook)
    step = case.step(model)
    x = torch.arange(24.0).view(6, 4).sin() + rank
    for _ in range(case.steps):
        step(x)
    return Program(step, lambda call: (x + call,), calls=5)


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_eagers_on_each_rank(name: str) -> None:
    assert_right(partial(program, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_a_graph_cannot_do_is_refused_on_each_rank(name: str) -> None:
    assert all("DistributedDataParallel" in message for message in refusals(partial(program, name)))


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*CASES, *OUTSIDE])
def test_a_backward_outside_of_the_program_equals_eagers_on_each_rank(name: str) -> None:
    assert_right(partial(program, name), system="forward")


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_eagers_on_four_ranks(name: str) -> None:
    assert_right(partial(program, name), 4)


def test_a_backward_that_would_reduce_unused_parameters_early_is_refused() -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.00003}
    x = torch.ones(6, 4)
    with fake_world(2, 0):
        model = nn.parallel.DistributedDataParallel(Unused(), **options)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedProgramError, match="DistributedDataParallel"):
            capture(model, (x,))


def test_what_a_module_would_log_of_a_program_is_refused(group_of_one: None) -> None:
    model = nn.parallel.DistributedDataParallel(network())

    def joined(x: Tensor) -> Tensor:
        with model.join():
            model(x).sum().backward()
        return x

    with pytest.raises(UnsupportedProgramError, match=r"DistributedDataParallel is captured with join\(\)"):
        capture(joined, (torch.ones(6, 4),))


@pytest.mark.parametrize("step", [False, True])
def test_a_module_may_be_an_argument(group_of_one: None, *, step: bool) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if step:
            loss.backward()
        return loss  # type: ignore[no-any-return]

    x = torch.arange(24.0).view(6, 4).sin()
    eager, model = (nn.parallel.DistributedDataParallel(network()) for _ in range(2))
    captured = capture(run, (model, x))
    for _ in range(4):
        losses = run(eager, x), captured(model, x)
        if not step:
            for loss in losses:
                loss.backward()
        assert torch.equal(*losses)
        for parameter, other in zip(eager.parameters(), model.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]
