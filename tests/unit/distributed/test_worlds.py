"""Many ranks in one process: functional collectives give what eager's give, and graphs name the ranks of groups."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from functionalize import capture
from functionalize._torch import pytree
from functionalize._torch.distributed.worlds import AllRanks, fake_world
from functionalize._torch.subclasses.sharding import forget_plans
from functionalize.cli.ranks import rank_program
from functionalize.errors import UnsupportedProgramError
from functionalize.ops.collectives import ROWS, Way
from functionalize.report import build, page
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.verify import Volume, assert_functional, collectives, volumes
from tests.support.communicating import PROGRAMS
from tests.support.ranks import Program

pytestmark = pytest.mark.filterwarnings("ignore:.*will be deprecated:FutureWarning")
# Programs of `tests.support.communicating`, which rank 1 runs on behalf of all.
ALIKE = (
    *("all_reduce", "all_reduce_max_of_a_view", "all_reduce_coalesced", "all_reduce_later", "all_gather"),
    *("all_gather_of_numbers", "all_gather_into_tensor", "coalescing", "reduce_scatter_tensor", "broadcast", "scatter"),
    *("all_to_all_single", "all_to_all", "barrier", "reduce_scatter_coalesced"),
)
UNKNOWN = ("reduce", "gather", "reduce_scatter", "all_gather_coalesced", "send_and_receive")  # to torch's mode


def reduce_scatter_coalesced(rank: int, world: int, group: Any) -> Program:
    """A program that gloo has no collective for."""

    def run(x: Tensor) -> Any:
        parts = [torch.zeros(4), torch.zeros(4)]
        with dist.distributed_c10d._coalescing_manager():
            for part, whole in zip(parts, (x, x * 2), strict=True):
                dist.reduce_scatter_single(part, whole)
        return parts

    return Program(run, lambda call: (torch.arange(4.0 * world),))


MAKES = PROGRAMS | {"reduce_scatter_coalesced": reduce_scatter_coalesced}


def captured(name: str, world: int) -> tuple[Any, CapturedProgram]:
    """A program that does not write to its input, and its capture on rank 1."""
    made = MAKES[name](1, world, dist.group.WORLD)

    def run(x: Tensor) -> Any:
        return made.function(x.clone())

    return run, capture(run, made.arguments(0))


def on_all_ranks(function: Any, world: int) -> list[list[Tensor]]:
    """For each rank, the tensors that a function returns."""
    mode, inputs = AllRanks(world), [torch.arange(4.0 * world) + 10 * rank for rank in range(world)]
    with mode.mode, torch.no_grad():
        returned = pytree.tree_leaves(function(mode.tensor(inputs)))
    tensors = [value for value in returned if isinstance(value, Tensor)]
    return [[mode.on_rank(tensor, rank) for tensor in tensors] for rank in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 64])
@pytest.mark.parametrize("name", ALIKE)
def test_a_functional_collective_gives_what_eager_gives_on_all_ranks(name: str, world: int) -> None:
    with fake_world(world, 1):
        run, program = captured(name, world)
        wanted, got = (on_all_ranks(function, world) for function in (run, program.graph_module))
    assert wanted[0]
    assert all(torch.equal(*pair) for pairs in map(zip, wanted, got) for pair in pairs)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_collective_that_all_ranks_cannot_run_in_one_process_is_refused(name: str) -> None:
    with fake_world(2, 1):
        run, _ = captured(name, 2)
        with pytest.raises((NotImplementedError, AttributeError), match=r"not implemented|not support|__src_rank__"):
            on_all_ranks(run, 2)


def test_each_twin_is_in_a_program() -> None:
    found = set()
    with fake_world(2, 1):
        for name in (*ALIKE, *UNKNOWN):
            _, program = captured(name, 2)
            ops: list[Any] = [entry.node.target for entry in collectives(program.graph)]
            found |= {op.name().partition(".")[0] for op in ops}
    assert {row.twin for row in ROWS.values() if row.way is Way.TWIN} <= found


@pytest.mark.parametrize("computed", [False, True])
def test_graphs_of_ranks_are_one_where_torch_computes_coordinates(computed: bool) -> None:
    words, weight, programs = torch.arange(16), torch.arange(64.0).view(16, 4), []
    later: Any = torch.compiler.config  # has the option from torch 2.15 on
    config = later if hasattr(later, "compile_on_one_rank") else torch.distributed.config
    for rank in reversed(range(4)):
        with fake_world(4, rank), config.patch(compile_on_one_rank=computed):
            forget_plans()
            table = nn.Embedding(16, 4)
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
            parallelize_module(table, mesh, RowwiseParallel(input_layouts=Replicate()))
            program = capture(lambda x, table=table: table(x), (words,))
            assert [entry.axis for entry in collectives(program.graph)] == ["all ranks"]
            programs.append(rank_program(program))
            if rank == 0:
                taken, all_ranks = program.flat_inputs(words), AllRanks(4)
                shards = [weight.chunk(4) if value.shape == (4, 4) else [value] * 4 for value in taken]
                with all_ranks.mode, torch.no_grad():
                    (made,) = program.graph_module(*map(all_ranks.tensor, shards))
                of_ranks = [all_ranks.on_rank(made, number) for number in range(4)]
    assert len({program.code for program in programs}) == 1
    assert (len({program.numbers for program in programs}) == 1) is computed
    assert all(torch.equal(got, weight) for got in of_ranks) is computed


@pytest.fixture
def layered() -> CapturedProgram:
    """A program of rank 3 of 8, whose world is over."""
    with fake_world(8, 3):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))

        def run(x: Tensor) -> Tensor:
            for axis in ("tp", "dp", "tp"):
                x = functional.all_reduce(x * 2, "sum", mesh[axis].get_group())
            return x

        return capture(run, (torch.ones(4),))


def test_a_graph_says_which_ranks_are_in_a_group_when_the_group_is_gone(layered: CapturedProgram) -> None:
    entries = collectives(layered.graph)
    assert [(entry.axis, entry.ranks) for entry in entries[:2]] == [("tp", (2, 3)), ("dp", (1, 3, 5, 7))]
    assert volumes(entries) == [Volume("all_reduce", "tp", 2, 2, 32), Volume("all_reduce", "dp", 4, 1, 16)]


def test_a_file_says_which_ranks_are_in_a_group(layered: CapturedProgram) -> None:
    file = io.BytesIO()
    torch.export.save(layered.to_exported_program(), file)
    loaded = torch.export.load(io.BytesIO(file.getvalue()))
    ranks = [entry.ranks for entry in collectives(loaded.graph)]
    assert ranks == [entry.ranks for entry in collectives(layered.graph)]


def test_a_report_has_a_lane_for_each_axis(layered: CapturedProgram) -> None:
    report = build(layered)
    assert [(entry.kind, entry.axis) for entry in report.collectives] == [
        *[("all_reduce", axis) for axis in ("tp", "dp", "tp")]
    ]
    text = page(report)
    assert "tp, 2 ranks" in text and "dp, 4 ranks" in text and text.count('class="mark all_reduce"') == 3


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_step_on_fake_parameters_of_two_axes_is_one_graph() -> None:
    benchmark = pytest.importorskip("benchmarks.distributed")
    with fake_world(16, 11):
        shape = benchmark.Shape(layers=2, width=64, heads=8, key_heads=8, hidden=128, words=128)
        training = benchmark.build(shape, 16)
        program = capture(training.step, training.args)
    counts = {(row.kind, row.axis): row.count for row in volumes(collectives(program.graph))}
    # Gathered for forward and, but for the outermost module's, again for backward.
    assert counts[("all_gather", "dp")] == 5 and counts[("reduce_scatter", "dp")] == 3
    assert counts[("all_reduce", "tp")] == 2 * 4 * 2
    assert_functional(program.graph_module, "mutations_and_views")
    assert {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")} == {
        *("aten", "_c10d_functional", "profiler")
    }


def test_a_mesh_that_the_program_makes_is_refused() -> None:
    def run(x: Tensor) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None).to_local()

    with fake_world(2, 0), pytest.raises(UnsupportedProgramError, match="makes a group of processes, or a mesh"):
        capture(run, (torch.ones(4),))


def test_a_slice_of_a_mesh_is_none_that_the_program_makes() -> None:
    x = torch.arange(8.0)
    with fake_world(4, 1):
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

        def run(x: Tensor) -> Any:
            return distribute_tensor(x, whole["inner"], [Shard(0)], src_data_rank=None).to_local() * 2

        assert torch.equal(capture(run, (x,))(x), run(x))
