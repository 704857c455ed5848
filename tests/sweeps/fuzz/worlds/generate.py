"""Random worlds by a seed: small programs first, so that each feature is often met alone.

Invariant: eager runs what is generated, all calls of it. Limits: rows of `tests.sweeps.fuzz.worlds.rows`, one after the
other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.sweeps.fuzz.worlds.program import CLOSURE, FORMS, NAMES, Line, World
from tests.sweeps.fuzz.worlds.rows import CHANGES, KINDS, RESULTS, STATEMENTS, Row
from tests.sweeps.fuzz.worlds.running import runs

ATTEMPTS = 40
LENGTHS = (1, 1, 1, 2, 2, 3, 3, 4, 5, 6)
_PLACE = re.compile(r"\{([a-z])(2?)\}")
_AFTER = ("", "", "", "backward", "grad")


def generate(seed: int, length: int = 6) -> World:
    """The world of a seed: the first that eager runs."""
    for attempt in range(ATTEMPTS):
        world = _Builder(random.Random(f"{seed} {attempt}")).world(length)
        if runs(world):
            return world
    return World(CLOSURE, (), (), "y", ((),))


class _Builder:
    """A world under construction."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._declared: list[Line] = []
        self._names: list[str] = []

    def world(self, length: int) -> World:
        rng = self._rng
        steps = [self._line(self._row(STATEMENTS)) for _ in range(min(rng.choice(LENGTHS), length))]
        result = self._filled(self._row(RESULTS)) if rng.random() < 0.4 else "y"
        changes = [self._change() for _ in range(rng.choice((1, 2, 2)))]
        return World(
            rng.choices(FORMS, (3, 2, 2))[0],
            tuple(self._declared),
            tuple(steps),
            result,
            tuple(changes),
            rng.choice(_AFTER),
            rng.random() < 0.3,
            rng.choice(("raise", "recapture")),
        )

    def _change(self) -> tuple[Line, ...]:
        """Of what is there: nothing is declared for the caller alone."""
        there = {name[:1] for name in self._names}
        fitting = [row for row in CHANGES if {kind for kind, _ in _PLACE.findall(row.source)} <= there]
        if self._rng.random() < 0.6:
            return ()
        return (self._line(self._row(fitting)),)

    def _row(self, rows: Sequence[Row]) -> Row:
        return self._rng.choices(rows, [row.weight for row in rows])[0]

    def _line(self, row: Row) -> Line:
        return Line(self._filled(row), row.feature)

    def _filled(self, row: Row, **named: str) -> str:
        """A row's text with names: of what is declared already, or is then."""
        names = {"y": "{y}", **named}

        def name(kind: str, other: str) -> str:
            key = kind + other
            if key not in names:
                names[key] = self._one(kind, names.get(kind) if other else None)
            return names[key]

        return _PLACE.sub(lambda match: name(match[1], match[2]), row.source.replace("{new}", named.get("new", "")))

    def _one(self, kind: str, another: str | None) -> str:
        there = [name for name in self._names if name[:1] == kind and name != another]
        if there and self._rng.random() < 0.8:
            return self._rng.choice(there)
        row = self._row(KINDS[kind])
        if len(self._names) > 12:
            row = KINDS[kind][0]  # which needs nothing else, or hardly
        new = f"{kind}{len(self._names):02}"
        self._names.append("")  # its number is taken
        line = Line(self._filled(row, new=new), row.feature)
        self._names.append(new)
        self._declared.append(line)
        return new


def shrink(world: World, fails: Callable[[World], bool]) -> World:
    """A smaller world that ``fails`` too; each change is kept only if it does."""
    progress = True
    while progress:
        smaller = next((one for one in simpler(world) if fails(one)), None)
        progress = smaller is not None
        world = smaller or world
    return world


def simpler(world: World) -> list[World]:
    """The worlds that are a little smaller."""
    found = [replace(world, changes=world.changes[:-1])] if len(world.changes) > 1 else []
    for field in ("steps", "declared"):
        lines = getattr(world, field)
        found += [_with(world, field, (*lines[:n], *lines[n + 1 :])) for n in range(len(lines))]
    for n, change in enumerate(world.changes):
        if change:
            found.append(replace(world, changes=(*world.changes[:n], (), *world.changes[n + 1 :])))
    plain: dict[str, Any] = {"after": "", "requires_grad": False, "again": "raise", "form": CLOSURE, "result": "y"}
    if world.result == "y":
        plain["result"] = "None"
    if world.result == "None":
        del plain["result"]
    found += [_with(world, name, value) for name, value in plain.items() if getattr(world, name) != value]
    return [one for one in found if _is_closed(one)]


def _with(world: World, name: str, value: Any) -> World:
    return replace(world, **{name: value})


def _is_closed(world: World) -> bool:
    """Whether what is named is declared."""
    declared = {name for line in world.declared for name in line.rebinds}
    lines = (*world.declared, *world.steps, *(line for change in world.changes for line in change))
    return {name for line in lines for name in line.names} | set(NAMES.findall(world.result)) <= declared
