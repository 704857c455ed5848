"""Graphs whose operators are called by torch's own functions: on the operator database, and where they must not be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import capture, functionalize
from functionalize.runtime.calls.bindings import bound
from functionalize.runtime.graphs.graph_forms import executable
from tests.sweeps.opinfo.cases import op_names, op_table

SHARDS = 36
DTYPES = torch.float32, torch.int64, torch.complex64
pytree = torch.utils._pytree


def graphs(name: str) -> Iterator[tuple[GraphModule, list[torch.Tensor]]]:
    """Functional graphs of the first sample, a dtype, of one of the database's operators, and their inputs."""
    info: Any = op_table()[name]
    for dtype in (one for one in DTYPES if one in info.supported_dtypes("cpu")):
        for sample in islice(info.sample_inputs("cpu", dtype, requires_grad=False), 1):
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def run(*tensors: torch.Tensor, leaves: Any = leaves, spec: Any = spec, places: Any = places) -> Any:
                given = dict(zip(places, tensors, strict=True))
                call = pytree.tree_unflatten([given.get(n, leaf) for n, leaf in enumerate(leaves)], spec)
                return [one for one in pytree.tree_leaves(info(call[0], *call[1], **call[2])) if torch.is_tensor(one)]

            inputs = [leaves[place] for place in places]
            try:
                yield make_fx(functionalize(run, remove="mutations"))(*(one.clone() for one in inputs)), inputs
            except Exception:  # what the database's sweep tells of
                continue


def results(run: Callable[..., Any], inputs: list[torch.Tensor]) -> Any:
    torch.manual_seed(0)
    return run(*inputs)


@pytest.mark.slow(seconds=30)
@pytest.mark.every(SHARDS)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_results_are_those_of_the_operators(shard: int) -> None:
    count = 0
    with torch.no_grad(), warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # the database's own
        for name in op_names()[shard::SHARDS]:
            if "empty" in name:  # memory that nobody has written
                continue
            for graph, inputs in graphs(name):
                plain = executable(graph.graph, graph).forward
                found = bound(plain, inputs)
                expected = results(plain, inputs)
                torch.testing.assert_close(
                    results(found, inputs), expected, rtol=0, atol=0, equal_nan=True, check_stride=True, msg=name
                )
                count += found is not plain
    assert count


def test_subclasses_that_override_functions_are_called_as_before() -> None:
    class Tagged(torch.Tensor):
        pass

    graph = make_fx(lambda x: x + 1)(torch.randn(3))
    plain = executable(graph.graph, graph).forward
    assert bound(plain, [torch.randn(3).as_subclass(Tagged)]) is plain
    assert bound(plain, [torch.nn.Parameter(torch.randn(3))]) is not plain


@pytest.mark.parametrize("hooks", ["_forward_hooks", "_forward_pre_hooks"])
def test_hooks_are_those_of_now(hooks: str) -> None:
    """Another dict in the place of a module's hooks is seen by the calls that take the short way."""
    module = torch.nn.Linear(3, 3).requires_grad_(False)
    x = torch.randn(2, 3)
    program = capture(module, (x,), on_guard_failure="recapture")
    for _ in range(3):
        program(x)
    setattr(module, hooks, type(getattr(module, hooks))())
    assert torch.equal(program(x), module(x))
    if hooks == "_forward_hooks":
        module.register_forward_hook(lambda module, args, out: out * 2)
    else:
        module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert torch.equal(program(x), module(x))
