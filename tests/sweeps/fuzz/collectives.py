"""Random programs that communicate: collectives on several groups, decisions that differ by rank, exceptions.

In: a seed. Out: what `tests.support.ranks` runs on each rank. Guarantees: on all ranks a program starts the same
collectives in the same order, whatever branches a rank takes, so that eager never hangs. Limits: a branch communicates
only as the other one does, and a program that raises on one rank does so after its last collective.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

from tests.support.ranks import Makes, Program

dist: Any = torch.distributed
functional: Any = torch.distributed._functional_collectives  # its stubs want names of groups
linalg: Any = torch.linalg  # does not export its error

_SIZE = 4  # of the tensor that goes from step to step
_BOUND = 13.0  # its elements stay below


@dataclass(frozen=True)
class Step:
    """One step of a program: a function of `STEPS`, the group that it uses, and a number that it compares with."""

    name: str
    group: int
    threshold: float


@dataclass(frozen=True)
class World:
    """The groups of a rank, in the order in which steps count them."""

    size: int
    groups: Sequence[Any]


Run = Callable[[World, Step, Tensor], Tensor]
STEPS: dict[str, Run] = {}


def _step(function: Run) -> Run:
    STEPS[function.__name__] = function
    return function


# Steps that decide, otherwise on each rank


@_step
def branch(world: World, step: Step, y: Tensor) -> Any:
    return y * 2 if y.sum() > step.threshold * _SIZE else y - 1


@_step
def branch_on_one_element(world: World, step: Step, y: Tensor) -> Any:
    if y[0] > step.threshold:
        y = y.clone()
        y[1:].mul_(3)
    return y


@_step
def index(world: World, step: Step, y: Tensor) -> Any:
    largest = int(y.argmax())
    return torch.cat([y[largest:], y[:largest]])


@_step
def branch_on_random_numbers(world: World, step: Step, y: Tensor) -> Any:
    noise = torch.rand(_SIZE)
    return y + noise if noise.sum() + y[0] > step.threshold else y - torch.rand(_SIZE)


@_step
def caught_exception(world: World, step: Step, y: Tensor) -> Any:
    try:
        if y[-1] > step.threshold:
            raise ValueError("too large")
        return y + 1
    except ValueError:
        return y / 2


@_step
def caught_error_of_an_operator(world: World, step: Step, y: Tensor) -> Any:
    try:
        return y + torch.linalg.cholesky(torch.eye(2) * (y[0] - step.threshold)).sum()
    except linalg.LinAlgError:
        return y - 2


# Steps that communicate


@_step
def all_reduce(world: World, step: Step, y: Tensor) -> Any:
    y = y.clone()
    dist.all_reduce(y, group=world.groups[step.group])
    return y


@_step
def functional_all_reduce(world: World, step: Step, y: Tensor) -> Any:
    y = functional.all_reduce(y, "max", world.groups[step.group])
    return y + 0


@_step
def all_gather(world: World, step: Step, y: Tensor) -> Any:
    group = world.groups[step.group]
    return functional.all_gather_single(y, 0, group).view(group.size(), _SIZE).sum(0)


@_step
def broadcast(world: World, step: Step, y: Tensor) -> Any:
    y, group = y.clone(), world.groups[step.group]
    dist.broadcast(y, group=group, group_src=0)
    return y


@_step
def barrier(world: World, step: Step, y: Tensor) -> Any:
    dist.barrier(world.groups[step.group])
    return y


@_step
def branch_before_the_wait(world: World, step: Step, y: Tensor) -> Any:
    later = y * 2
    work = dist.all_reduce(later, group=world.groups[step.group], async_op=True)
    y = y + 1 if y.sum() > step.threshold * _SIZE else y - 1
    work.wait()
    return y + later


@_step
def collective_in_both_branches(world: World, step: Step, y: Tensor) -> Any:
    group = world.groups[step.group]
    if y.sum() > step.threshold * _SIZE:
        return functional.all_reduce(y * 2, "sum", group) + 1
    return functional.all_reduce(y - 1, "sum", group) * 3


@_step
def loop_until_all_are_large(world: World, step: Step, y: Tensor) -> Any:
    y = y.clone()
    for _ in range(3):
        dist.all_reduce(y)
        if y.min() > step.threshold:
            break
    return y


@_step
def gradient(world: World, step: Step, y: Tensor) -> Any:
    leaf = y.detach().clone().requires_grad_()
    whole = functional.all_gather_single_autograd(leaf.sin(), 0, world.groups[step.group])
    (result,) = torch.autograd.grad(whole.exp().sum(), leaf)
    return y + result


def _wrapped(y: Tensor) -> Any:
    return y % _BOUND


@functools.cache
def _groups(rank: int, size: int) -> Sequence[Any]:
    """The groups that a rank uses: all ranks, all ranks once more, its pair of neighbours, and every second rank."""
    again = dist.new_group(list(range(size)))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    strided = [dist.new_group(list(range(first, size, 2))) for first in range(2)] if size > 2 else [again, again]
    return [dist.group.WORLD, again, pairs[rank // 2], strided[rank % 2]]


def steps_of(seed: int) -> list[Step]:
    """The steps of a random program; one of them communicates, and one decides."""
    rng = random.Random(seed)
    names = list(STEPS)
    first_that_communicates = names.index("all_reduce")
    chosen = [*rng.choices(names, k=rng.randint(0, 4)), rng.choice(names[first_that_communicates:])]
    chosen += [rng.choice(names[:first_that_communicates])]
    rng.shuffle(chosen)
    return [Step(name, rng.randrange(4), rng.uniform(2.0, 10.0)) for name in chosen]


def _made(seed: int, rank: int, size: int, group: Any) -> Program:
    steps, world, rng = steps_of(seed), World(size, _groups(rank, size)), random.Random(f"{seed} end")
    first = 5 * rank + seed % 7  # of the argument of the first call, which is the capture's example: it does not raise
    writes, raises_above = rng.random() < 0.3, rng.uniform(4.0, 12.0) * _SIZE if rng.random() < 0.2 else None

    def run(x: Tensor) -> Any:
        start, y = x[0].clone(), x % _BOUND
        for step in steps:
            y = _wrapped(STEPS[step.name](world, step, y))
        if writes:
            x.add_(y)
        if raises_above is not None and start > first and y.sum() > raises_above:
            raise ValueError("the result is too large")
        return y

    return Program(
        run, lambda call: (torch.arange(float(_SIZE)) * (3 + call) + 5 * rank + 2 * call + seed % 7,), calls=5
    )


def program(seed: int) -> Makes:
    """The random program of a seed."""
    return functools.partial(_made, seed)
