"""What the sweeps themselves do: they tell results apart, hold them against their ledgers, and take turns."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest
from tests.support import ledger
from tests.support.ledger import REFUSED, RIGHT, SKIPPED, WRONG, Bound, Ledger, Row
from tests.support.routes import ROUTES, SWEPT
from tests.sweeps.lowerings.closeness import alike, times_off


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ledger, "FOLDER", tmp_path)
    return "table"


ROWS = [
    Row("add", "float32/0", RIGHT),
    Row("add", "bool/0", RIGHT),
    Row("eig", "float32/0", REFUSED, "no kernel | none"),
    Row("eig", "float32/1", REFUSED, "no kernel | none"),
    Row("eig", "bool/0", SKIPPED, "eager raises"),
]


def test_a_ledger_reads_what_it_writes(table: str) -> None:
    written = Ledger(table)
    written.bounds["sum", "float16"] = Bound(8, "eager is 3 limits off, this 0.2")
    written.take(ROWS, "whole")
    read = Ledger(table)
    assert (read.floors, read.listed, read.bounds) == ({"whole": 2}, written.listed, written.bounds)
    assert not read.objections(ROWS, "whole")


@pytest.mark.parametrize(
    "row",
    [
        Row("add", "float32/0", REFUSED, "no row"),
        Row("add", "float32/0", SKIPPED, "no row"),
        Row("add", "float32/0", WRONG, "3 for 4"),
        Row("eig", "float32/2", REFUSED, "no kernel"),
        Row("eig", "float32/1", SKIPPED, "no kernel"),
        Row("eig", "float32/1", WRONG, "3 for 4"),
        Row("eig", "bool/0", REFUSED, "no kernel"),
    ],
)
def test_what_is_not_listed_is_an_objection(table: str, row: Row) -> None:
    Ledger(table).take(ROWS)
    assert row.name in "\n".join(Ledger(table).objections([row]))


def test_a_case_that_is_listed_may_be_right() -> None:
    assert not Ledger("no such table").objections([Row("eig", "float32/0", RIGHT)])


def test_refusing_all_and_running_nothing_are_objections(table: str) -> None:
    Ledger(table).take(ROWS, "whole")
    assert len(Ledger(table).objections([Row(row.name, row.case, REFUSED) for row in ROWS])) == 3
    assert Ledger(table).objections([], "whole") == ["0 cases are right, 2 when table.txt was written"]
    assert not Ledger(table).objections([], "a part")


def test_a_part_of_a_sweep_writes_a_part_of_the_ledger(table: str) -> None:
    Ledger(table).take(ROWS, "whole")
    Ledger(table).take([Row("eig", "float32/0", RIGHT), Row("add", "bool/0", REFUSED, "no row")])
    found = Ledger(table)
    assert found.listed[REFUSED, "eig"].keys() == {"float32/1"}
    assert found.listed[REFUSED, "add"].keys() == {"bool/0"}
    assert found.floors == {"whole": 2}


def test_a_line_that_is_none_is_refused(table: str) -> None:
    Ledger(table).path.write_text("refused | eig\n")
    with pytest.raises(ValueError, match=r"'refused \| eig' is no line of a ledger"):
        Ledger(table)


def test_all_ledgers_can_be_read_and_bounds_have_reasons() -> None:
    tables = sorted(path.stem for path in ledger.FOLDER.glob("*.txt"))
    assert "lowerings-jax" in tables
    for name in tables:
        for row, bound in Ledger(name).bounds.items():
            assert bound.times > 1 and bound.why, (name, row)


@pytest.mark.parametrize(
    ("dtype", "off"),
    [(torch.float64, 3e-7), (torch.float32, 3e-5), (torch.float16, 3e-3), (torch.bfloat16, 4e-2)],
)
def test_each_element_is_held_to_the_limit_of_its_dtype(dtype: torch.dtype, off: float) -> None:
    wanted = torch.tensor([1000.0, 1.0, 0.0], dtype=dtype)
    actual = torch.tensor([1000.0, 1.0 + off, 0.0], dtype=dtype)
    outcome = alike(wanted, actual)
    assert outcome.kind == WRONG and outcome.miss is not None and 1 < outcome.miss.times < 4
    torch.testing.assert_close(outcome.miss.times, times_off(wanted, actual))
    assert alike(wanted, wanted.clone()).kind == RIGHT
    with pytest.raises(AssertionError):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize(
    ("wanted", "actual"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])),
        (torch.tensor([math.inf]), torch.tensor([-math.inf])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        ([torch.ones(2), torch.ones(2)], [torch.ones(2)]),
        (3, 4),
    ],
)
def test_what_no_bound_excuses(wanted: Any, actual: Any) -> None:
    outcome = alike(wanted, actual)
    assert outcome.kind == WRONG and outcome.miss is None and outcome.why


def test_a_bound_is_of_one_operator_and_dtype(table: str) -> None:
    held = Ledger(table)
    held.bounds["sum", "float16"] = Bound(8, "eager adds up in 16 bits")
    assert held.allows("sum", "float16", 7.5) and not held.allows("sum", "float16", 8.5)
    assert not held.allows("sum", "float32", 1.5) and not held.allows("mean", "float16", 1.5)


def test_each_ledger_of_a_lowering_is_of_a_route() -> None:
    names = {f"lowerings-{route.name}{kind}" for route in ROUTES.values() for kind in route.ledgers}
    names |= {f"lowerings-fuzz-{name}" for name in SWEPT}
    assert {path.stem for path in ledger.FOLDER.glob("lowerings-*.txt")} <= names


def turns(seed: int, rows: int, turn: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Which rows of a table of a test have their turn."""
    monkeypatch.setattr(conftest, "TURN", seed)
    mark = SimpleNamespace(args=(turn,))
    items: Any = [
        SimpleNamespace(nodeid=f"tests/test_a.py::test[{row}]", get_closest_marker=lambda _: mark, row=row)
        for row in range(rows)
    ]
    left = {item.nodeid for item in conftest.out_of_turn(items)}
    return {item.row for item in items if item.nodeid not in left}


@pytest.mark.parametrize(("rows", "turn"), [(72, 72), (24, 2), (3, 8)])
def test_each_row_has_its_turn_in_some_commit(rows: int, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [turns(10**7 + seed * 977, rows, turn, monkeypatch) for seed in range(rows * 12)]
    assert set.union(*chosen) == set(range(rows))
    assert {len(some) for some in chosen} == {-(-rows // turn)}
    assert turns(12345678, rows, turn, monkeypatch) == turns(12345678, rows, turn, monkeypatch)
