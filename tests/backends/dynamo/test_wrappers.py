"""Wrappers in programs of ``torch.compile(..., backend="functionalize")`` do what eager does, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import dynamo_backend
from functionalize.verify import assert_functional
from tests.support.wrappers import (
    GRADIENTS,
    KINDS,
    ROLES,
    SHARED,
    compare,
    jagged,
    numbers,
    one_rank,
    opened,
    shared,
    two,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
GRAPHS: list[torch.fx.GraphModule] = []


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    GRAPHS.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with one_rank() as mesh:
        yield mesh


def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    GRAPHS.append(graph)
    return graph


def compiled(function: Callable[..., Any], arguments: Any) -> Any:
    return torch.compile(function, backend=dynamo_backend(kept), dynamic=False, fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["argument in containers", "parameter", "result", "written buffer"])
@pytest.mark.parametrize("kind", ["two tensors of two tensors", "not contiguous", "int8 weight", "partial sum"])
def test_each_kind_in_each_role_does_what_eager_does(kind: str, role: str, mesh: Any) -> None:
    compare(lambda: ROLES[role](KINDS[kind]()), compiled)
    for graph in GRAPHS:
        assert_functional(graph)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRADIENTS if "jagged" not in name])
def test_gradients_have_the_classes_and_metadata_of_eager(name: str, mesh: Any) -> None:
    compare(GRADIENTS[name], compiled, backward=True)


@pytest.mark.parametrize("name", SHARED)
def test_memory_is_shared_by_parts(name: str) -> None:
    compare(lambda: (shared, SHARED[name]()), compiled)


def test_the_compiler_gets_the_tensors_inside() -> None:
    layer: Any = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(two(4, 4))
    compiled(layer, None)(numbers(2, 4))
    placeholders = GRAPHS[0].graph.find_nodes(op="placeholder")
    assert [node.name.rpartition("_")[2] for node in placeholders if "weight" in node.name] == ["a", "b"]


SIZED: dict[str, Callable[[Any], Any]] = {
    "results": lambda x: (x * 2, x),
    "views": lambda x: (x.view(-1), x.t(), x.size(0)),
    "writes": lambda x: x.mul_(2),
    "its size": lambda x: x.new_zeros(x.size(0), 2) + torch.ones(x.size(0), 1),
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 3),
    "gradients": lambda x: torch.autograd.grad((x * x).sin().sum(), x) if x.requires_grad else x,
}


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_may_differ_from_call_to_call(name: str, trained: bool) -> None:
    GRAPHS.clear()
    program = torch.compile(SIZED[name], backend=dynamo_backend(kept))
    for rows in (3, 5, 2, 6):
        both = []
        for function in (SIZED[name], program):
            x = two(rows, 3).requires_grad_(trained and name != "writes")
            result = function(x)
            if isinstance(result, Tensor) and result.requires_grad:
                result.sum().backward()
            both.append(opened([result, x, x.grad]))
        for wanted, given in zip(*both, strict=True):
            if isinstance(wanted, Tensor):
                torch.testing.assert_close(given, wanted)
            else:
                assert given == wanted


def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(Exception, match=r"is a NestedTensor, and has sizes that are symbols[\s\S]*dynamic=False"):
        torch.compile(lambda x: x * 2, backend="functionalize")(jagged())
