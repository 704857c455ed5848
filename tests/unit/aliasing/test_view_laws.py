"""The laws of view rules, by hypothesis over the registry. Eager views and ``copy_`` are the oracle.

A rule is asked through the executor, in both ways to remove, on values whose strides are those of the source
or others. Limits: static sizes; symbolic ones are the matter of the traced tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.regenerate import tile_runs
from functionalize.aliasing.view_rules import (
    MULTI_OUTPUT_VIEWS,
    VIEW_RULES,
    Progression,
    ViewRule,
    lower,
    permuted_dense,
    strided,
)
from functionalize.transform.values import ValueExecutor
from tests.support.addresses import distinct

aten = torch.ops.aten
Draw = Callable[[st.SearchStrategy[Any]], Any]
REMOVE_VIEWS = pytest.mark.parametrize(
    "remove_views",
    [pytest.param(False, id="mutations", marks=pytest.mark.slow), pytest.param(True, id="mutations_and_views")],
)
brief = settings(max_examples=25, deadline=None, derandomize=True)


# Sources and arguments


def sizes(draw: Draw, low: int = 0, high: int = 3, least: int = 0) -> list[int]:
    return list(draw(st.lists(st.integers(least, 4), min_size=low, max_size=high)))


def numbered(size: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Each element another number."""
    count = math.prod(size)
    return torch.arange(1, count + 1).to(dtype).reshape(size)


def laid_out(draw: Draw, tensor: Tensor) -> Tensor:
    """The same elements under the same indices, perhaps in another order in storage, perhaps with gaps."""
    order = draw(st.permutations(range(tensor.dim())))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    permuted = tensor.permute(order).contiguous().permute(back)
    if tensor.dim() and draw(st.booleans()):
        gaps = torch.zeros([*permuted.size()[:-1], 2 * permuted.size(-1)], dtype=permuted.dtype)[..., ::2]
        return gaps.copy_(permuted)
    return permuted


def source_of(draw: Draw, *, low: int = 0, high: int = 3, least: int = 0) -> Tensor:
    return laid_out(draw, numbered(sizes(draw, low, high, least)))


def axis(draw: Draw, source: Tensor) -> int:
    return int(draw(st.integers(-source.dim(), source.dim() - 1)))


Case = tuple[Tensor, tuple[Any, ...]]
CASES: dict[Any, Callable[[Draw], Case]] = {}


