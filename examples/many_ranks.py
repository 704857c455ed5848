"""A tensor-parallel module and a training step of `fully_shard`, captured on each rank.

Run it on two ranks: torchrun --nproc-per-node 2 examples/many_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from functionalize import capture
from functionalize.verify import collectives


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(perceptron(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def training_step() -> Callable[[Tensor, Tensor], Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = perceptron()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def main() -> None:
    dist.init_process_group("gloo")
    prints = dist.get_rank() == 0

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = tensor_parallel()
    with torch.no_grad():
        program = capture(model, (x,))
        equal = torch.equal(program(x), model(x))
    if prints:
        print(program.graph_module.code.strip())
        print("equal to eager:", equal)

    step = training_step()
    batch = [torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank() + n)) for n in range(2)]
    program = capture(step, (*batch,))
    losses = [program(*batch).item() for _ in range(3)]
    if prints:
        for communication in collectives(program.graph):
            print(communication.kind, communication.bytes)
        print("losses:", *(f"{loss:.3f}" for loss in losses))
    dist.barrier()  # so that no thread of gloo holds a tensor when the interpreter ends: pytorch issue 190489
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
