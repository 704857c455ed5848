"""Higher-order operators: bodies become free of mutation, operands become values. Eager is the oracle.

Outside of ``no_grad`` torch itself refuses bodies that write to operands; under it, `cond` and `while_loop` take them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as higher_order_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from functionalize import UnsupportedMutationError, capture, functionalize
from functionalize.verify import assert_equivalent
from tests.support.graphs import MODES, REMOVES, operators

EITHER = pytest.mark.parametrize("remove", REMOVES)
WHILE = pytest.mark.parametrize("mode", [None, *MODES], ids=str)
map_over: Any = higher_order_map  # typed for tuples only


@WHILE
@EITHER
def test_cond_with_writes_to_intermediates(mode: Any, remove: str) -> None:
    def yes(x: Tensor) -> Tensor:
        y = x + 1
        y[0].add_(1)
        return y

    def no(x: Tensor) -> Tensor:
        y = x.sin()
        return y.mul_(2)

    def f(x: Tensor) -> Any:
        x = x.clone()
        x.add_(1)
        z = torch.cond(x.sum() > 3, yes, no, (x,))
        return z.add_(1)

    for example in (torch.ones(3), torch.zeros(3)):
        assert_equivalent(f, example, remove=remove, tracing_mode=mode)


@WHILE
@EITHER
def test_cond_in_a_branch_of_cond(mode: Any, remove: str) -> None:
    def inner(x: Tensor) -> Tensor:
        y = x.cos()
        return y.add_(1)

    def outer(x: Tensor) -> Any:
        y = x + 1
        y[0].add_(1)
        return torch.cond(y.sum() > 2, inner, torch.sin, (y,))

    def f(x: Tensor) -> Any:
        x = x + 0
        x.t().mul_(2)
        return torch.cond(x.sum() > 3, outer, torch.sin, (x,))

    assert_equivalent(f, torch.ones(2, 2), remove=remove, tracing_mode=mode)


@EITHER
def test_cond_with_results_of_other_strides_than_values_have(remove: str) -> None:
    def f(x: Tensor) -> Any:
        return torch.cond(x.sum() > 3, lambda x: x.t() + 1, lambda x: x.t() * 2, (x,))

    for x in (torch.ones(2, 3), torch.zeros(2, 3)):
        assert capture(f, (x,), remove=remove)(x).stride() == f(x).stride() == (1, 3)


@WHILE
@EITHER
def test_map_with_writes_in_its_body(mode: Any, remove: str) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        z = x + y
        z[0].mul_(2)
        return z.relu_()

    def f(xs: Tensor, y: Tensor) -> Any:
        xs = xs.clone()
        xs[1].add_(1)
        return map_over(body, xs, y).add_(1)

    assert_equivalent(f, torch.randn(3, 2), torch.randn(2), remove=remove, tracing_mode=mode)


# What bodies do to their operands


def twice(x: Tensor) -> Tensor:
    y = x + 1
    y[0].add_(1)
    y.t()[0].mul_(2)
    return y


def counter() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


PROGRAMS: dict[str, Callable[..., Any]] = {}
WRITING: dict[str, Callable[..., Any]] = {}


def program(func: Callable[..., Any]) -> Callable[..., Any]:
    PROGRAMS[func.__name__] = func
    return func


def writing(func: Callable[..., Any]) -> Callable[..., Any]:
    WRITING[func.__name__] = func
    return func


@program
def cond_of_a_view_and_a_closure(x: Tensor) -> Any:
    y = x * 2
    y[0].mul_(3)
    x = x.clone()
    columns = x.t()
    x[0].add_(1)
    return torch.cond(x.sum() > 3, lambda v: twice(v) + y.t(), lambda v: v * y.t(), (columns,)), columns


@program
def cond_in_a_python_loop(x: Tensor) -> Any:
    x = x.clone()
    for _ in range(3):
        x.add_(torch.cond(x.sum() > 3, twice, torch.sin, (x,)))
    return x


@program
def cond_and_its_gradient(x: Tensor) -> Any:
    w = x.detach().clone().requires_grad_()
    y = torch.cond(x.sum() > 0, twice, torch.cos, (w,)) * 1
    y.mul_(2)
    return torch.autograd.grad(y.sum(), w)


@program
def while_loop_with_a_closure(x: Tensor) -> Any:
    y = x * 2
    y[0].add_(1)

    def condition(i: Tensor, x: Tensor) -> Tensor:
        j = i + 1
        j.mul_(2)
        return j < 6

    def body(i: Tensor, x: Tensor) -> Any:
        z = x * y
        z.t()[0].add_(1)
        return i + 1, z

    x = x.clone()
    x[1].mul_(2)
    return while_loop(condition, body, (counter(), x))


@program
def while_loop_in_while_loop(x: Tensor) -> Any:
    def inner(i: Tensor, x: Tensor) -> Any:
        y = x + 1
        y[0].mul_(1.5)
        return i + 1, y

    def outer(i: Tensor, x: Tensor) -> Any:
        y = while_loop(lambda i, x: i < 2, inner, (counter(), x))[1] * 1
        y.relu_()
        return i + 1, y

    return while_loop(lambda i, x: i < 3, outer, (counter(), x))


@program
def scan_with_a_closure(x: Tensor) -> Any:
    factor = x[0] * 2
    factor[0].add_(1)

    def body(carry: Tensor, row: Tensor) -> Any:
        z = carry * factor
        z.add_(row)
        out = z * 1
        out.relu_()
        return z, out

    x = x.clone()
    x[0].add_(1)
    last, rows = scan(body, x[1] * 1, x, reverse=True)
    rows = rows * 1
    rows.t()[0].mul_(3)
    return last, rows


@program
def associative_scan_with_writes(x: Tensor) -> Any:
    def body(a: Tensor, b: Tensor) -> Tensor:
        z = a * b
        z.add_(1)
        return z.sub_(1)

    x = x.clone()
    x[0].mul_(2)
    y = associative_scan(body, x, dim=0, combine_mode="generic") * 1
    y.add_(1)
    return y


@program
def map_of_a_tree(x: Tensor) -> Any:
    def body(row: Any, y: Tensor) -> Any:
        z = row["a"] * 2
        z[0].add_(y[1])
        return {"out": z, "rest": (row["b"] + z,)}

    result = map_over(body, {"a": x.clone().mul_(2), "b": x.t().contiguous().t()}, x[0] * 1)
    result["out"].add_(1)
    return result


@program
def map_and_its_gradient(x: Tensor) -> Any:
    w = x[0].detach().clone().requires_grad_()

    def body(row: Tensor, y: Tensor) -> Tensor:
        z = row * y
        z[0].mul_(y[1])
        return z

    return torch.autograd.grad(map_over(body, x, w).sum(), w)


@writing
def cond_that_writes_two_operands(x: Tensor) -> Any:
    def yes(a: Tensor, b: Tensor) -> Tensor:
        a[0].add_(1)
        b.t()[1].mul_(2)
        return a.sum()

    def no(a: Tensor, b: Tensor) -> Tensor:
        b.mul_(3)
        return a.cos().sum()

    y, x = x * 2, x.clone()
    row = x[1]
    return torch.cond(x.sum() > 3, yes, no, (x, y)), x, y, row


@writing
def cond_that_writes_an_input(x: Tensor) -> Any:
    def yes(a: Tensor) -> Tensor:
        a.add_(1)
        return a * 1

    return torch.cond(x.sum() > 3, yes, lambda a: a * 3, (x[0],)), x.sum()


@writing
def cond_that_writes_a_closure(x: Tensor) -> Any:
    total = torch.zeros(2)

    def yes(a: Tensor) -> Tensor:
        total.add_(a[0])
        return a + total

    out = torch.cond(x.sum() > 3, yes, lambda a: a - total, (x,))
    total.mul_(2)
    return out, total


@writing
def cond_that_only_writes(x: Tensor) -> Any:
    y = x * 1

    def yes(a: Tensor) -> Any:
        a.add_(1)
        return ()

    def no(a: Tensor) -> Any:
        a.mul_(2)
        return ()

    torch.cond(x.sum() > 3, yes, no, (y,))
    return y.add_(1)


@writing
def cond_in_a_branch_that_writes(x: Tensor) -> Any:
    def inner(a: Tensor) -> Tensor:
        a.add_(1)
        return a * 1

    def yes(a: Tensor) -> Any:
        a[0].mul_(2)
        return torch.cond(a.sum() > 2, inner, lambda a: a * 2, (a,))

    x = x.clone()
    out = torch.cond(x.sum() > 3, yes, torch.sin, (x,))
    out.add_(1)
    return out, x


@writing
def cond_that_reads_the_layout_of_what_it_writes(x: Tensor) -> Any:
    def yes(a: Tensor) -> Tensor:
        a.reshape(-1).add_(1)  # a copy of columns
        return a * 1

    x = x.clone()
    return torch.cond(x.sum() > 3, yes, torch.sin, (x.t(),)), x


@writing
def while_loop_that_writes_what_it_carries(x: Tensor) -> Any:
    def body(i: Tensor, x: Tensor) -> Any:
        x.mul_(2)
        return i + 1, x.clone()

    x = x.clone()
    return while_loop(lambda i, x: i < 3 + 0 * x[0, 0], body, (counter(), x)), x


@writing
def while_loop_that_writes_a_closure(x: Tensor) -> Any:
    y = x * 2

    def body(i: Tensor, z: Tensor) -> Any:
        y.t()[0].add_(1)
        x.add_(1)
        return i + 1, z + y

    return while_loop(lambda i, z: (i < 3) | (x[0, 0] < 2), body, (counter(), x * 1)), y


@pytest.mark.every(5)
@WHILE
@EITHER
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, mode: Any, remove: str) -> None:
    example = torch.linspace(0.1, 1, 6).view(3, 2)
    assert_equivalent(PROGRAMS[name], example, remove=remove, tracing_mode=mode, strides=mode is None)


@pytest.mark.slow
@pytest.mark.every(9)
@WHILE
@EITHER
@pytest.mark.parametrize("name", WRITING)
def test_bodies_that_write_to_operands(name: str, mode: Any, remove: str) -> None:
    func = torch.no_grad()(WRITING[name])
    for example in (torch.linspace(0.1, 1, 6).view(3, 2), torch.linspace(0, 0.5, 6).view(3, 2)):
        assert_equivalent(func, example, remove=remove, tracing_mode=mode, strides=mode is None)


def test_a_written_operand_is_a_further_result() -> None:
    def f(x: Tensor) -> Any:
        with torch.no_grad():
            return torch.cond(x.sum() > 3, lambda a: a.add_(1) * 1, torch.sin, (x,))

    graph: Any = make_fx(functionalize(f), tracing_mode="fake")(torch.ones(3))
    assert operators(graph)[-2:] == ["<built-in function getitem>", "copy_.default"]
    assert operators(graph.true_graph_0) == ["add.Tensor", "mul.Tensor", "clone.default"]
    assert operators(graph.false_graph_0) == ["sin.default", "clone.default"]


@WHILE
@EITHER
def test_what_torch_refuses_is_refused(mode: Any, remove: str) -> None:
    def branch(x: Tensor) -> Any:
        return torch.cond(x.sum() > 3, lambda a: a.add_(1) * 1, torch.cos, (x,))

    def row(x: Tensor) -> Any:
        return map_over(lambda row: row.add_(1) * 2, x)

    def step(x: Tensor) -> Any:
        return scan(lambda carry, row: (carry + row.add_(1), row * 1), x[0] * 1, x)

    for func in (branch, row, step):
        pure = functionalize(func, remove=remove)
        with pytest.raises(RuntimeError, match="input mutation"):
            (pure if mode is None else make_fx(pure, tracing_mode=mode))(torch.ones(3, 2))


@pytest.mark.parametrize("remove", REMOVES)
@pytest.mark.slow
def test_what_a_graph_cannot_say_is_refused(remove: str) -> None:
    def shared(x: Tensor) -> Any:
        return torch.cond(x.sum() > 3, lambda a, b: a.add_(1) + b[0], lambda a, b: b.sin()[0] + a, (x[0], x))

    def returned(x: Tensor) -> Any:
        return torch.cond(x.sum() > 3, lambda a: a, lambda a: a * 1, (x,)).add_(1)

    def moved(x: Tensor) -> Any:
        return torch.cond(x.sum() > 3, lambda a: a.t_() * 1, lambda a: a.t() * 1, (x,))

    def decided(x: Tensor) -> Any:
        return while_loop(lambda i, z: x.add_(1).sum() < 30, lambda i, z: (i + 1, z * 2), (counter(), x * 1))

    for func, word in ((shared, "shares elements"), (returned, "returned an operand"), (decided, "writes to operand")):
        call = torch.no_grad()(functionalize(func, remove=remove))
        with pytest.raises(UnsupportedMutationError, match=word):
            make_fx(call, tracing_mode="fake")(torch.ones(3, 2))
        assert_equivalent(torch.no_grad()(func), torch.ones(3, 2), remove=remove)
    assert_equivalent(torch.no_grad()(moved), torch.ones(3, 2), remove=remove)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_bodies_of_flex_attention_read_tensors_at_their_positions() -> None:
    def masked(q: Tensor, parts: Tensor) -> Any:
        blocks = create_block_mask(lambda b, h, i, j: parts[i] == parts[j], None, None, 128, 128, device="cpu")
        return flex_attention(q, q, q, block_mask=blocks)

    def scored(q: Tensor, parts: Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + parts[i] * parts[j])

    q, parts = torch.linspace(-1, 1, 2 * 128 * 4).view(1, 2, 128, 4), torch.arange(128) // 50
    for func in (masked, scored):
        with torch.no_grad():
            program = capture(func, (q, parts))
            for other in (parts, parts.flip(0) * 2):
                torch.testing.assert_close(program(q, other), func(q, other))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_sizes_that_dynamo_passes_are_known() -> None:
    def doubled(x: Tensor) -> Any:
        return while_loop(lambda a: a.sum() < 30, lambda a: (a * a.size(0),), (x,))

    doubled(torch.ones(2)), doubled(torch.ones(3))  # from now on, Dynamo takes the size for one that differs
    x = torch.tensor([1.0, 2.0, 0.5])
    program = capture(doubled, (torch.ones(3),))
    torch.testing.assert_close(program.to_exported_program().module()(x), doubled(x))
