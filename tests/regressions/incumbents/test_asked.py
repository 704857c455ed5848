"""What users of other functionalizers ask for and do not get; by issue of pytorch/pytorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.equality import Check
from tests.support.graphs import MODES, REMOVES, operators, trace

SQUARE = torch.arange(16.0).view(4, 4)
LINE = torch.arange(12.0)
EITHER = pytest.mark.parametrize("remove", REMOVES)

# Higher-order operators


def test_195966_a_loop_body_that_writes_what_it_carries(check: Check) -> None:
    def f(x: Tensor) -> Any:
        def body(step: Tensor, y: Tensor) -> Any:
            y.add_(1)
            return step + 1, y * 1

        start = x * 1
        return while_loop(lambda step, y: step < 3, body, (torch.tensor(0), start)), start

    check(f, LINE)


def test_191582_parts_of_one_storage_in_a_loop(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x * 1
        y[0].add_(2)
        body: Any = lambda step, a, b: (step + 1, a + b, b + 1)  # noqa: E731
        return while_loop(lambda step, a, b: step < 3, body, (torch.tensor(0), y[:6], y[6:]))

    check(f, LINE)


def test_147210_126988_writes_in_the_branches_of_cond(check: Check) -> None:
    def f(x: Tensor) -> Any:
        y = x * 1

        def yes(a: Tensor) -> Tensor:
            b = a * 2
            b.view(-1)[1:].add_(1)
            return b

        def no(a: Tensor) -> Tensor:
            a.mul_(3)
            return a + 1

        return torch.cond(y.sum() > 3, yes, no, (y,)), torch.cond(y.sum() < 3, yes, no, (y,)), y

    check(f, SQUARE)


# Views


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda x: x.t(),
    "view": lambda x: x.view(2, 8),
    "diagonal": lambda x: x.diagonal(),
    "select": lambda x: x[1],
    "slice": lambda x: x[:, 1:3],
    "unfold": lambda x: x.unfold(0, 2, 2),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind(1)[0],
    "expand": lambda x: x[:1].expand(1, 4),
    "squeeze": lambda x: x[:1].squeeze(0),
    "permute": lambda x: x.permute(1, 0),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1)),
    "detach": lambda x: x.detach(),
}


@EITHER
@pytest.mark.parametrize("name", VIEWS)
def test_75909_views_under_vmap(name: str, remove: str) -> None:
    view = VIEWS[name]

    def f(x: Tensor) -> Any:
        y = x * 2
        view(y).add_(1)
        return y, view(y) * 1

    batch = torch.stack([SQUARE, -SQUARE, SQUARE + 1])
    got, want = torch.vmap(functionalize(f, remove=remove))(batch), torch.vmap(f)(batch)
    torch.testing.assert_close(got, want)


@EITHER
def test_85747_142118_memory_format_and_strides_survive_without_views(remove: str) -> None:
    def f(x: Tensor) -> Any:
        y = x.contiguous(memory_format=torch.channels_last)
        part = y[:, 1:]
        part.mul_(2)
        later = (part.permute(0, 2, 1, 3) + 1, y.relu(), y.view(y.shape), nn.functional.avg_pool2d(y, 2))
        return y, part, *later, y.is_contiguous(memory_format=torch.channels_last)

    assert_equivalent(f, torch.randn(2, 4, 4, 6), remove=remove, strides=True)


@EITHER
def test_180727_another_dtype_under_vmap(remove: str) -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        y.view(torch.int32)[0].zero_()
        return y

    batch = torch.stack([SQUARE, -SQUARE])
    try:
        want = torch.vmap(f)(batch)
    except RuntimeError:  # no batching rule
        with pytest.raises(RuntimeError, match=r"vmap|batching"):
            torch.vmap(functionalize(f, remove=remove))(batch)
    else:
        torch.testing.assert_close(torch.vmap(functionalize(f, remove=remove))(batch), want)


# Custom operators


@pytest.fixture(scope="module")
def library() -> Any:
    with torch.library._scoped_library("functionalize_asked", "FRAGMENT") as library:
        library.define("store(Tensor(a!) cache, Tensor new) -> ()")
        library.define("replace(Tensor(a!) x, Tensor new) -> ()")

        def store(cache: Tensor, new: Tensor) -> None:
            cache.copy_(new)

        def replace(x: Tensor, new: Tensor) -> None:
            x.set_(new.clone())  # type: ignore[call-overload]

        library.impl("store", store, "CompositeExplicitAutograd")
        library.impl("replace", replace, "CompositeExplicitAutograd")
        yield torch.ops.functionalize_asked


def test_131192_127660_120441_a_custom_op_writes_a_part_of_an_input(library: Any, check: Check) -> None:
    def f(keys: Tensor, values: Tensor, new: Tensor) -> Any:
        library.store(keys[1:3], new)
        library.store(values[:, :2].t()[:, :4], new)
        return keys.sum(0) * values[0]

    graph = check(f, SQUARE, SQUARE + 1, torch.ones(2, 4))
    if graph is not None:
        used = operators(graph)
        assert sum("auto_functionalized" in name for name in used) == 2 and used.count("copy_.default") == 2


@EITHER
def test_139257_a_custom_op_that_replaces_a_parameter(library: Any, remove: str) -> None:
    def f(x: Tensor, new: Tensor) -> Any:
        y = x * 1
        library.replace(y, new)
        return y + 1

    assert_equivalent(f, LINE, LINE + 5, remove=remove)


# Graphs


def test_132865_two_empty_tensors_stay_two(check: Check) -> None:
    def f(x: Tensor) -> Any:
        one, two = torch.empty(4), torch.empty(4)
        one.fill_(1)
        two.copy_(x[:4])
        one.add_(two)
        return one, two

    check(f, LINE)


@EITHER
@pytest.mark.parametrize("mode", MODES)
def test_12003_a_graph_holds_one_op_for_each_that_computes(mode: str, remove: str) -> None:
    """pytorch/executorch#12003: what functionalization adds to a program of writes without views is nothing."""

    def f(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        return y.add_(1).relu_().mul_(2).sum(0)

    graph = trace(f, SQUARE, SQUARE + 1, remove=remove, mode=mode)
    used = [name for name in operators(graph) if not name.startswith("sym_size")]
    assert used == ["mm.default", "add.Tensor", "relu.default", "mul.Tensor", "sum.dim_IntList"]


@EITHER
def test_138293_60828_a_graph_keeps_its_writes_to_state(remove: str) -> None:
    """What exporters drop: each call of the graph finds the state that the call before left."""

    def step(state: dict[str, Tensor], x: Tensor) -> Any:
        state["count"].add_(1)
        state["rows"][1:].copy_(state["rows"][:-1].clone())
        state["rows"][0] = x
        return state["rows"].sum() / state["count"]

    def fresh() -> dict[str, Tensor]:
        return {"count": torch.zeros(()), "rows": torch.zeros(3, 4)}

    graph = make_fx(functionalize(step, remove=remove), tracing_mode="fake")(fresh(), LINE[:4])
    ours, eager = fresh(), fresh()
    for number in range(4):
        row = LINE[number : number + 4]
        torch.testing.assert_close(graph(ours, row), step(eager, row))
    torch.testing.assert_close(ours, eager)
