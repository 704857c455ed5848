"""What other functionalizers waste: copies of whole caches, replays of whole chains; by issue of pytorch/pytorch.

A graph computes a whole cache once for its writes; the part that only a captured program can spare, the write-back of
the whole, is not asked here. Direct use allocates what is written, not what it is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from functionalize import functionalize
from functionalize.ops import tables
from functionalize.ops.tables import ViewKind
from functionalize.verify import assert_equivalent
from tests.support.graphs import REMOVES, operator, operators, trace

Program = Callable[..., Any]
CACHE = torch.zeros(256, 64)
SOME = torch.tensor([3, 5])
EITHER = pytest.mark.parametrize("remove", REMOVES)
PROGRAMS: list[Any] = []


def program(scatters: int, *inputs: Any) -> Callable[[Program], Program]:
    def register(func: Program) -> Program:
        PROGRAMS.append(pytest.param(func, inputs, scatters, id=func.__name__))
        return func

    return register


@program(1, CACHE)
def issue_152346_152323_a_row(x: Tensor) -> Tensor:
    x[0].add_(1)
    return x[0] * 2


@program(1, CACHE, SOME, torch.ones(2))
def issue_184542_elements_by_index(x: Tensor, where: Tensor, new: Tensor) -> None:
    x.view(-1)[where] = new


@program(2, CACHE, SOME, torch.ones(2, 64))
def issue_195285_a_slice_and_an_index(x: Tensor, where: Tensor, new: Tensor) -> Tensor:
    x[:, 2:4].mul_(2)
    x[where] = new
    return x[1] + 1


@program(1, CACHE)
def issue_130394_adjacent_slices(x: Tensor) -> Tensor:
    x[:2].mul_(2)
    x[2:4].add_(1)
    x[4:6].copy_(x[:2])
    return x[5].sum()


@program(1, CACHE)
def rows_written_often(x: Tensor) -> Tensor:
    row = x[3]
    for _ in range(10):
        row.add_(1).mul_(2)
    return row.sum()


def computes_whole(node: torch.fx.Node, elements: int) -> bool:
    """Whether a node computes that many elements; a view or its copy, and the write-back, do not compute."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is torch.ops.aten.copy_.default:
        return False
    name = operator(node).partition(".")[0]
    if tables.row(node.target).view is not ViewKind.NONE or name.endswith("_copy"):
        return False
    return isinstance(node.meta["val"], Tensor) and node.meta["val"].numel() == elements


@EITHER
@pytest.mark.parametrize(("func", "inputs", "scatters"), PROGRAMS)
def test_a_graph_computes_a_cache_once_for_adjacent_writes(
    func: Program, inputs: tuple[Any, ...], scatters: int, remove: str
) -> None:
    graph = trace(func, *inputs, remove=remove)
    whole = [node for node in graph.graph.nodes if computes_whole(node, CACHE.numel())]
    assert len(whole) == scatters and operators(graph).count("copy_.default") == 1
    assert_equivalent(func, *inputs, remove=remove)


def allocated(func: Program, *inputs: Any) -> int:
    """The bytes that a call allocates, freed ones too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        func(*inputs)
    return sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages())


@EITHER
@pytest.mark.parametrize("func", [issue_152346_152323_a_row, rows_written_often])
def test_direct_use_allocates_what_is_written(func: Program, remove: str) -> None:
    assert allocated(functionalize(func, remove=remove), CACHE.clone()) < CACHE.nbytes // 8


@EITHER
def test_depth_times_writes(remove: str) -> None:
    """The incumbent replays a chain of 200 views for each of 5 writes: 2,008 nodes."""

    def f(x: Tensor) -> Tensor:
        y = x + 1
        end = y
        for _ in range(100):
            end = end.t().unsqueeze(0)[0]
        for _ in range(5):
            end.add_(1)
        return y

    assert len(operators(trace(f, CACHE, remove=remove))) < 10
    assert_equivalent(f, CACHE, remove=remove, tracing_mode="fake")
