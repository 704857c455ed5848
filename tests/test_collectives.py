"""Collectives: those that write are refused in a graph and right in direct use; functional ones go through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import (
    NotFunctionalError,
    UnsupportedMutationError,
    UnsupportedProgramError,
    capture,
    functionalize,
)
from functionalize.verify import assert_functional


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y


def gathered(x: Tensor) -> Tensor:
    parts = [torch.zeros_like(x)]
    dist.all_gather(parts, x)
    return parts[0]


def scattered(x: Tensor) -> Tensor:
    dist.broadcast(x[0], 0)
    dist.barrier()
    return x


@pytest.mark.filterwarnings("ignore:barrier")
@pytest.mark.parametrize("func", [reduced, gathered, scattered])
def test_collectives_that_write(func: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3)
    traced: Any = make_fx(functionalize(func), tracing_mode="fake")
    for run in (lambda: capture(func, (x,)), lambda: traced(x)):
        with pytest.raises(UnsupportedMutationError, match="c10d::") as raised:
            run()
        assert re.search(
            r"at   .*test_collectives\.py:\d+ in (reduced|gathered|scattered): .*dist\.", str(raised.value)
        )
    torch.testing.assert_close(functionalize(func)(x), func(x.clone()))


def test_a_graph_with_collectives_that_write_is_not_functional() -> None:
    graph = make_fx(reduced, tracing_mode="fake")(torch.ones(3))
    with pytest.raises(NotFunctionalError, match=r"c10d::allreduce_: it writes"):
        assert_functional(graph)


def test_functional_collectives() -> None:
    def func(x: Tensor) -> Tensor:
        total: Tensor = functional.all_reduce(x * 2, "sum", dist.group.WORLD)  # type: ignore[arg-type]
        return total.add_(1)

    program = capture(func, (torch.ones(3),))
    assert_functional(program.graph_module, "mutations_and_views")
    torch.testing.assert_close(program(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.filterwarnings("ignore:.*(FSDP|NO_SHARD|CPU|device)")
def test_modules_that_communicate_by_hooks_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh("cpu", (1,))
    modules = {
        "DistributedDataParallel": nn.parallel.DistributedDataParallel(nn.Linear(3, 3)),
        "FSDPModule": fully_shard(nn.Linear(3, 3), mesh=mesh),
        "DTensor": distribute_module(nn.Linear(3, 3), mesh),
    }
    for name, module in modules.items():
        with pytest.raises(UnsupportedProgramError, match=rf"is a {name}"):
            capture(module, (torch.ones(2, 3),))  # type: ignore[arg-type]
