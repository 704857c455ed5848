"""Shards of deferred tensors: the part that a rank needs, bit for bit, and little memory beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import deferred_init, is_deferred, materialize_module, materialize_tensor
from functionalize.deferred.random.fills import fill_of
from functionalize.deferred.recording import Recording
from tests.support.deferred import pair

ROOT = Path(__file__).parents[3]


def written(made: Tensor) -> Tensor:
    made[2:5, 3:] = 1.0
    made[7] = 2.0
    made[:, 1] = 3.0
    made[:, 4::2] = 4.0
    return made


def chunked(made: Tensor) -> Tensor:
    for chunk in made.chunk(3):
        nn.init.xavier_normal_(chunk)
    return made


def scaled(made: Tensor) -> Tensor:
    made[1:6:2].mul_(2)
    made[:, 3].add_(1)
    made[4].div_(3)
    return made


WAYS: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: torch.empty(37, 23).uniform_(-1, 1),
    "normal": lambda: torch.empty(37, 23).normal_(2, 3),
    "whole_blocks": lambda: torch.randn(64, 8, 10) * 2 + 1,
    "transposed": lambda: torch.randn(9, 20).t(),
    "permuted": lambda: torch.randn(4, 6, 5).permute(2, 0, 1).contiguous(),
    "broadcast": lambda: torch.randn(13)[None] + torch.randn(20, 1),
    "half": lambda: torch.randn(40, 50).half(),
    "bfloat16": lambda: torch.randn(50, 33, dtype=torch.bfloat16),
    "double": lambda: torch.randn(30, 30, dtype=torch.float64),
    "viewed": lambda: torch.randn(6, 20).view(6, 4, 5),
    "written": lambda: written(torch.randn(10, 10)),
    "zeros": lambda: torch.zeros(5),
    "integers": lambda: torch.randint(0, 100, (30, 7)).float(),
    "few": lambda: torch.randn(3, 4),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(8, 8)),
    "trunc_normal": lambda: nn.init.trunc_normal_(torch.empty(30, 9)),
    "bernoulli": lambda: torch.empty(30, 7).bernoulli_(0.5),
    "exponential": lambda: torch.empty(30, 7).exponential_(),
    "joined": lambda: torch.cat([torch.randn(3, 4), torch.ones(2, 4)]),
    "strided_part": lambda: torch.randn(12, 12)[1:9:2, 2:8],
    "view_of_all": lambda: torch.randn(60).view(5, 4, 3),
    "flattened": lambda: torch.randn(6, 4, 5).flatten(1),
    "part_transposed": lambda: torch.randn(9, 20)[2:8, 3:].t(),
    "moved": lambda: torch.randn(4, 6, 5).permute(2, 0, 1),
    "row": lambda: torch.randn(4, 6, 5)[1],
    "with_a_dimension_of_one": lambda: torch.randn(4, 6).unsqueeze(1),
    "broadcast_view": lambda: torch.randn(4, 1).expand(4, 5),
    "drawn_in_chunks": lambda: chunked(torch.empty(13, 7)),
    "stacked": lambda: torch.stack([torch.randn(3, 4) for _ in range(5)], 1),
    "joined_in_columns": lambda: torch.cat([torch.randn(4, 3), torch.ones(4, 2), torch.randn(4, 5)], 1),
    "parts_scaled": lambda: scaled(torch.randn(8, 9)),
    "filled": lambda: torch.randn(5, 6).fill_(torch.tensor(3.0)),
    "embedding": lambda: nn.Embedding(33, 7, padding_idx=5).weight.detach(),
}


def check_shards(way: Callable[[], Tensor], worlds: tuple[int, ...]) -> None:
    eager, deferred = pair(lambda: nn.ParameterList([torch.rand(5), nn.Parameter(way())]))
    expected, tensor = eager[1], deferred[1]
    for world in worlds:
        for dim in range(expected.dim()):
            pieces = list(expected.detach().chunk(world, dim))
            for rank in reversed(range(world)):
                shard = materialize_tensor(tensor, shard=(dim, rank, world))
                assert type(shard) is nn.Parameter and shard.is_contiguous()
                assert shard.untyped_storage().nbytes() == shard.numel() * shard.itemsize
                assert shard is materialize_tensor(tensor, shard=(dim, rank, world))
                if rank < len(pieces):
                    assert torch.equal(shard, pieces[rank]), (dim, rank, world)
                else:
                    assert shard.size(dim) == 0
    assert is_deferred(tensor)
    whole = materialize_tensor(tensor)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("name", WAYS)
def test_shards(name: str) -> None:
    check_shards(WAYS[name], (1, 2, 3, 7))


@pytest.mark.slow(seconds=5)
def test_shards_of_large_tensors() -> None:
    check_shards(lambda: torch.randn(2000, 1501), (3,))
    check_shards(lambda: torch.empty(5, 3, 500_003).uniform_(), (2,))


def test_shards_after_materialization() -> None:
    _, deferred = pair(nn.Linear, 6, 4)
    materialize_module(deferred)
    assert materialize_tensor(deferred.weight, shard=(0, 1, 2)) is deferred.weight
    tensor = deferred_init(torch.arange, 10)
    whole = materialize_tensor(tensor)
    assert torch.equal(materialize_tensor(tensor, shard=(0, 1, 2)), whole[5:])
    for wrong in ((1, 0, 2), (0, 2, 2), (0, -1, 2)):
        with pytest.raises(ValueError, match="must be \\(dim, rank, world\\)"):
            materialize_tensor(tensor, shard=wrong)


MEMORY = """
import os, resource, torch
from torch import nn
from functionalize import deferred_init, materialize_tensor

