"""Counterparts of operators, and traits: what is derived from the tables fits what the operators declare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from functionalize.ops import tables, traits
from functionalize.ops.calls import declared
from functionalize.ops.variants import copying, in_place_of, offset_argument, view_of, written_view

aten = torch.ops.aten


def operators() -> Iterator[torch._ops.OpOverload]:
    for name in tables.known_ops():
        try:
            yield tables.overload(name)
        except AttributeError:  # bound by hand: a method of Tensor, not an operator
            continue


@pytest.mark.parametrize("op", sorted(traits.READABLE_AS_VIEW, key=str), ids=str)
def test_a_copy_that_is_readable_as_a_view_takes_the_arguments_of_the_view(op: torch._ops.OpOverload) -> None:
    view = view_of(op)
    assert copying(view) is op
    assert [*declared(view)] == [*declared(op)]


@pytest.mark.parametrize("op", sorted(traits.WRITES_PART | traits.FILLS, key=str), ids=str)
def test_a_variant_in_place_takes_the_arguments_of_the_functional_one(op: torch._ops.OpOverload) -> None:
    assert [*declared(in_place_of(op))] == [*declared(op)]


def test_a_variant_in_place_writes_what_the_functional_one_computes() -> None:
    for op in operators():
        row = tables.row(op)
        if row.kind is tables.Kind.FUNCTIONAL and (in_place := in_place_of(op)) is not None:
            assert tables.row(in_place).functional == op.name()
            assert tables.row(in_place).written


def test_a_scatter_writes_a_view() -> None:
    views = {op: view for op in operators() if (view := written_view(op)) is not None}
    assert views == {
        aten.slice_scatter.default: aten.slice.Tensor,
        aten.select_scatter.default: aten.select.int,
        aten.diagonal_scatter.default: aten.diagonal.default,
    }
    assert views.keys() == traits.KEEPS_OFFSET


def test_an_operator_that_addresses_storages_has_an_offset() -> None:
    assert all(offset_argument(op) is not None for op in traits.BY_ADDRESS)
    assert offset_argument(aten.add.Tensor) is None
    assert offset_argument(torch.add) is None


def test_others_have_no_counterpart() -> None:
    assert view_of(aten.add.Tensor) is None
    assert view_of(len) is None
    assert copying(aten.add.Tensor) is aten.add.Tensor
    assert in_place_of(aten.mm.default) is None
    assert written_view(aten.scatter.src) is None
    assert written_view(len) is None


def test_a_splitting_that_is_safe_is_found_by_its_copy() -> None:
    assert view_of(copying(aten.unsafe_split.Tensor)) is aten.split.Tensor
    assert view_of(copying(aten.unsafe_split_with_sizes.default)) is aten.split_with_sizes.default
