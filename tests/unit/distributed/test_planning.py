"""DTensor's plans in a capture: equal parameters of an optimizer are planned once, and graphs are as without that.

What views of sharded tensors leave, strided shards in an order, is taken and returned as in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from functionalize import capture
from functionalize._torch.distributed.worlds import fake_world
from functionalize._torch.subclasses.sharding import forget_plans, planning_once
from functionalize.graph_capture.trace import patches

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "on lists": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


def code_of_a_step(kind: str) -> str:
    """The graph of a training step on one of four ranks: six equal layers, three by columns and three by rows."""
    with fake_world(4, 2):
        forget_plans()
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        plan: dict[str, Any] = {str(number): (ColwiseParallel(), RowwiseParallel())[number % 2] for number in range(6)}
        parallelize_module(model, mesh, plan)
        optimizer = OPTIMIZERS[kind](model.parameters())

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return str(capture(step, (torch.ones(2, 8),)).graph_module.code)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equal_parameters_of_an_optimizer_are_planned_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    planned: list[int] = []

    def counting(plan: Callable[..., Any]) -> Callable[..., Any]:
        def counted(own: Any, op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
            first = info.schema.args_schema[0]
            planned.extend([len(first)] if isinstance(first, (list, tuple)) else [])
            return plan(own, op, args, kwargs, info, try_cache)

        return counted

    monkeypatch.setattr(patches, "planning_once", lambda plan: planning_once(counting(plan)))
    code = code_of_a_step(kind)
    assert planned and max(planned) == 4  # weights and biases, by columns and by rows
    monkeypatch.setattr(patches, "planning_once", lambda plan: plan)
    assert code == code_of_a_step(kind)


def test_strided_shards_of_a_view_are_returned_and_taken() -> None:
    with fake_world(2, 0):
        mesh = init_device_mesh("cpu", (2,))

        def flattened(x: DTensor) -> Any:
            return x.view(-1) * 2

        x = DTensor.from_local(torch.arange(12.0).view(4, 3), mesh, [Shard(1)])
        wanted = flattened(x)
        result = capture(flattened, (x,))(x)
        assert result.placements == wanted.placements and torch.equal(result.to_local(), wanted.to_local())
        local = capture(lambda x: x.add_(1).to_local(), (result,))(result)
        assert torch.equal(local, wanted.to_local() + 1) and torch.equal(result.to_local(), local)
