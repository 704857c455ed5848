"""Every operator that acts on other processes has a row, and each row is of an operator that exists."""

from __future__ import annotations

import pytest
import torch

from functionalize.ops.collectives import LATER, NAMESPACES, OWN, ROWS, Way, collective
from functionalize.ops.tables import live_row, overload


def operators() -> set[str]:
    """The operators of the namespaces, without their overloads."""
    import torch.distributed._functional_collectives
    import torch.distributed._symmetric_memory
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import functionalize._torch.distributed.collectives  # noqa: F401  # defines our own

    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return {name for name in names if name.partition("::")[0] in NAMESPACES}


def test_every_operator_of_the_namespaces_has_a_row() -> None:
    assert sorted(operators() - ROWS.keys()) == []
    assert sorted(ROWS.keys() - operators() - LATER.keys()) == []


def test_an_operator_without_a_row_is_an_error() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("made_up_(Tensor x) -> ()")
    with pytest.raises(LookupError, match="c10d::made_up_ acts on other processes, and has no row"):
        collective(torch.ops.c10d.made_up_.default)
    assert "c10d::made_up_" in operators() - ROWS.keys()
    library._destroy()


def test_rows_agree_with_schemas() -> None:
    there = operators()
    for row in (row for row in ROWS.values() if row.op in there):
        op = overload(row.op)
        names = {argument.name for argument in op._schema.arguments}
        assert {row.written, row.read} - {None} <= names, row.op
        assert (row.reason is not None) == (row.way is Way.REFUSED), row.op
        assert (row.twin is not None) == (row.way is Way.TWIN), row.op
        if row.way is Way.WRITE:
            assert live_row(op).written, row.op
        if row.twin is not None:
            assert ROWS[row.twin].way is Way.VALUE
            assert not live_row(overload(row.twin)).written
    assert OWN in NAMESPACES
