"""How ``functionalize`` behaves: arguments and results, reads in the middle, aliases, autograd, nesting, errors."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES, operators, trace

aten = torch.ops.aten
EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)


def bump(x: Tensor) -> Tensor:
    y = x * 2
    y[0].add_(1)
    return y


# The call


def test_remove_must_be_one_of_two() -> None:
    with pytest.raises(ValueError, match=re.escape("'mutations' or 'mutations_and_views'")):
        functionalize(bump, remove="views")


def test_keeps_name_and_documentation() -> None:
    assert functionalize(bump).__name__ == "bump"
    assert functionalize(nn.Linear(2, 2))(torch.ones(2)).shape == (2,)


class Pair(NamedTuple):
    first: Any
    second: Any


@WHILE
@EITHER
def test_pytrees_in_and_out(mode: Any, remove: str) -> None:
    def f(tree: dict[str, Any], pair: Pair, factor: int) -> Any:
        tree["a"][0].add_(factor)
        pair.second.mul_(2)
        return {"out": [tree["a"][0], (pair.first,)], "n": factor, "none": None, "text": "kept"}

    inputs = {"a": [torch.zeros(3), torch.ones(2)], "b": None}, Pair(torch.ones(2), torch.ones(2, 2)), 3
    if mode is None:
        assert_equivalent(f, *inputs, remove=remove)
    else:
        assert_equivalent(lambda tree, pair: f(tree, pair, 3), *inputs[:2], remove=remove, tracing_mode=mode)


def test_keywords() -> None:
    def f(x: Tensor, *, out: Tensor, scale: float = 2.0) -> Tensor:
        return torch.mul(x, scale, out=out)

    out = torch.empty(2)
    returned = functionalize(f)(torch.ones(2), out=out, scale=3.0)
    assert returned is out and torch.equal(out, torch.full((2,), 3.0))


def test_outputs_that_are_no_tensors() -> None:
    marker = object()

    def f(x: Tensor) -> Any:
        x.add_(1)
        return marker, x.sum().item(), x.size(), x.tolist()

    assert functionalize(f)(torch.zeros(2)) == (marker, 2.0, (2,), [1.0, 1.0])


@WHILE
def test_module(mode: Any) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            y.relu_()[0].zero_()
            return y

    module = Counter().requires_grad_(False)

    def f(state: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(module, state, (x,))

    assert_equivalent(f, dict(module.named_parameters()), torch.randn(3, 2), tracing_mode=mode)
    if mode in (None, "real"):
        assert_equivalent(module, torch.randn(3, 2), tracing_mode=mode)


@WHILE
def test_graph_module(mode: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        y.view(-1).add_(1)
        x.mul_(2)
        return y

    impure = make_fx(f)(torch.zeros(2, 3))
    assert aten.add_.Tensor in {node.target for node in impure.graph.nodes}
    assert_equivalent(impure, torch.zeros(2, 3), tracing_mode=mode)


@WHILE
@pytest.mark.parametrize("inner", REMOVES)
@pytest.mark.parametrize("outer", REMOVES)
def test_nested(inner: str, outer: str, mode: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y: Tensor = functionalize(bump, remove=inner)(x)
        y.t()[0].mul_(3)
        return y

    assert_equivalent(f, torch.ones(2, 3), remove=outer, tracing_mode=mode)


def test_nested_keeps_views_where_only_the_inner_one_removes_them() -> None:
    def f(x: Tensor) -> Tensor:
        y: Tensor = functionalize(bump, remove="mutations_and_views")(x)
        return y.t()

    assert operators(trace(f, torch.ones(2, 3)))[-1] == "t.default"


# Reads in the middle


@WHILE
def test_python_reads_current_values(mode: Any) -> None:
    def f(x: Tensor) -> Any:
        y = torch.zeros(3)
        y[1:].add_(2)
        if bool(y[2] > 1):
            y.mul_(int(y[1].item()))
        return y, [float(v) for v in y.tolist()]

    if mode is None:
        assert_equivalent(f, torch.zeros(3))
    else:
        with pytest.raises((RuntimeError, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode)):
            make_fx(f, tracing_mode="fake")(torch.zeros(3))


@pytest.mark.parametrize("mode", [None, "real", "symbolic"], ids=str)
def test_shapes_that_depend_on_current_values(mode: Any) -> None:
    def f(x: Tensor) -> Any:
        x.view(-1)[0].fill_(4)
        x[x > 3] = 0.5
        return x[x > 0.2], x.nonzero()

    if mode == "symbolic":  # nonzero gives unbacked sizes, which make_fx has no values for
        operators(trace(f, torch.tensor([0.1, 0.3]), mode="symbolic"))
    else:
        assert_equivalent(f, torch.tensor([0.1, 0.3]), tracing_mode=mode)


def test_numpy_reads_current_memory() -> None:
    def f(x: Tensor) -> Any:
        y, z = x + 1, x.clone()
        row = y[0]
        z.t().mul_(2)
        y.view(-1).add_(1)
        before = row.numpy().copy()
        y.zero_()
        return torch.from_numpy(before), row.tolist(), z.numpy().sum().item(), repr(row), y.data_ptr() == row.data_ptr()

    for remove in REMOVES:
        assert_equivalent(f, torch.ones(2, 2), remove=remove)


@WHILE
@EITHER
def test_random_numbers_in_order(mode: Any, remove: str) -> None:
    def f(x: Tensor) -> Any:
        y, unused = x.clone(), x.clone()
        y[0].normal_()
        unused.uniform_()
        y.view(-1)[2:].bernoulli_(0.5)
        noise = torch.rand(2)
        return y.exponential_(), noise, torch.nn.functional.dropout(x, 0.5, True, inplace=True)

    assert_equivalent(f, torch.ones(2, 3), remove=remove, tracing_mode=mode)


@WHILE
@EITHER
def test_random_numbers_in_the_order_of_the_storage(mode: Any, remove: str) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        y.t().normal_()
        z = x + 2
        z.t()[1:].uniform_()
        z[::2].bernoulli_(0.3)
        return y, z, torch.nn.functional.dropout(z.t()[:, ::2], 0.5, True)

    assert_equivalent(f, torch.ones(8, 8), remove=remove, tracing_mode=mode)


@WHILE
@EITHER
def test_random_numbers_of_arguments_in_another_order(mode: Any, remove: str) -> None:
    def f(x: Tensor) -> Any:
        chances = x.t() / 10
        y = torch.empty_like(x.t()).bernoulli_(chances)
        rows = torch.rand_like(x[:1].expand(3, 4)), torch.randn_like(x.t()[:, :2].expand(2, 4, 2))
        return torch.bernoulli(chances), torch.bernoulli(chances, 0.5), torch.multinomial(chances, 3), y, *rows

    assert_equivalent(f, torch.arange(12.0).view(3, 4) * 0.8 + 0.5, remove=remove, tracing_mode=mode)


@EITHER
def test_batched_random_numbers_are_drawn_in_order(remove: str) -> None:
    def f(x: Tensor) -> Any:
        return torch.vmap(lambda row: torch.nn.functional.dropout(row, 0.5), randomness="different")(x)

    assert_equivalent(f, torch.ones(3, 4), remove=remove, tracing_mode="fake")


@EITHER
def test_random_numbers_with_gaps(remove: str) -> None:
    def f(x: Tensor) -> Any:
        y = x + 1
        y[:, ::2].normal_()
        y[1:, 1:].exponential_()
        y[:, 0].random_(0, 10)
        out = torch.empty(24, 8).t()[:, ::3]
        return y, torch.randn((8, 8), out=out), torch.nn.init.xavier_normal_(x[:, 1:])

    assert_equivalent(f, torch.ones(8, 8), remove=remove)


# Aliases


def write_and_read(x: Tensor, y: Tensor) -> Any:
    x.add_(1)
    seen = y * 2
    y[0].mul_(3)
    return seen, x.sum()


def aliased() -> list[Any]:
    whole = torch.arange(8.0)
    square = torch.arange(16.0).view(4, 4)
    pairs = {
        "one tensor twice": (whole, whole),
        "overlapping slices": (whole[:5], whole[3:]),
        "disjoint slices": (whole[:4], whole[4:]),
        "base and view": (whole, whole[2:]),
        "view and base": (whole[2:], whole),
        "interleaved": (whole[::2], whole[1::2]),
        "rows and columns": (square[1], square[:, 1]),
        "transposed": (square, square.t()),
        "two dtypes": (whole, whole.view(torch.float64)),
        "alias of all": (whole.view(2, 4), whole),
    }
    return [pytest.param(pair, id=name) for name, pair in pairs.items()]


@EITHER
@WHILE
@pytest.mark.parametrize("pair", aliased())
def test_aliased_inputs(pair: tuple[Tensor, Tensor], mode: Any, remove: str) -> None:
    assert_equivalent(write_and_read, *pair, remove=remove, tracing_mode=mode)


@EITHER
def test_outputs_alias_as_in_eager(remove: str) -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        fresh = y + 1
        return x, x[1:], y.t(), fresh, fresh.view(-1), fresh[0], y.clone()

    assert_equivalent(f, torch.ones(3), torch.ones(2, 2), remove=remove, strides=True)


def test_an_output_that_is_an_input_is_that_object() -> None:
    x = torch.ones(2)
    assert functionalize(lambda x: x.add_(1))(x) is x


def test_writes_after_the_call_reach_aliases() -> None:
    x = torch.zeros(2, 2)
    view, whole = functionalize(lambda x: (x.t()[0], x.mul_(1)))(x)
    view.add_(1)
    assert torch.equal(whole, x) and x[:, 0].tolist() == [1.0, 1.0]


@EITHER
@pytest.mark.filterwarnings("ignore:.*jit.*deprecated")
def test_jit_trace_sees_what_runs(remove: str) -> None:
    def f(x: Tensor) -> Tensor:
        x[1].mul_(2)
        return bump(x)

    traced = torch.jit.trace(functionalize(f, remove=remove), (torch.ones(2, 2),))
    assert_equivalent(f, torch.ones(2, 2) * 3, transform=lambda _: traced)
