"""A training step of a large Llama on one rank of many, captured as one graph on one machine: seconds, memory, volume.

Tensor parallelism within 8 ranks and `fully_shard` over the others; forward, backward and AdamW, as in any step but the
first: parameters have gradients, and the optimizer has its state. All tensors are fake, and the other ranks do not
exist. Smaller models on ranks of all coordinates then show how many different programs the world runs.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import environment
from functionalize import capture
from functionalize._torch.distributed.worlds import fake_world
from functionalize.cli.ranks import RankProgram, in_processes, rank_program, volume_lines
from functionalize.verify import collectives, volumes

TENSOR_RANKS = 8
SEQUENCE = 2048


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama; those of the one with 70 billion parameters."""

    layers: int = 80
    width: int = 8192
    heads: int = 64
    key_heads: int = 8
    hidden: int = 28672
    words: int = 128256

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.width // self.heads


class Attention(nn.Module):
    """Attention with fewer heads of keys than of queries, and rotated positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.query = _linear(shape.width, shape.heads * shape.head_width)
        self.key = _linear(shape.width, shape.key_heads * shape.head_width)
        self.value = _linear(shape.width, shape.key_heads * shape.head_width)
        self.out = _linear(shape.heads * shape.head_width, shape.width)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, cosines, sines), _rotated(key, cosines, sines)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(heads.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = _linear(shape.width, shape.hidden), _linear(shape.width, shape.hidden)
        self.down = _linear(shape.hidden, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(shape), MLP(shape)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """The model: from words to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = _linear(shape.width, shape.words)

    def forward(self, words: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat([-second, first], -1) * sines


@dataclass(frozen=True)
class Training:
    """A training step and its arguments."""

    step: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    parameters: int


def build(shape: Shape, ranks: int) -> Training:
    """The step of this rank, on fake tensors."""
    mesh = init_device_mesh("cpu", (ranks // TENSOR_RANKS, TENSOR_RANKS), mesh_dim_names=("dp", "tp"))
    fake = FakeTensorMode()
    with fake:
        model = Llama(shape)
        words = torch.zeros(1, SEQUENCE, dtype=torch.long)
        angles = torch.zeros(SEQUENCE, shape.head_width)
    count = sum(parameter.numel() for parameter in model.parameters())
    parallelize_module(model, mesh["tp"], _plan(shape))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with fake, torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.ones(()), **moments}

    def step(words: Tensor, targets: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(words, cosines, sines)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(step, (words, words, angles, angles), count)


def _plan(shape: Shape) -> dict[str, Any]:
    """Which layers are cut by columns, and which by rows."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in (f"layers.{number}" for number in range(shape.layers)):
        columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
        plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"{layer}.{name}": RowwiseParallel() for name in ("attention.out", "mlp.down")}
    return plan


def measure(shape: Shape, ranks: int, rank: int) -> None:
    """Capture the step of one rank, and print what it took and what it communicates."""
    with fake_world(ranks, rank):
        with _timed("building the model"):
            training = build(shape, ranks)
        with _timed("capturing a step"):
            program = capture(training.step, training.args)
        print(f"{training.parameters / 1e9:.1f} billion parameters, {shape.layers} layers; rank {rank} of {ranks}")
        print(f"{len(program.graph.nodes)} nodes")
        for line in volume_lines(volumes(collectives(program.graph))):
            print(line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)
    print(f"process: {time.process_time():.1f} s of the processor, {peak:.2f} GiB at most")


def distinct(ranks: int) -> None:
    """Print how many different programs the first and the last ranks of both axes run."""
    by_code: dict[str, list[RankProgram]] = {}
    asked = [Place(ranks, rank) for rank in (*range(TENSOR_RANKS), ranks - TENSOR_RANKS, ranks - 1)]
    for program in in_processes(_small, asked):
        by_code.setdefault(program.code, []).append(program)
    for programs in by_code.values():
        columns = [*zip(*(program.numbers for program in programs), strict=True)]
        differing = sum(len(set(column)) > 1 for column in columns)
        print(f"one program of {len(programs)} ranks: {differing} of its {len(columns)} numbers differ by rank")


@dataclass(frozen=True)
class Place:
    """A rank of a world."""

    ranks: int
    rank: int


def _small(place: Place) -> RankProgram:
    warnings.simplefilter("ignore")
    with fake_world(place.ranks, place.rank):
        training = build(Shape(layers=1), place.ranks)
        return rank_program(capture(training.step, training.args))


@contextmanager
def _timed(what: str) -> Iterator[None]:
    wall, start = time.perf_counter(), time.process_time()
    yield
    print(f"{what}: {time.process_time() - start:.1f} s of the processor, {time.perf_counter() - wall:.1f} s in all")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(environment())
    measure(Shape(options.layers), options.ranks, options.rank)
    distinct(options.ranks)


if __name__ == "__main__":
    main()
