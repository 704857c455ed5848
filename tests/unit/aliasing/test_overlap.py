"""Where tensors lie, against an oracle that lists the address of each element.

"Disjoint" and "is a box" are only said when true: the oracle holds the claims. That the claims are not empty is
held by the cases that must be recognised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.overlap import (
    Box,
    as_dtype,
    box_of,
    boxes_disjoint,
    disjoint,
    disjoint_guarded,
    flat_base_layout,
    meets_elsewhere,
    reaches,
    repeats_part,
    route,
    spans_disjoint,
)
from tests.support.addresses import addresses, distinct

Draw = Callable[[st.SearchStrategy[Any]], Any]
thorough = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def roots(draw: Draw) -> Layout:
    """A tensor that somebody allocated: dense or with gaps, its dimensions in any order."""
    size = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    stride, step = [0] * len(size), 1
    for dim in draw(st.permutations(range(len(size)))):
        step *= draw(st.sampled_from([1, 1, 2]))
        stride[dim] = step
        step *= size[dim]
    return Layout(tuple(size), tuple(stride), draw(st.integers(0, 3)), torch.float32)


@st.composite
def views(draw: Draw, root: Layout) -> Layout:
    """A view that a program might make: selects, slices, transposes, new and widened dimensions."""
    tensor = tensor_at(root)
    for _ in range(draw(st.integers(0, 4))):
        tensor = one_step(draw, tensor)
    return Layout.of(tensor)


def one_step(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor.unsqueeze(0)
    dim: int = draw(st.integers(0, tensor.dim() - 1))
    kind = draw(st.sampled_from(["select", "slice", "permute", "unsqueeze", "expand"]))
    if kind == "select":
        return tensor.select(dim, draw(st.integers(0, tensor.size(dim) - 1)))
    if kind == "slice":
        start = draw(st.integers(0, tensor.size(dim) - 1))
        piece = [slice(None)] * dim + [slice(start, draw(st.integers(start + 1, 5)), draw(st.integers(1, 2)))]
        return tensor[tuple(piece)]
    if kind == "permute":
        return tensor.permute(draw(st.permutations(range(tensor.dim()))))
    return tensor.unsqueeze(dim) if kind == "unsqueeze" else tensor.unsqueeze(0).expand(2, *tensor.size())


@st.composite
def layouts(draw: Draw) -> Layout:
    """Any layout, with overlaps and empty ones among them."""
    size = draw(st.lists(st.integers(0, 3), max_size=3))
    stride = [draw(st.integers(0, 6)) for _ in size]
    return Layout(tuple(size), tuple(stride), draw(st.integers(0, 8)), torch.float32)


def tensor_at(layout: Layout) -> torch.Tensor:
    """A tensor with a layout, whose elements say their addresses."""
    return torch.arange(600).to(layout.dtype).as_strided(layout.size, layout.stride, layout.offset)


def elements_of(root: Layout, found: Box) -> list[int]:
    """The addresses in a box, each once."""
    indices = itertools.product(
        *(range(axis.start, axis.start + axis.count * axis.step, axis.step) for axis in found.axes)
    )
    return [root.offset + sum(i * stride for i, stride in zip(index, root.stride, strict=True)) for index in indices]


@thorough
@given(layouts())
@pytest.mark.slow
def test_span_and_extent(layout: Layout) -> None:
    found = addresses(layout)
    item = layout.dtype.itemsize
    expected = (min(found) * item, (max(found) + 1) * item) if found else (0, 0)
    assert layout.span == expected
    assert layout.extent == (expected[1] - expected[0]) // item
    assert layout.elements == len(found)


@thorough
@given(layouts() | roots())
def test_dense_is_each_element_once(layout: Layout) -> None:
    found = addresses(layout)
    if layout.dense:
        assert sorted(found) == list(range(layout.offset, layout.offset + len(found)))


@thorough
@given(layouts() | roots())
def test_contiguous_is_what_torch_says(layout: Layout) -> None:
    assume(0 not in layout.size)  # torch calls every empty tensor contiguous
    assert layout.contiguous == tensor_at(layout).is_contiguous()


@thorough
@given(st.data())
def test_a_box_has_the_elements_of_its_view(data: st.DataObject) -> None:
    root = data.draw(roots())
    view = data.draw(views(root) | layouts())
    found = box_of(root, view)
    if found is not None:
        assert sorted(elements_of(root, found)) == sorted(set(addresses(view)))


@thorough
@given(st.data())
def test_disjoint_layouts_share_no_element(data: st.DataObject) -> None:
    root = data.draw(roots())
    one, two = data.draw(views(root)), data.draw(views(root))
    meet = bool(set(addresses(one)) & set(addresses(two)))
    if spans_disjoint(one, two):
        assert not meet
    box_1, box_2 = box_of(root, one), box_of(root, two)
    if box_1 is not None and box_2 is not None and boxes_disjoint(box_1, box_2):
        assert not meet


@thorough
@given(layouts(), layouts())
def test_disjoint_spans_of_two_dtypes(one: Layout, other: Layout) -> None:
    two = Layout(other.size, other.stride, other.offset, torch.float64)
    bytes_1 = {4 * address + byte for address in addresses(one) for byte in range(4)}
    bytes_2 = {8 * address + byte for address in addresses(two) for byte in range(8)}
    if spans_disjoint(one, two):
        assert not bytes_1 & bytes_2


@thorough
@given(st.data())
def test_a_route_reaches_the_view(data: st.DataObject) -> None:
    root = data.draw(roots())
    view = data.draw(views(root))
    way = route(root, view)
    assume(way is not None)
    assert way is not None
    tensor = tensor_at(root)
    for step in way:
        tensor = step.op(tensor, *step.args)
        assert tuple(tensor.size()) == step.layout.size
        assert [int(number) for number in tensor.flatten()] == addresses(step.layout), "a step reaches what it says"
    assert [int(number) for number in tensor.flatten()] == addresses(view)
    assert not way or way[-1].layout is view, "the last step's layout is the view's, to the stride"


@thorough
@given(st.data())
def test_what_reaches_a_layout_has_its_elements(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(1, 4), max_size=2))
    source = Layout.of(torch.zeros(size))
    layout = data.draw(layouts())
    if reaches(source, layout):
        assert set(addresses(layout)) <= set(addresses(source))


@thorough
@given(st.data())
def test_a_flat_base_has_the_elements_of_both(data: st.DataObject) -> None:
    old, layout = data.draw(roots()), data.draw(layouts())
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.int16]))
    layout = Layout(layout.size, layout.stride, layout.offset, dtype)
    whole = flat_base_layout(old, layout)
    assert whole is not None, "only symbols can hide what a flat base would be"
    assert whole.dtype == old.dtype and whole.contiguous
    for part in (old, layout):
        assert part.span == (0, 0) or (whole.span[0] <= part.span[0] and part.span[1] <= whole.span[1])
    assert reaches(whole, layout)
    assert as_dtype(whole, dtype).span == whole.span


SQUARE = Layout.of(torch.zeros(4, 4))


DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float32, torch.float64, torch.uint8])


@thorough
@given(st.data())
def test_where_two_layouts_of_one_size_meet(data: st.DataObject) -> None:
    size = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    steps = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 4, 6, 12, 16]), min_size=len(size), max_size=len(size))
    strides = data.draw(steps), data.draw(steps)
    strides = data.draw(st.sampled_from([strides, (strides[0], strides[0])]))
    one, two = (Layout(size, tuple(s), data.draw(st.integers(0, 9)), data.draw(DTYPES)) for s in strides)
    bytes_1, bytes_2 = ([address * layout.dtype.itemsize for address in addresses(layout)] for layout in (one, two))
    meetings = [
        (i, j)
        for (i, a), (j, b) in itertools.product(enumerate(bytes_1), enumerate(bytes_2))
        if a < b + two.dtype.itemsize and b < a + one.dtype.itemsize
    ]
    assert disjoint(one, two) == (not meetings)
    assert meets_elsewhere(one, two) == any(i != j for i, j in meetings)
    assert not (disjoint_guarded(one, two) and meetings)
    if one.dtype is two.dtype and repeats_part(one, two):
        assert all(bytes_1[i] == bytes_2[i] for i, _ in meetings)


def test_large_layouts_are_compared_at_once() -> None:
    cache = torch.empty(32, 8, 4096, 128, device="meta")
    halves = Layout.of(cache[..., :64]), Layout.of(cache[..., 64:])
    assert disjoint(*halves) and not meets_elsewhere(*halves) and disjoint_guarded(*halves)
    assert meets_elsewhere(Layout.of(cache[:, :, 1:]), Layout.of(cache[:, :, :-1]))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ((slice(0, 1),), (slice(1, 2),)),
        ((slice(None), 0), (slice(None), 3)),
        ((slice(0, 2), slice(0, 2)), (slice(0, 2), slice(2, 4))),
        ((slice(0, None, 2),), (slice(1, None, 2),)),
        ((slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2))),
        ((1, 2), (2, 1)),
    ],
    ids=["rows", "columns", "blocks", "odd and even rows", "odd and even columns", "elements"],
)
def test_regions_that_must_be_told_apart(one: Any, two: Any) -> None:
    square = torch.zeros(4, 4)
    boxes = [box_of(SQUARE, Layout.of(square[index])) for index in (one, two)]
    assert boxes[0] is not None and boxes[1] is not None
    assert boxes_disjoint(boxes[0], boxes[1])


@pytest.mark.parametrize("root", [torch.zeros(4, 4), torch.zeros(4, 4).t(), torch.zeros(4, 8)[:, ::2]])
def test_views_that_must_be_boxes(root: torch.Tensor) -> None:
    made = [root, root.t(), root[1], root[:, 1:3], root[::2].t(), root[3, 3], root[0].expand(3, 4), root[None, :1]]
    for view in made:
        assert box_of(Layout.of(root), Layout.of(view)) is not None


def test_the_oracle_sees_overlap() -> None:
    assert distinct(SQUARE)
    assert not distinct(Layout.of(torch.zeros(1).expand(2)))


def test_a_diagonal_is_no_box() -> None:
    assert box_of(SQUARE, Layout.of(torch.zeros(4, 4).diagonal())) is None
