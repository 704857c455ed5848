"""Outputs that are inputs, views of inputs, of intermediates, of each other; and a caller who writes to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.equality import Check, Table, differentiated, written_afterwards

programs = Table()
SQUARE = torch.arange(16.0).view(4, 4)
LINE = torch.arange(12.0)


@programs(SQUARE)
def two_views_of_one_intermediate(a: Tensor) -> Any:
    b = a * 2
    return b.view(-1), b.view(2, 8)


@programs(SQUARE)
def a_view_of_an_input(a: Tensor) -> Any:
    return a.view(-1)


@programs(SQUARE, LINE)
def views_of_two_written_inputs(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    b.add_(1)
    return a.t(), b[3:], a[1] + b[:4]


@programs(SQUARE)
def a_view_with_new_metadata(a: Tensor) -> Any:
    b = a.view(2, 8)
    b.t_()
    return b, a[0].unsqueeze_(0)


@programs(SQUARE)
def several_views_of_a_written_input(a: Tensor) -> Any:
    a.mul_(3)
    return a.view(-1), a[0], a.t(), a


@programs(SQUARE)
def a_single_view_of_an_intermediate(a: Tensor) -> Any:
    return (a + 1).view(-1)


@programs(SQUARE)
def an_intermediate_returned_twice(a: Tensor) -> Any:
    b = a + 1
    return b, b, b.view(-1)


@programs(SQUARE)
def intermediates_first_and_last(a: Tensor) -> Any:
    b, c = a + 1, a * 2
    return b.view(-1), c, b, c[0], c[1:, 1:]


@programs(SQUARE)
def a_detached_view_among_others(a: Tensor) -> Any:
    b = a + 1
    return b.view(-1), b.detach(), b


@programs(SQUARE)
def without_gradient(a: Tensor) -> Any:
    with torch.no_grad():
        b = a * 2
        view = b.view(-1)
    return view, b.t(), (a * 3)[0]


@programs(SQUARE, LINE)
def all_kinds(a: Tensor, b: Tensor) -> Any:
    c = a + 1
    b.mul_(2)
    return c, c.view(-1), a, a.t(), b, b[1:], c[0] * b[:4], (c * 2).sum(0)


@programs(SQUARE)
def pieces_of_an_input(a: Tensor) -> Any:
    return a.unbind(0), a.split(3, 1), a.chunk(2)[1]


@programs(SQUARE)
def pieces_of_an_intermediate(a: Tensor) -> Any:
    b = a * 2
    b[0].add_(1)
    return b.unbind(1)[2], b.split([1, 3])[1], b


@programs(LINE, LINE + 1)
def a_view_of_the_right_input(a: Tensor, b: Tensor) -> Any:
    return b.view(3, 4), a.view(3, 4), b[2:]


@programs(SQUARE)
def chains_of_views(a: Tensor) -> Any:
    b = a + 1
    view = b.t()[1:].unsqueeze(0).squeeze(0).t()
    view.mul_(2)
    return view, b, view[0], a.view(2, 2, 4).permute(2, 0, 1)[1]


@programs(LINE)
def lazy_bits_and_dtypes(a: Tensor) -> Any:
    b = torch.view_as_complex(a.view(6, 2))
    return b.conj(), b.imag, a.view(torch.int32), torch.view_as_real(b)


@programs(SQUARE)
def as_strided_of_each(a: Tensor) -> Any:
    b = a + 1
    return a.as_strided((2, 2), (1, 4), 3), b.as_strided((4,), (5,)), b


@programs(SQUARE)
def new_metadata_of_an_intermediate(a: Tensor) -> Any:
    b = a + 1
    b.t_().unsqueeze_(0)
    return b, b.view(-1) if b.is_contiguous() else b[0], b.detach().squeeze_(0)


@programs.each
def test_outputs(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)


@programs.each
def test_strides_of_outputs_in_direct_use(func: Any, inputs: Any, remove: str) -> None:
    assert_equivalent(func, *inputs, remove=remove, strides=True)


@programs.each
def test_a_caller_who_writes_to_the_outputs(func: Any, inputs: Any, remove: str) -> None:
    def ours(_: Any) -> Any:
        return written_afterwards(functionalize(func, remove=remove))

    assert_equivalent(torch.no_grad()(written_afterwards(func)), *inputs, transform=ours)


def _with_gradients(test: Any) -> Any:
    return programs.each(test, "lazy_bits_and_dtypes", "without_gradient", "a_detached_view_among_others")


@_with_gradients
def test_gradients_through_outputs(func: Any, inputs: Any, remove: str) -> None:
    assert_equivalent(
        differentiated(func), *inputs, transform=lambda _: differentiated(functionalize(func, remove=remove))
    )


def test_flags_of_outputs(remove: str) -> None:
    """Which output wants a gradient, is a leaf, is a view: as in eager, for each program above."""

    def flags(func: Any, inputs: Any) -> Any:
        given = [x.clone().requires_grad_() * 1 if x.is_floating_point() else x for x in inputs]
        outputs = torch.utils._pytree.tree_leaves(func(*given))
        return [(x.requires_grad, x.is_leaf, x._is_view(), x.grad_fn is None) for x in outputs]

    for row in programs.rows:
        func, inputs = row.values
        assert flags(functionalize(func, remove=remove), inputs) == flags(func, inputs), func.__name__


@pytest.mark.parametrize("wrong", ["multi-output view", "view made without gradient"])
def test_writes_that_autograd_refuses_afterwards(wrong: str, remove: str) -> None:
    def pieces(a: Tensor) -> Any:
        return a.unbind(0)[0]

    def silent(a: Tensor) -> Any:
        with torch.no_grad():
            return a.view(-1)

    func = pieces if wrong == "multi-output view" else silent
    for call in (func, functionalize(func, remove=remove)):
        a = SQUARE.clone().requires_grad_() * 1
        with pytest.raises(RuntimeError, match=r"modified inplace|in-place|inplace"):
            call(a).mul_(2)


def test_an_autograd_function_that_returns_its_input(remove: str) -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * 2

    def f(a: Tensor) -> Any:
        out = Same.apply(a)  # type: ignore[no-untyped-call]
        return out, (out * a)[0]

    assert_equivalent(differentiated(f), SQUARE, transform=lambda _: differentiated(functionalize(f, remove=remove)))