def case(*ops: Any) -> Callable[[Callable[[Draw], Case]], Callable[[Draw], Case]]:
    def register(build: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
        CASES.update(dict.fromkeys(ops, build))
        return build

    return register


@case(aten.view.default, aten._unsafe_view.default)
def a_view(draw: Draw) -> Case:
    source = numbered(sizes(draw, least=1))
    factors = sizes(draw, least=1)
    size = [f for f in factors if f == 1]
    rest = source.numel()
    for factor in factors:
        if rest % factor == 0:
            size.append(factor)
            rest //= factor
    return source, ([*size, draw(st.sampled_from([rest, -1]))],)


@case(aten._reshape_alias.default)
def a_reshape(draw: Draw) -> Case:
    source = numbered(sizes(draw, low=1, least=1))
    return source, ([source.numel()], [1])


@case(aten.squeeze.default)
def a_squeeze(draw: Draw) -> Case:
    return source_of(draw), ()


@case(aten.squeeze.dim)
def a_squeeze_of_one(draw: Draw) -> Case:
    source = source_of(draw, low=1)
    ones = [dim for dim in range(-source.dim(), source.dim()) if source.size(dim) == 1]
    assume(ones)  # the squeeze of another dimension is no step: the graph keeps the view that it has
    return source, (draw(st.sampled_from(ones)),)


@case(aten.squeeze.dims)
def a_squeeze_of_some(draw: Draw) -> Case:
    source = source_of(draw, low=1)
    return source, (draw(st.lists(st.integers(0, source.dim() - 1), unique=True)),)


@case(aten.unsqueeze.default)
def an_unsqueeze(draw: Draw) -> Case:
    source = source_of(draw)
    return source, (draw(st.integers(-source.dim() - 1, source.dim())),)


@case(aten.permute.default)
def a_permute(draw: Draw) -> Case:
    source = source_of(draw)
    order = draw(st.permutations(range(source.dim())))
    return source, ([dim - source.dim() * draw(st.integers(0, 1)) for dim in order],)


@case(aten.transpose.int)
def a_transpose(draw: Draw) -> Case:
    source = source_of(draw, low=1)
    return source, (axis(draw, source), axis(draw, source))


@case(aten.t.default)
def a_t(draw: Draw) -> Case:
    return source_of(draw, high=2), ()


@case(aten.expand.default)
def an_expand(draw: Draw) -> Case:
    source = source_of(draw, least=1)
    kept = [draw(st.sampled_from([size, -1])) if size != 1 else draw(st.integers(1, 3)) for size in source.size()]
    return source, ([*sizes(draw, high=1, least=1), *kept],)


@case(aten.select.int)
def a_select(draw: Draw) -> Case:
    source = source_of(draw, low=1, least=1)
    dim = axis(draw, source)
    return source, (dim, draw(st.integers(-source.size(dim), source.size(dim) - 1)))


@case(aten.slice.Tensor)
def a_slice(draw: Draw) -> Case:
    source = source_of(draw, low=1)
    bound = st.none() | st.integers(-6, 6) | st.just(2**63 - 1)
    return source, (axis(draw, source), draw(bound), draw(bound), draw(st.integers(1, 3)))


@case(aten.diagonal.default)
def a_diagonal(draw: Draw) -> Case:
    source = source_of(draw, low=2)
    one, two = draw(st.permutations(range(source.dim())))[:2]
    return source, (draw(st.integers(-3, 3)), one, two)


@case(aten.view.dtype)
def a_view_of_bytes(draw: Draw) -> Case:
    size = [*sizes(draw, high=2, least=1), 4 * draw(st.integers(1, 2))]
    return numbered(size, torch.int32), (draw(st.sampled_from([torch.int16, torch.int64, torch.float32])),)


@case(aten.view_as_real.default)
def a_view_as_real(draw: Draw) -> Case:
    return source_of(draw) * (1 - 2j), ()


@case(aten.view_as_complex.default)
def a_view_as_complex(draw: Draw) -> Case:
    return numbered([*sizes(draw, least=1), 2]), ()


@case(aten._conj.default, aten._neg_view.default)
def a_lazy_sign(draw: Draw) -> Case:
    return source_of(draw) * (1 - 2j), ()


@case(aten.unfold.default)
def an_unfold(draw: Draw) -> Case:
    source = source_of(draw, least=1)
    dim = axis(draw, source) if source.dim() else 0
    length = source.size(dim) if source.dim() else 1
    return source, (dim, draw(st.integers(1, length)), draw(st.integers(1, 3)))


# What a law is asked of


@dataclass(frozen=True)
class Asked:
    """A rule, ready to be called, and what eager says."""

    executor: ValueExecutor
    rule: ViewRule
    source: Tensor
    eager: Callable[[Tensor], Tensor]

    def replay(self, base: Tensor) -> Tensor:
        view: Tensor = self.rule.replay(self.executor.call, base)
        return view

    def inverse(self, base: Tensor, view: Tensor) -> Tensor:
        after: Tensor = self.rule.inverse(self.executor.call, lambda: base, view)
        return after

    def written(self, base: Tensor, view: Tensor) -> Tensor:
        """What eager leaves in a base after a write through the view."""
        copy = torch.empty_strided(self.source.size(), self.source.stride(), dtype=base.dtype).copy_(base)
        self.eager(copy).copy_(view)
        return copy

    @property
    def injective(self) -> bool:
        """Whether no two positions of the view share an element."""
        return distinct(Layout.of(self.eager(self.source)))


def ask(op: Any, draw: Draw, *, remove_views: bool) -> Asked:
    source, args = CASES[op](draw)

    def eager(base: Tensor) -> Tensor:
        view: Tensor = op(base, *args)
        return view

    rule = VIEW_RULES[op](Layout.of(source), Layout.of(eager(source)), *args)
    return Asked(ValueExecutor(remove_views=remove_views), rule, source, eager)


def same(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and one.size() == two.size() and bool(torch.equal(one, two))


def apart(one: Tensor, two: Tensor) -> bool:
    return one.numel() == 0 or one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()


OPS = pytest.mark.parametrize("op", sorted(VIEW_RULES, key=str), ids=str)


def test_every_rule_has_a_law() -> None:
    assert set(CASES) == set(VIEW_RULES)


@OPS
@REMOVE_VIEWS
@brief
@given(data=st.data())
def test_laws_of_a_rule(op: Any, remove_views: bool, data: st.DataObject) -> None:
    holds(ask(op, data.draw, remove_views=remove_views), data.draw)


def holds(asked: Asked, draw: Draw) -> None:
    """All laws, for one rule, on one base."""
    base = laid_out(draw, asked.source)
    view = asked.replay(base)
    assert same(view, asked.eager(asked.source)), "replay is what eager sees"
    assert same(asked.inverse(base, view), base), "writing what was read changes nothing"
    if asked.executor.remove_views:
        assert apart(view, base), "a copy shares nothing"
    new, newer = (replayed(asked, base, factor, draw) for factor in (10, 100))
    after = asked.inverse(base, new)
    assert same(asked.replay(after), new), "a write is read back"
    if asked.injective:
        assert same(after, asked.written(base, new)), "a write changes what eager changes"
    assert same(asked.inverse(after, newer), asked.inverse(base, newer)), "the last write wins"
    if asked.rule.covers:
        assert same(asked.rule.inverse(asked.executor.call, unread, new), after), "the old base is not needed"


def replayed(asked: Asked, base: Tensor, factor: int, draw: Draw) -> Tensor:
    """A value to write: any where the view is injective, else one that is the same wherever elements are shared."""
    if not asked.injective:
        return laid_out(draw, asked.replay(base * factor))
    return laid_out(draw, asked.replay(base)) * factor + factor


def unread() -> Tensor:
    raise AssertionError("a rule that covers its source asked for the old value")


@REMOVE_VIEWS
@brief
@given(data=st.data())
def test_laws_of_strided(remove_views: bool, data: st.DataObject) -> None:
    source = numbered([data.draw(st.integers(21, 60))])
    size = sizes(data.draw, high=2)
    stride = [data.draw(st.integers(0, 6)) for _ in size]
    layout = (size, stride, data.draw(st.integers(0, 2)))

    def eager(base: Tensor) -> Tensor:
        return base.as_strided(*layout)

    rule = strided(Layout.of(source), Layout.of(eager(source)))
    asked = Asked(ValueExecutor(remove_views=remove_views), rule, source, eager)
    if asked.injective:
        holds(asked, data.draw)
    else:
        assert same(asked.replay(source), eager(source))


@REMOVE_VIEWS
@brief
@given(data=st.data())
def test_laws_of_permuted_dense(remove_views: bool, data: st.DataObject) -> None:
    size = sizes(data.draw, least=1)
    order = data.draw(st.permutations(range(len(size))))
    layout = Layout.of(numbered(size).permute(order))
    source = numbered([math.prod(size)])

    def eager(base: Tensor) -> Tensor:
        return base.as_strided(layout.size, layout.stride)

    holds(Asked(ValueExecutor(remove_views=remove_views), permuted_dense(layout), source, eager), data.draw)


# Several views of one source


def pieces(op: Any, draw: Draw) -> Case:
    source = source_of(draw, low=1, least=1)
    dim = axis(draw, source)
    if op is aten.unbind.int:
        return source, (dim,)
    length = source.size(dim)
    if op in (aten.split.Tensor, aten.unsafe_split.Tensor):
        return source, (draw(st.integers(1, length)), dim)
    cut = draw(st.integers(0, length))
    return source, ([cut, length - cut], dim)


@pytest.mark.parametrize("op", sorted(MULTI_OUTPUT_VIEWS, key=str), ids=str)
@brief
@given(data=st.data())
def test_multi_output_views_are_single_ones(op: Any, data: st.DataObject) -> None:
    source, args = pieces(op, data.draw)
    outs = op(source, *args)
    singles = lower(op, [Layout.of(out) for out in outs], args)
    assert len(singles) == len(outs)
    for out, (single, single_args) in zip(outs, singles, strict=True):
        assert Layout.of(single(source, *single_args)).key == Layout.of(out).key


parts = st.builds(
    lambda dim, start, count, drops: Progression(dim, start, start + (1 if drops else count), drops),
    st.integers(0, 1),
    st.integers(0, 8),
    st.integers(1, 3),
    st.booleans(),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.none() | parts, max_size=6))
def test_tile_runs(candidates: list[Progression | None]) -> None:
    apart_ones: list[Progression | None] = []
    for part in candidates:
        if part is None or all(separate(part, other) for other in apart_ones if other is not None):
            apart_ones.append(part)
    runs = tile_runs(list(enumerate(apart_ones)))
    members = [member for run in runs for member in run]
    assert len(members) == len(set(members)), "no view is written twice"
    for run in runs:
        tiles = [apart_ones[member] for member in run]
        assert len(run) > 1 and all(follows(one, two) for one, two in itertools.pairwise(tiles))
    for one, left in enumerate(apart_ones):
        for two, right in enumerate(apart_ones):
            if follows(left, right):
                assert any(one in run and two in run for run in runs), "neighbours are written together"


def separate(one: Progression, two: Progression) -> bool:
    return one.dim == two.dim and (one.stop <= two.start or two.stop <= one.start)


def follows(one: Progression | None, two: Progression | None) -> bool:
    if one is None or two is None:
        return False
    return (one.dim, one.drops, one.stop) == (two.dim, two.drops, two.start)
