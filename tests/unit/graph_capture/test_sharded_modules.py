"""Modules of ``fully_shard`` in captured programs: their own hooks gather parameters and reduce gradients."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as activations
from torch.utils._python_dispatch import TorchDispatchMode

from functionalize import capture, verify
from functionalize._torch.distributed.worlds import fake_world
from functionalize.errors import UnsupportedProgramError
from functionalize.ops.collectives import Way, collective
from tests.support.ranks import Program, assert_right, refusals

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A layer of two."""

    def __init__(self, width: int = 8, *, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return self.inner(x)
        computed: Tensor = activations.checkpoint(self.inner, x, use_reentrant=False)
        return computed

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    """Shard the blocks, and the whole."""
    for part in list(model)[:-1]:
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def stack(**options: Any) -> nn.Sequential:
    return nn.Sequential(Block(**options), nn.Linear(4, 3))


def plain(world: int, **options: Any) -> nn.Sequential:
    return shard(stack(), **options)


def uneven(world: int) -> nn.Sequential:
    """A model with a weight that is not trained, and layers that ranks share unevenly."""
    model = stack(width=7)
    model[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    return shard(model)


@cache
def mesh_in(group: Any, *shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))


def mesh(*shape: int) -> DeviceMesh:
    """A mesh of all ranks, the same for all modules of one world."""
    return mesh_in(dist.group.WORLD, *shape)


def replicated(world: int, **options: Any) -> nn.Sequential:
    return shard(stack(), mesh=mesh(2, world // 2), **options)


def parallel(world: int) -> nn.Sequential:
    """A model whose ranks share the layers in two ways."""
    model, axes = stack(), mesh(world // 2, 2)
    parallelize_module(model[0], axes["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model[1], axes["inner"], ColwiseParallel(output_layouts=Replicate()))
    return shard(model, mesh=axes["outer"])


def recomputing(world: int) -> nn.Sequential:
    return shard(nn.Sequential(Block(recomputes=True), checkpoint_wrapper(Block()), nn.Linear(4, 3)))


def prefetching(world: int) -> nn.Sequential:
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 3))
    first, second, third, _ = list[Any](shard(model))
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    return model


def tied(world: int) -> nn.Sequential:
    """A model whose last layer has the weight of the first; one group has both."""
    model = nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    fully_shard([model[0], model[2]])
    fully_shard(model[1])
    fully_shard(model)
    return model


class Sent16(Tensor):
    """A weight that ranks send each other in 16 bits."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, held.size(), held.stride(), dtype=held.dtype, device=held.device)
        made.held = held
        return made

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        return (self.held.bfloat16(),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        if out is None:
            made = gathered[0].to(dtype)
            return made, (gathered[0], made)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            return out.copy_(gathered[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        held = pytree.tree_map_only(Sent16, lambda tensor: tensor.held, (args, kwargs or {}))
        returned = func(*held[0], **held[1])
        return args[0] if func._schema.is_mutable else pytree.tree_map_only(Tensor, cls, returned)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], metadata: None, size: Any, stride: Any) -> Sent16:
        return Sent16(inner["held"])  # type: ignore[no-any-return]


def sent_in_16_bits(world: int) -> nn.Sequential:
    model: Any = stack()
    model[0].up.weight = nn.Parameter(Sent16(model[0].up.weight.detach()))
    return shard(model)


class Step:
    """A training step. It returns the loss and this rank's shards of the parameters."""

    captured: Any = None  # the model, if it alone is captured

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def gradients(self, x: Tensor) -> Tensor:
        loss = (self.captured or self.model)(x).square().mean()
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.optimizer.zero_grad()
        loss = self.gradients(x)
        self.optimizer.step()
        local = (parameter.to_local().detach() for parameter in self.model.parameters())
        return [loss, *(getattr(shard, "held", shard).clone() for shard in local)]


class Clipped(Step):
    def gradients(self, x: Tensor) -> Tensor:
        super().gradients(x)
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        return norm.full_tensor()  # type: ignore[no-any-return]


class Accumulated(Step):
    def gradients(self, x: Tensor) -> Tensor:
        super().gradients(x)
        return super().gradients(x * 2)


class ReducedOnce(Step):
    def gradients(self, x: Tensor) -> Tensor:
        self.model.set_requires_gradient_sync(False)
        super().gradients(x)
        self.model.set_requires_gradient_sync(True)
        return super().gradients(x * 2)


class KeptGathered(Step):
    def gradients(self, x: Tensor) -> Tensor:
        self.model.set_reshard_after_backward(False)
        super().gradients(x)
        self.model.set_reshard_after_backward(True)
        return super().gradients(x * 2)


class LeavesGradients(Step):
    """A step whose gradients are reduced by the next one."""

    def __call__(self, x: Tensor) -> list[Tensor]:
        self.model.set_requires_gradient_sync(True)
        returned = super().__call__(x)
        self.model.set_requires_gradient_sync(False)
        super().gradients(x * 2)
        return returned


class LeavesPartlyReduced(Step):
    def __call__(self, x: Tensor) -> list[Tensor]:
        self.model.set_requires_all_reduce(True)
        returned = super().__call__(x)
        self.model.set_requires_all_reduce(False)
        super().gradients(x * 2)
        return returned


class Evaluated(Clipped):
    """A step, then a forward that leaves the outermost parameters gathered."""

    def __call__(self, x: Tensor) -> list[Tensor]:
        returned = super().__call__(x)
        with torch.no_grad():
            return [*returned, (self.captured or self.model)(x)]


class OnlyEvaluated(Step):
    def __call__(self, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [(self.captured or self.model)(x)]


@dataclass(frozen=True)
class Case:
    """A kind of step, its optimizer, and a function of the number of ranks that makes the module."""

    step: type[Step] = Step
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    make: Callable[[int], nn.Module] = plain

    def on(self, world: int) -> Step:
        torch.manual_seed(0)
        model = self.make(world)
        return self.step(model, self.optimizer(model.parameters(), lr=0.05))


SGD = torch.optim.SGD
CASES = {
    "uneven, in part frozen, clipped, evaluated": Case(Evaluated, SGD, uneven),
    "replicated in bf16": Case(LeavesPartlyReduced, SGD, partial(replicated, mp_policy=BF16)),
    "tensor parallel": Case(Clipped, SGD, parallel),
    "recomputing": Case(make=recomputing),
    "leaves gradients": Case(LeavesGradients, SGD),
}
MORE = {
    "adamw": Case(),
    "accumulated": Case(Accumulated, SGD),
    "reduced once": Case(ReducedOnce, make=partial(plain, mp_policy=BF16)),
    "prefetching": Case(optimizer=SGD, make=prefetching),
    "tied": Case(optimizer=SGD, make=tied),
    "kept gathered": Case(KeptGathered, SGD),
    "never resharded": Case(Evaluated, make=partial(plain, reshard_after_forward=False)),
    "resharded for fewer": Case(make=partial(plain, reshard_after_forward=2)),
    "bf16 leaves gradients": Case(LeavesGradients, make=partial(plain, mp_policy=BF16)),
    "replicated, evaluated": Case(Evaluated, make=replicated),
    "sent in 16 bits": Case(optimizer=SGD, make=sent_in_16_bits),
    "only evaluated": Case(OnlyEvaluated),
    "tensor parallel, evaluated": Case(Evaluated, make=parallel),
}


UNREDUCED = (ReducedOnce, KeptGathered, LeavesGradients, LeavesPartlyReduced)  # refused with a backward outside


def shards(held: Any) -> Any:
    return pytree.tree_map_only(DTensor, lambda shard: shard.to_local().detach().clone(), held)


def program(name: str, rank: int, world: int, group: Any) -> Program:
    """A step of a model that never ran before."""
    step, x = {**CASES, **MORE}[name].on(world), torch.arange(48.0).view(6, 8).sin()[:, ::2] + rank
    return Program(step, lambda call: (x + call,))


def saved(rank: int, world: int, group: Any) -> Program:
    """A step; after each, the state dicts, and what another model loads from a checkpoint."""
    case = Case(optimizer=partial(SGD, momentum=0.9))
    step, x = case.on(world), torch.arange(24.0).view(6, 4).sin() + rank
    loaded = case.on(world)
    folder = tempfile.TemporaryDirectory()
    place = [folder.name]
    dist.broadcast_object_list(place)

    def left(_: Any = folder) -> Any:  # which is there as long as this
        states = get_model_state_dict(step.model), get_optimizer_state_dict(step.model, step.optimizer)
        save({"model": states[0]}, checkpoint_id=place[0])
        read = {"model": get_model_state_dict(loaded.model)}
        load(read, checkpoint_id=place[0])
        return shards([*states, read])

    return Program(step, lambda call: (x + call,), left=left)


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_eagers_on_each_rank(name: str) -> None:
    assert_right(partial(program, name))


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].step not in UNREDUCED])
def test_a_backward_outside_of_the_program_equals_eagers_on_each_rank(name: str) -> None:
    assert_right(partial(program, name), system="forward")


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [name for name in MORE if MORE[name].step not in UNREDUCED])
def test_more_backwards_outside_of_programs(name: str, world: int) -> None:
    assert_right(partial(program, name), world, system="forward")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaves gradients", "replicated in bf16"])
def test_a_backward_outside_that_does_not_reduce_is_refused(name: str) -> None:
    assert all("reduce" in message for message in refusals(partial(program, name), "forward"))


def evaluated_between(rank: int, world: int, group: Any) -> Program:
    """A step, and an evaluation in eager after each call."""
    step, x = Case(optimizer=SGD).on(world), torch.arange(24.0).view(6, 4).sin() + rank

    def left() -> Tensor:
        with torch.no_grad():
            return step.model(x)  # type: ignore[no-any-return]

    return Program(step, lambda call: (x + call,), left=left)


@pytest.mark.slow
def test_evaluations_in_eager_between_captured_steps() -> None:
    assert_right(evaluated_between)


@pytest.mark.slow
def test_checkpoints_of_captured_steps_are_eagers() -> None:
    assert_right(saved)


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_more_steps_equal_eagers_on_each_rank(name: str) -> None:
    assert_right(partial(program, name))


@pytest.mark.full
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_a_step_equals_eagers_on_four_ranks(name: str) -> None:
    assert_right(partial(program, name), 4)


class Counted(CommDebugMode):
    """Eager's collectives: by torch's own count, and each with its kind and its bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []
        self.advanced_module_tracker.module_parents_dict[""] = []  # of no module

    def __enter__(self) -> Any:  # without the hooks on modules, which fail where a step has two forwards
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *error: object) -> None:
        TorchDispatchMode.__exit__(self, *error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned: Any = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        row = None if func.namespace == "fsdp" else collective(func)
        if returned is not NotImplemented and row is not None and row.way not in (Way.WAIT, Way.LOCAL):
            self.seen.append((row.kind, max(map(size, [*args, returned]))))
        return returned


def size(held: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor))


COUNTED = {**CASES, **{name: MORE[name] for name in ("reduced once", "tied")}}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", COUNTED)
def test_a_graph_communicates_as_often_and_as_much_as_eager(name: str) -> None:
    x = torch.ones(6, 4)
    with fake_world(4, 0):
        step, counted = COUNTED[name].on(4), Counted()
        captured = capture(step, (x,))
        made = [(entry.kind, entry.bytes) for entry in verify.collectives(captured.graph)]
        with counted:
            step(x)
        assert counted.get_total_counts() == len(made)
        assert counted.seen == made


def test_a_graph_of_steps_is_functional() -> None:
    x = torch.ones(6, 4)
    with fake_world(2, 0):
        captured = capture(Case(optimizer=SGD).on(2), (x,))
        verify.assert_functional(captured.graph_module, "mutations_and_views")
        for _ in range(3):
            captured(x)
        assert len(captured.variants) == 1  # with and without gradients


# From torch 2.15 on, a gathered parameter owns the gradients that are not reduced, also while it is not gathered.
OWN_GRADIENTS = "unsharded_accumulated_grad" in vars(FSDPParam)


def test_what_a_module_keeps_between_calls_is_captured_again() -> None:
    x = torch.ones(6, 4)
    with fake_world(2, 0):
        step = Case().on(2)
        captured = capture(step, (x,))
        _, *trained = captured(x)
        step.model.set_requires_gradient_sync(False)
        if OWN_GRADIENTS:
            with pytest.raises(UnsupportedProgramError, match="holds gradients that are not reduced"):
                captured(x)
        else:
            assert all(map(torch.equal, captured(x)[1:], trained))  # no gradient is reduced


def test_a_step_after_an_evaluation_is_captured_again() -> None:
    x = torch.ones(6, 4)
    with fake_world(2, 0):
        step = Case().on(2)
        captured = capture(step, (x,))
        with torch.no_grad():
            step.model(x)  # leaves the outermost parameters gathered
        if OWN_GRADIENTS:
            with pytest.raises(UnsupportedProgramError, match="still held"):
                captured(x)
        else:
            assert len(captured(x)) == 7


def test_what_a_call_cannot_put_back_is_refused() -> None:
    x = torch.ones(6, 4)
    with fake_world(2, 0), pytest.raises(UnsupportedProgramError, match="offloads parameters"):
        capture(Case(make=partial(plain, offload_policy=CPUOffloadPolicy(pin_memory=False))).on(2), (x,))
    with fake_world(4, 0), pytest.raises(UnsupportedProgramError, match="shared by fewer ranks"):
        capture(Case(OnlyEvaluated, make=partial(plain, reshard_after_forward=2)).on(4), (x,))


def test_another_thread_cannot_run_a_module_that_is_captured() -> None:
    x = torch.ones(6, 4)
    with fake_world(2, 0), ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # starts its thread
        step = Case().on(2)

        def run(x: Tensor) -> Any:
            error = pool.submit(step.model, x).exception()
            return step(x), str(error)

        captured = capture(run, (x,))
        assert "another thread is capturing" in captured(x)[1]
        assert pool.submit(step.model, x).exception() is None
