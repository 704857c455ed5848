"""Waits for collectives stand just before their first readers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives
from torch import Tensor
from torch.fx import Graph

from functionalize import capture
from functionalize._torch.distributed.worlds import fake_world
from functionalize.runtime.graphs.waits import sink_waits

dist: Any = torch.distributed
all_reduce: Any = torch.distributed._functional_collectives.all_reduce  # its stubs want names of groups
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _names(graph: Graph) -> list[str]:
    return [node.target.name().split("::")[1].split(".")[0] for node in graph.nodes if node.op == "call_function"]


def test_what_does_not_read_a_result_runs_before_the_wait() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        reduced = all_reduce(x, "sum", dist.group.WORLD)
        total: Tensor = y.exp() * reduced + reduced
        return total

    with fake_world(2, 0):
        captured = capture(program, (torch.ones(3), torch.ones(3)))
    assert _names(captured.graph) == ["all_reduce", "exp", "wait_tensor", "mul", "add"]


def test_results_are_waited_for_at_the_end_and_collectives_keep_their_order() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dist.all_reduce(x)
        dist.all_reduce(y)
        return x, y, (y * 2).cos()

    with fake_world(2, 0):
        captured = capture(program, (torch.ones(3), torch.ones(3)))
    names = _names(captured.graph)
    assert names.index("wait_tensor") > names.index("all_reduce", 1) > names.index("all_reduce")
    assert names[-1] == "wait_tensor"  # of `x`, which nothing in the program reads


def test_a_wait_for_a_wait_moves_with_it() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(_WAIT, (x,))
    second = graph.call_function(_WAIT, (first,))
    other = graph.call_function(torch.ops.aten.exp.default, (y,))
    graph.output((other, graph.call_function(torch.ops.aten.add.Tensor, (second, other))))
    sink_waits(graph)
    graph.lint()
    assert _names(graph) == ["exp", "wait_tensor", "wait_tensor", "add"]