def packed():
    weight = torch.empty(SIZE, SIZE)
    for part in weight.chunk(3):
        nn.init.xavier_uniform_(part)
    return weight

def written():
    weight = torch.randn(SIZE, SIZE)
    weight[:, 0], weight[5:9] = 0, 1
    return weight

SIZE = 4096
WAYS = [
    (0, lambda: nn.init.normal_(torch.empty(SIZE, SIZE)).mul_(2)),
    (1, lambda: nn.init.kaiming_uniform_(torch.empty(SIZE, SIZE))),
    (0, lambda: torch.zeros(SIZE, SIZE)),
    (0, lambda: torch.randn(SIZE, SIZE).t()),
    (0, lambda: torch.randn(SIZE, SIZE).half()),
    (0, packed),
    (0, written),
]
materialize_tensor(deferred_init(lambda: torch.randn(100, 100).mul_(2)), shard=(0, 1, 2))
for number, (dim, way) in enumerate(WAYS):
    if child := os.fork():  # so that the peak is of this shard alone
        assert os.waitpid(child, 0)[1] == 0, number
        continue
    weight = deferred_init(way)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shard = materialize_tensor(weight, shard=(dim, 3, 8))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert shard.numel() == SIZE * SIZE // 8
    os._exit(grown >= SIZE * SIZE * 4 * 5 // 8)  # the allocator may keep some of what was freed
"""


@pytest.mark.slow(seconds=10)
def test_memory_of_a_shard() -> None:
    subprocess.run([sys.executable, "-c", MEMORY], check=True, cwd=ROOT)


RANKS = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from functionalize import deferred_init, is_deferred, materialize_tensor

rank, world = map(int, sys.argv[1:3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)

def make():
    return nn.Sequential(nn.Embedding(21, 16), nn.Linear(16, 33), nn.LayerNorm(33), nn.Linear(33, 7))

torch.manual_seed(3)
model = deferred_init(make)
for module in model:
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, materialize_tensor(parameter, shard=(0, rank, world)))
assert not is_deferred(model)
held = sum(parameter.numel() for parameter in model.parameters())
torch.manual_seed(3)
eager = make()
total = sum(parameter.numel() for parameter in eager.parameters())
assert held < 0.6 * total, (held, total)
for shard, whole in zip(model.parameters(), eager.parameters()):
    pieces = whole.detach().chunk(world)
    gathered = [torch.empty_like(piece) for piece in pieces]
    if shard.shape == pieces[0].shape == pieces[-1].shape:
        dist.all_gather(gathered, shard.detach())
    else:
        for source, piece in enumerate(gathered):
            piece.copy_(shard.detach()) if source == rank else None
            dist.broadcast(piece, source)
    assert torch.equal(torch.cat(gathered), whole)
dist.barrier()
os._exit(0)  # gloo's threads may end after the interpreter does, which aborts a process that did all of its work
"""


@pytest.mark.slow(seconds=15)
def test_two_processes_hold_their_shards(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANKS]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store")], cwd=ROOT, **pipes) for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


def test_every_fill_of_torch_nn_is_drawn_in_parts() -> None:
    recording = Recording()
    made = recording.run(lambda: [torch.rand(40), torch.randn(40), torch.empty(40).uniform_(-2, 3)], (), {})
    fills = [fill_of(recording.cells[tensor.untyped_storage()._cdata].node) for tensor in made]
    assert [fill is not None and fill.per_element for fill in fills] == [1, 1, 1]
    assert [fill is not None and fill.draws for fill in fills] == [40, 56, 40]
