"""What a sweep may refuse, leave out, or compare less strictly: a text file for each table, in tests/support/ledgers.

The sweep itself writes its file. Invariant: a case that is not listed must be right; a sweep over all that a selection
names (`whole`, `ci`) has at least as many right cases as the file says. Limits: a case that is listed and is right now
is no failure, since a sweep may run a part of the cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

RIGHT, REFUSED, WRONG, SKIPPED = "right", "refused", "wrong", "skipped"
LISTED = (REFUSED, SKIPPED)
FOLDER = Path(__file__).parent / "ledgers"
WIDTH = 100  # of a reason


@dataclass(frozen=True)
class Row:
    """What became of one case of a name, as ``float32/0`` of ``add``; a case is one word."""

    name: str
    case: str
    status: str
    why: str = ""


@dataclass(frozen=True)
class Bound:
    """How many times the limit of its dtype a result may be off, and why."""

    times: float
    why: str


class Ledger:
    """The list of one table."""

    def __init__(self, table: str) -> None:
        self.path = FOLDER / f"{table}.txt"
        self.floors: dict[str, int] = {}  # by selection: how many cases are right at least
        self.listed: dict[tuple[str, str], dict[str, str]] = {}  # by status and name: the cases, each with the reason
        self.bounds: dict[tuple[str, str], Bound] = {}  # by name and dtype
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            if not line.startswith("#"):
                self._read([part.strip() for part in line.split(" | ", 4)])

    def _read(self, parts: Sequence[str]) -> None:
        match parts:
            case ["right", selection, floor]:
                self.floors[selection] = int(floor)
            case ["bound", name, dtype, times, why]:
                self.bounds[name, dtype] = Bound(float(times), why)
            case ["refused" | "skipped" as status, name, cases, why]:
                self.listed.setdefault((status, name), {}).update(dict.fromkeys(cases.split(), why))
            case _:
                raise ValueError(f"{self.path}: {' | '.join(parts)!r} is no line of a ledger")

    def allows(self, name: str, dtype: str, times: float) -> bool:
        """Whether a result may be off by so many limits of its dtype."""
        return times <= self.bounds.get((name, dtype), Bound(1, "")).times

    def objections(self, rows: Iterable[Row], selection: str = "") -> list[str]:
        """Why a sweep fails: what is wrong, what is refused or left out and not listed, and too few right cases.

        ``selection``: of which the rows are all.
        """
        rows = list(rows)
        found = [
            f"{row.status}: {row.name} {row.case}: {row.why}"
            for row in rows
            if row.status != RIGHT and row.case not in self.listed.get((row.status, row.name), {})
        ]
        right = sum(row.status == RIGHT for row in rows)
        if right < self.floors.get(selection, 0):
            found.append(f"{right} cases are right, {self.floors[selection]} when {self.path.name} was written")
        return found

    def take(self, rows: Iterable[Row], selection: str = "") -> None:
        """Make the list that of a sweep, for the cases that it ran, and write it."""
        rows = list(rows)
        for row in rows:
            for status in LISTED:
                self.listed.get((status, row.name), {}).pop(row.case, None)
            if row.status in LISTED:
                self.listed.setdefault((row.status, row.name), {})[row.case] = shortened(row.why)
        if selection:
            self.floors[selection] = sum(row.status == RIGHT for row in rows)
        FOLDER.mkdir(exist_ok=True)
        self.path.write_text("\n".join(self._lines()) + "\n")

    def _lines(self) -> Iterable[str]:
        yield "# What may be refused or left out, and what is compared less strictly; the sweep writes this by --write."
        for selection, floor in sorted(self.floors.items()):
            yield f"right | {selection} | {floor}"
        for (name, dtype), bound in sorted(self.bounds.items()):
            yield f"bound | {name} | {dtype} | {bound.times:g} | {bound.why}"
        for (status, name), cases in sorted(self.listed.items()):
            for why in dict.fromkeys(cases.values()):
                listed = " ".join(sorted(case for case, reason in cases.items() if reason == why))
                yield f"{status} | {name} | {listed} | {why}"


def shortened(why: str) -> str:
    """A reason in a part of one line."""
    return " ".join(why.replace("|", "/").split())[:WIDTH].strip() or "no reason is said"
