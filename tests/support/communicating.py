"""Programs that communicate, for :mod:`tests.support.ranks`: each makes its function and arguments for one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn_functional
from torch import Tensor

from tests.support.ranks import Makes, Program

PROGRAMS: dict[str, Makes] = {}


def _program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function of a rank, a world, a group and one tensor, which differs by rank and call."""

    def made(rank: int, world: int, group: Any) -> Program:
        def run(x: Tensor) -> Any:
            return function(rank, world, group, x)

        return Program(run, lambda call: (torch.arange(4.0 * world) + 10 * rank + call,))

    made.__name__ = made.__qualname__ = f"made_{function.__name__}"
    globals()[made.__name__] = made
    PROGRAMS[function.__name__] = made
    return function


@_program
def all_reduce(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x * 2
    returned = dist.all_reduce(y)
    return y + 1, returned


@_program
def all_reduce_of_the_input(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.all_reduce(x)


@_program
def all_reduce_max_of_a_view(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x.view(2, -1) * 1
    dist.all_reduce(y[1], op=dist.ReduceOp.MAX)
    return y


@_program
def all_reduce_of_a_transposed_tensor(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x.view(2, -1).clone().t().contiguous().t()
    dist.all_reduce(y[:, 0].contiguous(), op=dist.ReduceOp.MIN)
    z = y.contiguous()
    dist.all_reduce(z, op=dist.ReduceOp.PRODUCT)
    return y, z


@_program
def all_reduce_later(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y, z = x * 2, x + 1
    first = dist.all_reduce(y, async_op=True)
    second = dist.all_reduce(z, async_op=True)
    w = x * 3
    waited = second.wait()
    first.wait()
    first.wait()
    return y + w, z, waited


@_program
def all_reduce_by_a_future(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x * 2
    future = dist.all_reduce(y, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    return doubled, y


@_program
def all_reduce_never_waited_for(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.all_reduce(x, async_op=True)
    dist.barrier()


@_program
def all_gather(rank: int, world: int, group: Any, x: Tensor) -> Any:
    parts = [torch.zeros_like(x) for _ in range(world)]
    returned = dist.all_gather(parts, x * 2)
    return parts, returned


@_program
def all_gather_of_numbers(rank: int, world: int, group: Any, x: Tensor) -> Any:
    parts = [torch.zeros(()) for _ in range(world)]
    dist.all_gather(parts, x.sum())
    return parts


@_program
def all_gather_into_views(rank: int, world: int, group: Any, x: Tensor) -> Any:
    whole = x.new_zeros(world, x.numel())
    dist.all_gather(list(whole.unbind(0)), x)
    return whole * 2


@_program
def all_gather_into_tensor(rank: int, world: int, group: Any, x: Tensor) -> Any:
    whole = x.new_zeros(world * x.numel() // 2, 2)
    dist.all_gather_single(whole, x.view(-1, 2))
    return whole


@_program
def all_gather_coalesced(rank: int, world: int, group: Any, x: Tensor) -> Any:
    parts = [[torch.zeros(x.numel()), torch.zeros(2)] for _ in range(world)]
    dist.all_gather_coalesced(parts, [x, x[:2].clone()])
    return parts


@_program
def all_reduce_coalesced(rank: int, world: int, group: Any, x: Tensor) -> Any:
    parts = [x * 2, x[:2] + 1]
    dist.all_reduce_coalesced(parts)
    return parts


@_program
def coalescing(rank: int, world: int, group: Any, x: Tensor) -> Any:
    parts = [x * 2, x + 1]
    with dist.distributed_c10d._coalescing_manager():
        for part in parts:
            dist.all_reduce(part)
    gathered = [x.new_zeros(world * x.numel()) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager():
        for into, part in zip(gathered, parts, strict=True):
            dist.all_gather_single(into, part)
    return parts, gathered


@_program
def reduce_scatter(rank: int, world: int, group: Any, x: Tensor) -> Any:
    part = torch.zeros(4)
    returned = dist.reduce_scatter(part, [piece.clone() for piece in x.chunk(world)])
    return part, returned


@_program
def reduce_scatter_tensor(rank: int, world: int, group: Any, x: Tensor) -> Any:
    part, row = torch.zeros(4), torch.zeros(1, 4)
    dist.reduce_scatter_single(part, x)
    dist.reduce_scatter_single(row, x.view(world, 4) * 2)
    return part, row


@_program
def broadcast(rank: int, world: int, group: Any, x: Tensor) -> Any:
    returned = dist.broadcast(x[:2], src=1)
    return returned, x * 2


@_program
def reduce(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x * 2
    returned = dist.reduce(y, dst=1)
    return (y if rank == 1 else None), returned


@_program
def gather(rank: int, world: int, group: Any, x: Tensor) -> Any:
    parts = [torch.zeros_like(x) for _ in range(world)] if rank == 0 else None
    dist.gather(x * 2, parts, dst=0)
    return parts


@_program
def scatter(rank: int, world: int, group: Any, x: Tensor) -> Any:
    part = torch.zeros(4)
    dist.scatter(part, list(x.chunk(world)) if rank == 1 else None, src=1)
    return part + 1


@_program
def all_to_all_single(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = torch.zeros_like(x)
    dist.all_to_all_single(y, x)
    return y * 2


@_program
def all_to_all_uneven(rank: int, world: int, group: Any, x: Tensor) -> Any:
    rows = x.view(-1, 2)
    sent = [rows.size(0) - (world - 1), *[1] * (world - 1)]
    received = [sent[rank]] * world
    y = x.new_zeros(sum(received), 2)
    dist.all_to_all_single(y, rows, received, sent)
    return y


@_program
def all_to_all(rank: int, world: int, group: Any, x: Tensor) -> Any:
    parts = [torch.zeros(4) for _ in range(world)]
    dist.all_to_all(parts, list((x * 2).chunk(world)))
    return parts


@_program
def barrier(rank: int, world: int, group: Any, x: Tensor) -> Any:
    returned = dist.barrier()
    return x + 1, returned


@_program
def send_and_receive(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = torch.zeros_like(x)
    if rank % 2 == 0:
        sent = dist.send(x * 2, rank + 1)
        source = dist.recv(y, rank + 1)
    else:
        source = dist.recv(y, rank - 1)
        sent = dist.send(y + x, rank - 1)
    return y, sent, source


@_program
def exchange(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = torch.zeros_like(x)
    ops = [
        dist.P2POp(dist.irecv, y, (rank - 1) % world),
        dist.P2POp(dist.isend, x * 2, (rank + 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y + 1


@_program
def send_between_a_collective_and_its_wait(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y, z = x * 2, torch.zeros_like(x)
    work = dist.all_reduce(y, async_op=True) if rank == 0 else None
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(z, 0)
    if work is None:
        dist.all_reduce(y)
    else:
        work.wait()
    return y, z


@_program
def by_a_reduced_sum(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x * 2
    dist.all_reduce(y)
    return y + 1 if y.sum() > 30 * world * world else y - 1


@_program
def decides_by_what_ranks_have(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x * 2
    dist.all_reduce(y)
    has = torch.zeros(world)
    has[rank] = rank
    dist.all_reduce(has)
    return y + 1 if has[-1] > 0 else y


@_program
def decides_by_rank(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x * 2 if x[0] > 10 else x - 1
    dist.all_reduce(y)
    return y * 10 if y.sum() > 50 * world else y


@_program
def decides_by_rank_functional(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x * 2 if x[0] > 10 else x - 1
    y = functional.all_reduce(y, "sum", group)
    return y * 10 if y.sum() > 50 * world else y


@_program
def decides_otherwise_in_each_call(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.broadcast(x, 0)
    first = (x[0] + rank) % 2 == 0
    y = x + 1 if first else x * 3
    dist.barrier()
    dist.all_reduce(y)
    z = y if y.sum() % 3 == 0 else -y
    dist.all_reduce(z, op=dist.ReduceOp.MAX)
    return z if z[0] > 20 else z + 1


@_program
def experts(rank: int, world: int, group: Any, x: Tensor) -> Any:
    choice = (x.sum().long() + torch.arange(x.numel())) % world
    sent = torch.bincount(choice, minlength=world)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    counts = received.tolist()
    y = x.new_empty(sum(counts))
    dist.all_to_all_single(y, x[choice.argsort(stable=True)], counts, sent.tolist())
    return y * 2


@_program
def communicates_on_one_branch(rank: int, world: int, group: Any, x: Tensor) -> Any:
    if x[-1] - 10 * rank < 4 * world:  # in the first call alone
        return x + 1
    dist.all_reduce(x)
    return x * 2 if x.sum() > 0 else x


@_program
def in_a_loop(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x.clone()
    for _ in range(4):
        dist.all_reduce(y)
        if y.max() > 100 * world:
            break
    return y


@_program
def torch_distributed_nn(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x.clone().requires_grad_()
    z = torch.cat(nn_functional.all_gather(y * 2)) * nn_functional.all_reduce(y).sum()
    (gradient,) = torch.autograd.grad(z.sin().sum(), y)
    return z, gradient


@_program
def gradients_inside(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x.clone().requires_grad_()
    z = functional.all_gather_tensor_autograd((y * 2).sin(), 0, group)
    z = functional.reduce_scatter_tensor_autograd(z.exp(), "sum", 0, group)
    (gradient,) = torch.autograd.grad(z.sin().sum(), y)
    return z, gradient


@functools.cache
def pairs(world: int) -> list[Any]:
    return [dist.new_group([first, first + 1]) for first in range(0, world, 2)]


def sub_group(rank: int, world: int, group: Any) -> Program:
    """Each rank communicates with itself and its neighbour."""
    own = pairs(world)[rank // 2]

    def run(x: Tensor) -> Any:
        y = x * 2
        dist.all_reduce(y, group=own)
        dist.broadcast(x, src=rank // 2 * 2, group=own)
        return y

    return Program(run, lambda call: (torch.arange(4.0) + rank + call,))


PROGRAMS["sub_group"] = sub_group


@_program
def raises_after_a_collective(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.all_reduce(x)
    if x[0] > 10 * sum(range(world)):
        raise ValueError("the sum is too large")


RIGHT = [*PROGRAMS]
# They branch on tensor values, which `make_fx` does not do.
BRANCHING = [
    *("by_a_reduced_sum", "communicates_on_one_branch", "experts", "in_a_loop", "raises_after_a_collective"),
    *(name for name in RIGHT if name.startswith("decides")),
]


@_program
def receive_from_anyone(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.recv(x)


@_program
def all_gather_objects(rank: int, world: int, group: Any, x: Tensor) -> Any:
    objects = [None] * world
    dist.all_gather_object(objects, rank)
    return objects


@_program
def monitored_barrier(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.monitored_barrier()


@_program
def all_reduce_sparse(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x.to_sparse()
    dist.all_reduce(y)
    return y.to_dense()


@_program
def refused_on_one_rank(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.all_reduce(x)
    if rank == 1:
        dist.monitored_barrier()
    dist.all_reduce(x)


@_program
def in_another_order(rank: int, world: int, group: Any, x: Tensor) -> Any:
    y = x + 1
    if rank == 0:
        dist.all_reduce(x)
        dist.broadcast(y, 0)
    else:
        dist.broadcast(y, 0)
        dist.all_reduce(x)


@_program
def asked_by_one_rank(rank: int, world: int, group: Any, x: Tensor) -> Any:
    dist.all_reduce(x)
    return x + 1 if rank == 0 and x.sum() > 0 else x


REFUSED = [name for name in PROGRAMS if name not in RIGHT]
