"""Failures of other functionalizers that no issue names, and of exporters as far as a transform can show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify import assert_functional
from tests.support.equality import Check
from tests.support.graphs import MODES, REMOVES, operators, trace

SQUARE = torch.arange(16.0).view(4, 4)
EITHER = pytest.mark.parametrize("remove", REMOVES)

# Writes through a view that torchax loses in eager use

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda y: y.view(2, 8),
    "reshape": lambda y: y.reshape(8, 2),
    "t": lambda y: y.t(),
    "transpose": lambda y: y.transpose(0, 1),
    "select": lambda y: y.select(1, 2),
    "narrow": lambda y: y.narrow(0, 1, 2),
    "diagonal": lambda y: y.diagonal(1),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "squeeze": lambda y: y.unsqueeze(0).squeeze(0),
    "permute": lambda y: y.permute(1, 0),
    "expand": lambda y: y.expand(4, 4),
    "chunk": lambda y: y.chunk(2)[1],
    "split": lambda y: y.split(3)[0],
    "unbind": lambda y: y.unbind(1)[3],
    "as_strided": lambda y: y.as_strided((2, 2), (5, 1), 1),
    "unfold": lambda y: y.unfold(0, 2, 2),
    "detach": lambda y: y.detach(),
    "movedim": lambda y: y.movedim(0, 1),
    "view of another dtype": lambda y: y.view(torch.int32),
    "real": lambda y: torch.view_as_complex(y.view(8, 2)).real,
    "a slice with a step": lambda y: y[1::2, ::3],
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_reaches_its_source(name: str, check: Check) -> None:
    view = VIEWS[name]

    def f(x: Tensor) -> Any:
        y = x + 1
        view(y).mul_(2)
        view(x).add_(1)
        return y

    check(f, SQUARE)


# Exporters that drop the mutation of buffers and inputs: right once, wrong at the second call


class Counter(nn.Module):
    """Counts its calls in a buffer, and writes the rows of a cache in turn."""

    steps: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.cache.copy_(self.cache.roll(1, 0))
        self.cache[0] = x
        return self.cache * self.steps


@EITHER
@pytest.mark.parametrize("mode", [None, "real"], ids=str)
def test_state_is_carried_to_the_next_call(mode: Any, remove: str) -> None:
    ours, eager = Counter(), Counter()
    call: Any = functionalize(ours, remove=remove)
    if mode is not None:
        call = make_fx(call, tracing_mode=mode)(torch.zeros(2))
        assert_functional(call, remove)
        ours.steps.zero_()
        ours.cache.zero_()
    for _ in range(3):
        row = torch.randn(2)
        torch.testing.assert_close(call(row), eager(row))
    torch.testing.assert_close(ours.cache, eager.cache)


@EITHER
@pytest.mark.parametrize("mode", MODES)
def test_state_as_an_input_is_written_back_by_the_graph(mode: Any, remove: str) -> None:
    eager, state = Counter(), dict(Counter().named_buffers())

    def f(state: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(eager, state, (x,))

    graph = make_fx(functionalize(f, remove=remove), tracing_mode=mode)(dict(Counter().named_buffers()), torch.ones(2))
    for _ in range(3):
        row = torch.randn(2)
        torch.testing.assert_close(graph(state, row), eager(row))


# Initialization, as deferred by torchdistx or on the meta device


class Tied(nn.Module):
    """Two weights are one, a buffer is computed by the constructor."""

    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("rates", 1.0 / 10 ** (torch.arange(0, 4, 2) / 4))
        nn.init.trunc_normal_(self.head.weight, std=0.1)
        with torch.no_grad():
            self.embedding.weight[0].zero_()


@EITHER
def test_constructors_draw_the_numbers_of_eager_and_keep_ties(remove: str) -> None:
    torch.manual_seed(3)
    eager = Tied()
    torch.manual_seed(3)
    ours = functionalize(Tied, remove=remove)()
    assert ours.head.weight is ours.embedding.weight and ours.head.weight.is_leaf
    for name, value in eager.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(torch.rand(3), torch.rand(3)) is False  # the generator moves on as ever


# Found by running the incumbents


@EITHER
@pytest.mark.parametrize("mode", MODES)
def test_bodies_of_cond_keep_views_as_asked(mode: Any, remove: str) -> None:
    def yes(x: Tensor) -> Tensor:
        y = x + 1
        y.t()[0].add_(1)
        return y

    def f(x: Tensor) -> Any:
        return torch.cond(x.sum() > 3, yes, torch.sin, (x,))

    graph = make_fx(functionalize(f, remove=remove), tracing_mode=mode)(SQUARE.clone())
    assert_functional(graph, remove)
    bodies = [child for child in graph.children() if isinstance(child, GraphModule)]
    used = {operator for body in bodies for operator in operators(body)}
    assert ("t.default" in used) == (remove == "mutations")


@EITHER
@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_of_a_module_hides_no_write(mode: str, remove: str) -> None:
    norm = nn.BatchNorm1d(3)
    state = {name: value.detach() for name, value in [*norm.named_parameters(), *norm.named_buffers()]}

    def f(state: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(norm, state, (x,))

    graph = trace(f, state, torch.randn(4, 3), remove=remove, mode=mode)
    assert_functional(graph, remove)
    assert operators(graph).count("copy_.default") == 3
    before = [value.clone() for value in state.values()]
    pure = GraphModule(graph, graph.graph)
    for node in list(pure.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            pure.graph.erase_node(node)
    pure.recompile()
    pure(state, torch.randn(4, 3))
    assert all(torch.equal(now, then) for now, then in zip(state.values(), before, strict=True))


def test_an_out_that_is_not_contiguous_keeps_its_strides(check: Check) -> None:
    def f(x: Tensor) -> Any:
        out, wide = torch.empty(4, 4).t(), torch.empty(4, 8)[:, ::2]
        torch.add(x, 1, out=out)
        torch.mm(x, x, out=wide)
        return out.stride(), wide.stride(), out.as_strided((16,), (1,)), wide.is_contiguous(), out * wide

    check(f, SQUARE)


@EITHER
def test_sparse_values_in_direct_use(remove: str) -> None:
    def values(x: Tensor) -> Tensor:
        sparse = x.to_sparse()
        sparse._values().mul_(2)
        return sparse.to_dense()

    assert torch.equal(functionalize(values, remove=remove)(SQUARE.clone()), values(SQUARE))


def test_views_are_views_and_outputs_are_the_inputs_of_eager(remove: str) -> None:
    seen: list[Any] = []

    def f(x: Tensor) -> Any:
        part = x[1:]
        part.add_(1)
        seen.append((part._is_view(), part._base is x, x._version, part.storage_offset()))
        return x, part

    x = SQUARE.clone()
    f(SQUARE.clone())
    same, part = functionalize(f, remove=remove)(x)
    assert same is x and part.data_ptr() == x[1:].data_ptr()
    assert seen[0] == seen[1]


def test_closed_over_state_does_not_pass_unseen(remove: str) -> None:
    state = torch.zeros(4)

    def f(x: Tensor) -> Tensor:
        state.view(2, 2)[0].add_(x)
        return state.sum()

    graph = make_fx(functionalize(f, remove=remove))(torch.ones(2))
    assert_functional(graph, remove)
    assert state.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert float(graph(torch.ones(2))) == 4.0 and state.tolist() == [2.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", [None, "real"], ids=str)
def test_metadata_of_inputs_and_data_of_storages(check: Check) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Any:
        x.t_().unsqueeze_(0)
        y.resize_(20)
        y[16:].fill_(2)
        z.detach().add_(1)
        z.data.mul_(2)
        z.swapaxes_(0, 1)
        return tuple(x.shape), y.sum(), z + 0

    check(f, SQUARE[:2], SQUARE.clone().view(-1), SQUARE.clone())


def test_softmax_into_itself_and_other_exotic_outs(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x / 9
        torch.softmax(y, 0, out=y)
        torch.sub(x, y, out=x)
        y[1:] = y[:-1].clone()
        return F.relu(y, inplace=True), x[0]

    check(f, SQUARE)
