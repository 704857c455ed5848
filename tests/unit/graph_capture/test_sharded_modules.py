"""Modules of ``fully_shard`` in a captured training step: their own hooks gather parameters and reduce gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from functionalize import capture, verify
from functionalize._torch.distributed.worlds import fake_world
from functionalize.errors import NotCapturedWarning, UnsupportedProgramError
from tests.support.ranks import Program, Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.end()


class Step:
    """A training step. It returns the loss and this rank's shards of the parameters."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def gradients(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.optimizer.zero_grad()
        loss = self.gradients(x)
        self.optimizer.step()
        return [loss, *(parameter.to_local().detach().clone() for parameter in self.model.parameters())]


class Clipped(Step):
    def gradients(self, x: Tensor) -> Tensor:
        loss = super().gradients(x)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        return loss


class Accumulated(Step):
    def gradients(self, x: Tensor) -> Tensor:
        super().gradients(x)
        return super().gradients(x * 2)


@dataclass(frozen=True)
class Case:
    """A kind of step, its optimizer, and how the module is sharded."""

    step: type[Step] = Step
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: Mapping[str, Any] = field(default_factory=dict)
    width: int = 8  # of the hidden layer, which ranks share evenly or not
    frozen: bool = False  # whether the first weight requires no gradients


CASES = {
    "adamw": Case(),
    "clipped": Case(Clipped),
    "accumulated": Case(Accumulated, torch.optim.SGD),
    "bf16": Case(options={"mp_policy": BF16}),
    "uneven, in part frozen": Case(Clipped, width=7, frozen=True),
    "kept gathered": Case(options={"reshard_after_forward": False}),
}


def sharded(case: Case) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, case.width), nn.LayerNorm(case.width), nn.ReLU(), nn.Linear(case.width, 6), nn.Linear(6, 3)
    )
    model[0].weight.requires_grad_(not case.frozen)
    for part in (model[0], model[3], model):
        fully_shard(part, **case.options)
    return case.step(model, case.optimizer(model.parameters(), lr=0.05))


def program(name: str, rank: int, world: int, group: Any) -> Program:
    """A step after another one, which determines the outermost module."""
    step, x = sharded(CASES[name]), torch.arange(48.0).view(6, 8).sin()[:, ::2] + rank
    step(x)
    return Program(step, lambda call: (x + call,))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_eagers_on_each_rank(pair: Ranks, name: str) -> None:
    for outcome in pair.outcomes(partial(program, name)):
        assert outcome.verdict == "right", outcome.message


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_eagers_on_four_ranks(name: str) -> None:
    ranks = Ranks(4)
    try:
        for outcome in ranks.outcomes(partial(program, name)):
            assert outcome.verdict == "right", outcome.message
    finally:
        ranks.end()


def test_a_graph_gathers_and_reduces_as_eager_does() -> None:
    x = torch.ones(6, 4)
    with fake_world(2, 0):
        step = sharded(Case())
        step(x)
        captured = capture(step, (x,))
        kinds = [entry.kind for entry in verify.collectives(captured.graph)]
        assert kinds == ["all_gather"] * 5 + ["reduce_scatter"] * 3
        verify.assert_functional(captured.graph_module, "mutations_and_views")
        captured(x)
        step(x)
        captured(x)
        step.model.set_requires_gradient_sync(False)
        with pytest.warns(NotCapturedWarning):  # the original runs, which keeps gradients without reducing them
            captured(x)


def test_what_is_not_as_a_step_leaves_it_is_refused() -> None:
    x = torch.ones(6, 4)
    with fake_world(2, 0):
        step = sharded(Case())
        with pytest.raises(UnsupportedProgramError, match="has not run yet"):
            capture(step, (x,))
        step(x)
        model: Any = step.model
        with torch.no_grad(), pytest.raises(UnsupportedProgramError, match="with gathered parameters"):
            capture(model, (x,))
        with torch.no_grad():
            model(x)
        with pytest.raises(UnsupportedProgramError, match="call its `reshard"):
            capture(step, (x,))
