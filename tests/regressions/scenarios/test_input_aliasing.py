"""Inputs that are one tensor, views of one, of several storages in any order; shared falsely; with and without use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import functionalize
from functionalize.verify import assert_equivalent
from tests.support.equality import Check, Table

programs = Table()
LINE = torch.arange(16.0)
SQUARE = LINE.view(4, 4)
OTHER = torch.arange(16.0) + 1


@programs(LINE, LINE)
def one_tensor_twice(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return a + b


@programs(LINE, OTHER, LINE, OTHER, LINE)
def one_tensor_often(a: Tensor, x: Tensor, b: Tensor, y: Tensor, c: Tensor) -> Any:
    a.mul_(2)
    y[1:].add_(b[:-1] * 1)
    return a + c, x - y


@programs(LINE, LINE)
def twice_and_returned(a: Tensor, b: Tensor) -> Any:
    b.add_(1)
    return a, b, a[1:]


@programs(SQUARE, LINE)
def a_view_and_its_base(a: Tensor, b: Tensor) -> Any:
    b.add_(1)
    a[0].mul_(2)
    return a + 1, b * 1


@programs(SQUARE[1:], SQUARE[:3])
def two_views(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return a + b


@programs(SQUARE[1:], SQUARE[:3])
def two_views_that_are_returned_as_views(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return a.t(), b[0], b.view(-1)[2:]


@programs(LINE[:4], OTHER, SQUARE[0], OTHER.view(4, 4)[1])
def two_storages_in_turn(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Any:
    y.add_(a)
    a.mul_(b + 1)
    return x.sum(), b * y


@programs(SQUARE[3], LINE, SQUARE[:, 1])
def base_out_of_order(a: Tensor, base: Tensor, b: Tensor) -> Any:
    base[4:].mul_(2)
    b.add_(a.sum())
    return a + b, base.sum()


@programs(SQUARE, SQUARE.t())
def metadata_and_data(a: Tensor, b: Tensor) -> Any:
    a.t_()
    b.mul_(2)
    a[0].add_(1)
    return a + 0, b.t() + 0


@programs(LINE[:8], LINE[4:12], LINE[8:], LINE[::4], SQUARE.t())
def everything_at_once(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Any:
    a.mul_(2)
    d.add_(1)
    e[0].neg_()
    b.unsqueeze_(0)
    c.copy_(a)
    return b[0, 1:] * 1, e.view(-1)[0] if e.is_contiguous() else e[0], a, d


@programs(LINE[:4], LINE[4:8], LINE[8:])
def disjoint_parts(a: Tensor, b: Tensor, c: Tensor) -> Any:
    a.add_(1)
    b.mul_(a)
    return c.view(2, 4) + 1


@programs(LINE.expand(3, 16), OTHER)
def an_expanded_input_is_read(a: Tensor, b: Tensor) -> Any:
    b.add_(a[1])
    return a.sum(0) + b


@programs(LINE[:1].unsqueeze(1), LINE[:1])
def views_of_one_element(a: Tensor, b: Tensor) -> Any:
    a.add_(1)
    return b * 2


@programs(LINE, LINE.view(torch.int32), LINE.view(torch.complex64))
def several_dtypes(a: Tensor, bits: Tensor, pairs: Tensor) -> Any:
    pairs.imag.zero_()
    bits[0] = 0x40000000
    return a[:4] * 1, pairs[0].real * 2


@programs.each
def test_inputs(func: Any, inputs: Any, check: Check) -> None:
    check(func, *inputs)


FALSE = {
    "halves": (LINE[:8], LINE[8:]),
    "even and odd": (LINE[::2], LINE[1::2]),
    "columns": (SQUARE[:, :2], SQUARE[:, 2:]),
    "rows and the rest": (SQUARE[0], SQUARE[1:]),
    "interleaved blocks": (LINE.as_strided((4, 2), (4, 1), 0), LINE.as_strided((4, 2), (4, 1), 2)),
    "a storage of two tensors": (LINE[3:5], LINE[9:10]),
}


@pytest.mark.parametrize("name", FALSE)
def test_a_storage_that_is_shared_without_meeting(name: str, check: Check) -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        a.mul_(2)
        b.add_(1)
        return a.sum() * b

    check(f, *FALSE[name])


def test_leaves_that_share_a_storage_with_what_needs_no_gradient(remove: str) -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> Any:
        b.mul_(2)
        return (a * c).sum() + b.sum()

    def run(func: Any) -> Any:
        base = LINE.clone()
        leaf = OTHER[:4].clone().requires_grad_()
        loss = func(leaf, base[2:6], base[4:8])
        loss.backward()
        return loss.detach(), leaf.grad, base

    for got, want in zip(run(functionalize(f, remove=remove)), run(f), strict=True):
        torch.testing.assert_close(got, want)


def test_keywords_and_nests_that_alias(remove: str) -> None:
    def f(tree: dict[str, Any], *rest: Tensor) -> Any:
        tree["a"][0].add_(1)
        rest[0][1:].mul_(tree["b"][:-1] * 1)
        return tree["b"] + rest[0]

    assert_equivalent(f, {"a": [LINE[:4], OTHER], "b": LINE[2:6]}, LINE[4:8], remove=remove)
