"""Tables of programs, and fixtures that hold one against eager: directly and traced, with both ways to remove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES

__all__ = ["Check", "Table", "check", "differentiated", "in_every_way", "mode", "remove", "written_afterwards"]

Check = Callable[..., GraphModule | None]
in_every_way = pytest.mark.parametrize(
    ("mode", "remove"), [(mode, remove) for mode in (None, *MODES) for remove in REMOVES]
)
RUNS = [None, "fake", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("real", "symbolic"))]
Program = Callable[..., Any]


class Table:
    """Programs with their inputs, to go through in one test."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, *inputs: Any) -> Callable[[Program], Program]:
        """Enter the decorated program."""

        def enter(func: Program) -> Program:
            self.rows.append(pytest.param(func, inputs, id=func.__name__))
            return func

        return enter

    def each(self, test: Any, *but: str) -> Any:
        """Run a test, a function of `func` and `inputs`, for each program, some of them apart."""
        rows = [row for row in self.rows if row.id not in but]
        return pytest.mark.parametrize(("func", "inputs"), rows)(test)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def written_afterwards(func: Program) -> Program:
    """The program, and a caller who writes to each of its outputs in turn."""

    def run(*inputs: Any) -> Any:
        outputs = func(*inputs)
        for number, output in enumerate(_tensors(outputs)):
            output.mul_(2).add_(number)
        return outputs

    return run


def differentiated(func: Program) -> Program:
    """The gradients of all that a program returns and leaves in its inputs, by its inputs, which are no leaves."""

    def run(*inputs: Any) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        given = [leaf * 1 for leaf in leaves]
        results = [x for x in _tensors((func(*given), given)) if x.requires_grad]
        loss = sum(((number + 2) * (x * x).sum() for number, x in enumerate(results)), torch.zeros(()))
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    return run


@pytest.fixture(params=REMOVES)
def remove(request: Any) -> Any:
    return request.param


@pytest.fixture(params=RUNS, ids=str)
def mode(request: Any) -> Any:
    """How a program runs. Direct use and fake tensors are what quick checks ask; the other modes take as long again."""
    return request.param


@pytest.fixture
def check(remove: str, mode: Any) -> Check:
    """`assert_equivalent` in one way to remove and one mode; returns the graph, None in direct use."""

    def run(func: Callable[..., Any], *inputs: Any, **options: Any) -> GraphModule | None:
        return assert_equivalent(func, *inputs, remove=remove, tracing_mode=mode, **options)

    return run
