"""Rows that a human has read, and the ways to ask for one."""

from __future__ import annotations

import pytest
import torch

from functionalize.codegen.tables import Tables
from functionalize.ops import tables
from functionalize.ops.tables import Kind, OpRow, ViewKind

aten = torch.ops.aten

# What a human read in native_functions.yaml, as the generated file writes it: op, then columns.
READ = {
    "abs": "('functional',)",
    "add_.Tensor": "('inplace', False, False, (-1,), 'none', None, (SELF,), 'aten::add.Tensor')",
    "clamp_.Tensor": "('inplace', False, False, (-1,), 'none', None, (SELF,), 'aten::clamp.Tensor')",
    "t_": "('inplace', False, False, (-1,), 'inplace_view', None, (SELF,), 'aten::t')",
    "_foreach_neg_": "('inplace', False, False, (), 'none', None, (LIST,), 'aten::_foreach_neg')",
    "select.int": "('functional', False, False, (0,), 'single', 'aten::select_copy.int')",
    "unbind.int": "('functional', False, False, (0,), 'multi', 'aten::unbind_copy.int')",
    "reshape": "('functional', True, False, (0,), 'maybe_alias')",
    "dropout": "('functional', True, True, (0,), 'maybe_alias')",
    "max.dim_max": (
        "('out', False, False, (-1, -2), 'none', None, "
        "(('max', None, 0, False, None), ('max_values', None, 1, False, None)), 'aten::max.dim')"
    ),
    "zeros.out": (
        "('out', False, False, (-1,), 'none', None, (('out', None, 0, False, None),), 'aten::zeros', None, "
        "('dtype', 'layout', 'device'))"
    ),
    "bernoulli_.float": (
        "('inplace', False, True, (-1,), 'none', None, (SELF,), 'aten::bernoulli.p', ('self', 'p', 'generator'))"
    ),
    "_native_batch_norm_legit": (
        "('mutable', False, False, (0, 1, 2), 'none', None, "
        "(('running_mean', 3, 3, False, 'training'), ('running_var', 4, 4, False, 'training')), "
        "'aten::_native_batch_norm_legit_functional', None, (), (), 'aten::native_batch_norm')"
    ),
    "rrelu_with_noise": (
        "('mutable', False, True, (0,), 'none', None, (('noise', 1, 1, False, None),), "
        "'aten::rrelu_with_noise_functional')"
    ),
    "polygamma_": "('inplace', False, False, (-1,), 'none', None, (SELF,), 'aten::polygamma', ('n', 'self'))",
    "fill_diagonal_": "('inplace', True, False, (-1,), 'none', None, (('self', 0, None, False, None),))",
}
SHORT = {"SELF": "('self', 0, 0, False, None)", "LIST": "('self', 0, 0, True, None)"}


@pytest.mark.parametrize("name", READ)
def test_rows_are_as_read(installed: Tables, name: str) -> None:
    expected = READ[name]
    for short, written in SHORT.items():
        expected = expected.replace(f"({short},)", f"({written},)")
    assert str(installed.rows[f"aten::{name}"]) == f"aten::{name} {expected}"


def test_every_row_is_read_as_it_was_written(installed: Tables) -> None:
    rows = list(installed.rows.values())
    assert [OpRow.parse(str(row)) for row in rows] == rows


def test_counts(installed: Tables) -> None:
    """The figures of torch 2.13; another version has others, and `codegen diff` tells them."""
    if installed.source.torch_version != "2.13.0":
        pytest.skip("the counts are those of torch 2.13.0")
    rows = installed.rows.values()
    assert len(rows) == 3101
    assert len([row for row in rows if row.view in (ViewKind.SINGLE, ViewKind.MULTI)]) == 44
    assert len([row for row in rows if row.view is ViewKind.INPLACE_VIEW]) == 17


def test_the_tables_ship_complete(installed: Tables) -> None:
    installed.require_complete()


def test_a_row_is_the_same_object_each_time() -> None:
    assert tables.row(aten.add_.Tensor) is tables.row(aten.add_.Tensor)


def test_columns_reach_the_row() -> None:
    row = tables.row(aten.native_batch_norm.out)
    assert (row.kind, row.view, row.non_mutating_op) == (Kind.OUT, ViewKind.NONE, "aten::native_batch_norm")
    assert [(w.name, w.position, w.result, w.when) for w in row.written] == [
        ("out", None, 0, None),
        ("save_mean", None, 1, None),
        ("save_invstd", None, 2, None),
        ("running_mean", 3, 3, "training"),
        ("running_var", 4, 4, "training"),
    ]
    assert row.returns == (-1, -2, -3)


def test_an_unknown_op_gets_its_row_from_its_schema() -> None:
    with torch.library._scoped_library("functionalize_test", "DEF") as library:
        library.define("scale_(Tensor(a!) x, float by, *, Tensor(b!)[] logs) -> Tensor(a!)")
        row = tables.row(torch.ops.functionalize_test.scale_.default)
    assert (row.name, row.kind, row.functional) == ("functionalize_test::scale_", Kind.INPLACE, None)
    assert [(w.name, w.position, w.is_list) for w in row.written] == [("x", 0, False), ("logs", None, True)]
    assert row.returns == (-1,)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("aten::add.Tensor", aten.add.Tensor),
        ("aten::relu_", aten.relu_.default),
        ("prims::sin", torch.ops.prims.sin.default),
    ],
)
def test_overloads_are_found_by_name(name: str, op: torch._ops.OpOverload) -> None:
    assert tables.overload(name) is op


def test_a_missing_overload_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no_such_op"):
        tables.overload("aten::no_such_op")
