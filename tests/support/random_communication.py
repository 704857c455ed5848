"""Random programs that communicate: collectives, branches that differ by rank, sub-groups, messages and errors.

In: a seed. Out: a program, as :mod:`tests.support.ranks` takes it. Guarantees: ranks communicate in an order in which
eager finishes: what branches on values of one rank communicates nothing.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.communicating import pairs
from tests.support.ranks import Program

Step = Callable[["Machine", Tensor], Tensor]


@dataclass(frozen=True)
class Machine:
    """One rank among others."""

    rank: int
    world: int
    pair: Any  # the group of two that it belongs to


def _all_reduce(machine: Machine, x: Tensor) -> Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y % 17


def _all_reduce_in_place(machine: Machine, x: Tensor) -> Tensor:
    dist.all_reduce(x[1:], op=dist.ReduceOp.MAX)
    return x


def _all_reduce_later(machine: Machine, x: Tensor) -> Tensor:
    y = x + machine.rank
    work = dist.all_reduce(y, op=dist.ReduceOp.MIN, async_op=True)
    x = x * 2 % 13
    work.wait()
    return x + y


def _all_reduce_of_a_pair(machine: Machine, x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y, group=machine.pair)
    return y % 11


def _all_gather(machine: Machine, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(machine.world)]
    dist.all_gather(parts, x)
    return parts[0] - parts[-1]


def _broadcast(machine: Machine, x: Tensor) -> Tensor:
    dist.broadcast(x[:2], 1)
    return x


def _barrier(machine: Machine, x: Tensor) -> Tensor:
    dist.barrier()
    return x + 1


def _ring(machine: Machine, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    receive = dist.P2POp(dist.irecv, y, (machine.rank - 1) % machine.world)
    send = dist.P2POp(dist.isend, x, (machine.rank + 1) % machine.world)
    for work in dist.batch_isend_irecv([receive, send]):
        work.wait()
    return x + y


def _by_rank(machine: Machine, x: Tensor) -> Tensor:
    return x * 2 % 19 if (x.sum() + machine.rank) % 2 == 0 else x + 3


def _by_a_sum(machine: Machine, x: Tensor) -> Tensor:
    total = x.sum()
    dist.all_reduce(total)
    if total % 3 == 0:
        dist.barrier()
        return x - 1
    if total % 3 == 1:
        return _all_reduce(machine, x)
    return x


def _caught(machine: Machine, x: Tensor) -> Tensor:
    try:
        return x.view(3, 5)
    except RuntimeError:
        return x + 2


STEPS: list[Step] = [
    *(_all_reduce, _all_reduce_in_place, _all_reduce_later, _all_reduce_of_a_pair, _all_gather, _broadcast, _barrier),
    *(_ring, _by_rank, _by_rank, _by_rank, _by_a_sum, _by_a_sum, _caught),
]


def made(seed: int, rank: int, world: int, group: Any) -> Program:
    """The program of a seed on one rank."""
    chosen = random.Random(seed)
    steps = chosen.choices(STEPS, k=chosen.randint(2, 7))
    machine = Machine(rank, world, pairs(world)[rank // 2])

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(machine, x)
        return x

    return Program(run, lambda call: (torch.arange(4.0) + 3 * rank + 5 * call + seed % 7,), calls=5)


def program(seed: int) -> Callable[..., Program]:
    """The maker of a program, by its seed."""
    return functools.partial(made, seed)
