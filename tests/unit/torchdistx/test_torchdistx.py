"""What torchdistx documents and tests, and what its users ran into: each works here, or is refused with a reason."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import DeferredError, NotDeferredError
from functionalize.torchdistx import deferred_init as deferred
from functionalize.torchdistx import fake
from tests.support.deferred import pair

ROOT = Path(__file__).parents[3]
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(5))
        self.two = self.one
        self.fixed = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("buffer", torch.rand(3))


# Its interface and its tests


def test_names_and_parameters() -> None:
    taken = inspect.signature(deferred.materialize_module).parameters
    assert list(taken)[:3] == ["module", "buffers_only", "check_fn"]
    assert list(inspect.signature(fake.fake_mode).parameters) == ["fake_cuda"]
    assert {"deferred_init", "is_deferred", "materialize_tensor", "materialize_module"} <= set(vars(deferred))
    assert {"fake_mode", "is_fake", "meta_like"} <= set(vars(fake))


def test_a_real_tensor_is_returned_as_it_is() -> None:
    tensor = torch.ones(10)
    assert deferred.materialize_tensor(tensor) is tensor


def test_one_tensor_becomes_one_tensor() -> None:
    module = deferred.deferred_init(Tied)
    first = deferred.materialize_tensor(module.one)
    assert first is deferred.materialize_tensor(module.one) is deferred.materialize_tensor(module.two)
    assert type(first) is nn.Parameter and first.requires_grad
    assert not deferred.materialize_tensor(module.fixed).requires_grad


def test_is_deferred() -> None:
    module: Any = deferred.deferred_init(Tied)
    assert deferred.is_deferred(module) and deferred.is_deferred(module.one) and fake.is_fake(module.one)
    module.one = module.two = deferred.materialize_tensor(module.one)
    assert deferred.is_deferred(module)  # the rest is
    deferred.materialize_module(module)
    assert not deferred.is_deferred(module) and not deferred.is_deferred(module.one)
    assert not deferred.is_deferred(torch.ones(2)) and not deferred.is_deferred(nn.ReLU())


def test_which_tensors_of_which_modules() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))

    module: Any = deferred.deferred_init(make)
    deferred.materialize_module(module, buffers_only=True)
    assert [fake.is_fake(one) for one in (module[1][0].running_mean, module[1][0].weight)] == [False, True]
    asked = []

    def check(one: nn.Module) -> bool:
        asked.append(one)
        return one is module[1][1]

    deferred.materialize_module(module, check_fn=check)  # its containers say no, and it is materialized
    assert not deferred.is_deferred(module[1][1]) and deferred.is_deferred(module[0])
    assert set(asked) == set(module.modules())


@WITHOUT_CUDA
def test_fake_cuda() -> None:
    with fake.fake_mode(fake_cuda=True):
        assert torch.ones(10, device="cuda").is_cuda
    with fake.fake_mode(), pytest.raises(RuntimeError, match="without CUDA"):
        torch.ones(10, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(10, device="cuda")


def test_meta_like() -> None:
    with fake.fake_mode():
        tensor = nn.Parameter(torch.ones(2, 3, dtype=torch.float64).t())
    meta = fake.meta_like(tensor)
    assert not fake.is_fake(meta) and meta.is_meta and isinstance(meta, nn.Parameter)
    assert (meta.size(), meta.stride(), meta.dtype) == (tensor.size(), tensor.stride(), tensor.dtype)
    assert meta.requires_grad and not fake.meta_like(tensor.detach()).requires_grad
    with pytest.raises(ValueError, match="takes a fake tensor"):
        fake.meta_like(torch.ones(2))


def test_conversion_keeps_identity_and_aliasing() -> None:
    whole = torch.randn(4, 4)
    first, second = whole[0], whole[1:]
    with fake.fake_mode() as mode:
        fakes = [mode.from_tensor(one) for one in (first, second, whole, first)]
    assert fakes[0] is fakes[3]
    assert len({one.untyped_storage()._cdata for one in fakes}) == 1
    assert [one.storage_offset() for one in fakes] == [0, 4, 0, 0]


# Its errors


@torch.library.custom_op("torchdistx::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone()


def test_errors() -> None:
    with pytest.raises(DeferredError, match="no meta kernel"):
        deferred.deferred_init(lambda: unknown(torch.ones(3)))
    with fake.fake_mode():
        outside = torch.ones(3)
    with pytest.raises(ValueError, match="not made inside deferred_init") as caught:
        deferred.materialize_tensor(outside)
    assert isinstance(caught.value, NotDeferredError)
    with pytest.raises(TypeError, match="not a int"):
        deferred.deferred_init(3)  # type: ignore[arg-type]
    changed = torch.ones(3)
    module = deferred.deferred_init(lambda: changed + torch.rand(3))
    changed.add_(1)
    with pytest.raises(DeferredError, match="`changed` was changed"):
        deferred.materialize_tensor(module)
    with pytest.raises(RuntimeError, match="same device"):
        deferred.deferred_init(lambda: torch.ones(3, device="meta") + torch.ones(3))


def test_inference_tensors_are_read_while_they_stay_as_they_are() -> None:
    with torch.inference_mode():
        given = torch.ones(3)
    made = deferred.deferred_init(lambda: given * 2)
    kept = deferred.deferred_init(lambda: given * 3)
    assert deferred.materialize_tensor(kept).tolist() == [3, 3, 3]
    with torch.inference_mode():
        given.zero_()
    with pytest.raises(DeferredError, match="was changed"):
        deferred.materialize_tensor(made)


# What it documents not to do


def test_arguments_that_change_later() -> None:
    size = [3, 4]
    made = deferred.deferred_init(lambda: torch.ones(size))
    size[0] = 9
    assert deferred.materialize_tensor(made).shape == (3, 4)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.tolist(),
        lambda x: x.detach().numpy().tolist(),
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: [float(one) for one in x],
    ],
)
def test_values_in_a_constructor(ask: Callable[[Tensor], Any]) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.answer = ask(self.weight.detach())
            self.scaled = nn.Parameter(torch.randn(4) * len(str(self.answer)))

    eager, module = pair(Asking)
    deferred.materialize_module(module)
    assert module.answer == eager.answer and torch.equal(module.scaled, eager.scaled)


# Its issues


def test_10_tied_parameters() -> None:
    module = deferred.deferred_init(Tied)
    deferred.materialize_module(module)
    assert module.one is module.two


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)])
def test_11_20_changes_after_construction(change: Callable[[nn.Module], nn.Module]) -> None:
    eager, module = pair(nn.Linear, 3, 4)
    change(module)
    deferred.materialize_module(module)
    assert torch.equal(module.weight, change(eager).weight)  # type: ignore[arg-type]


def test_12_other_references() -> None:
    module = deferred.deferred_init(Tied)
    others: list[Any] = [module.one, {"buffer": module.buffer}]
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    deferred.materialize_module(module)
    assert others[0] is module.one and others[1]["buffer"] is module.buffer
    module.one.sum().backward()
    optimizer.step()
    assert module.one[0] == 0.9


def test_71_there_and_back() -> None:
    """A real module is made deferred by deferring its construction from its own state."""
    real = nn.Linear(3, 3)
    kept = {name: value.clone() for name, value in real.state_dict().items()}

    def again() -> nn.Module:
        module = nn.Linear(3, 3)
        module.load_state_dict(kept)
        return module

    module = deferred.deferred_init(again)
    deferred.materialize_module(module)
    assert torch.equal(module.weight, real.weight)  # type: ignore[arg-type]


def test_materialization_in_any_order_is_seeded_as_eager() -> None:
    eager, module = pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6)))
    for index in (2, 0, 1):
        deferred.materialize_module(module[index])
        assert torch.equal(eager[index].weight, module[index].weight)


FSDP = """
import os, sys, warnings
import functionalize.torchdistx
sys.modules["torchdistx"] = functionalize.torchdistx
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torchdistx import deferred_init

warnings.simplefilter("ignore")
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2)))

torch.manual_seed(0)
eager = make()
torch.manual_seed(0)
module = deferred_init.deferred_init(make)
policy = ModuleWrapPolicy({nn.Linear})
sharded = FullyShardedDataParallel(module, device_id=torch.device("cpu"), auto_wrap_policy=policy)
x = torch.randn(3, 4)
assert torch.equal(sharded(x), eager(x))
sharded(x).sum().backward()
torch.optim.SGD(sharded.parameters(), 0.1).step()
os._exit(0)  # gloo's threads, as they end, have been seen to end the process by an abort
"""


@pytest.mark.slow(seconds=10)
def test_fsdp_takes_it_for_torchdistx() -> None:
    subprocess.run([sys.executable, "-c", FSDP], check=True, cwd=ROOT)
