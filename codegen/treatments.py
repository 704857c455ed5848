"""What an exception may do to a row: each treatment with its fields, when it applies, and its effect.

Invariant: a treatment says when it no longer applies, so that no exception outlives its reason. Limits:
whether a reason is true is for the tests, which run the ops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import classify
from .columns import Kind, OpRow, ViewKind
from .native_functions.schema import Parameter, Schema
from .native_functions.spec import Entry, SpecError
from .row import written_rows


@dataclass(frozen=True)
class Override:
    """One entry of exceptions.yaml. The head of that file says what the fields mean."""

    op: str
    treatment: str
    reason: str
    link: str
    functional: str | None = None
    args: tuple[str, ...] | None = None
    constants: tuple[tuple[str, object], ...] = ()
    results: Mapping[str, int | None] = field(default_factory=dict)
    returns: tuple[int, ...] | None = None
    when: str | None = None
    non_mutating_op: str | None = None
    view: ViewKind | None = None
    copy: str | None = None
    since: str | None = None
    until: str | None = None
    file: Path = Path()
    line: int = 0

    def concerns(self, torch_version: str, entries: Mapping[str, Entry]) -> bool:
        """Whether the exception is about this version; of an unknown version its ops tell."""
        version = _version(torch_version)
        if not version:
            return self.op in entries or (self.since is None and self.until is None)
        after_start = self.since is None or _version(self.since) <= version
        return after_start and (self.until is None or version < _version(self.until))

    def error(self, rule: str) -> SpecError:
        return SpecError(self.file, self.line, f"op: {self.op.removeprefix('aten::')}", rule)


def _version(text: str) -> tuple[int, ...]:
    """`2.15.0` as numbers to compare; () for a text that is no version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


@dataclass(frozen=True)
class Treatment:
    """One way to treat an op.

    Attributes:
        needs: the fields that an exception of this treatment has, beside op, treatment, reason and link.
        may: those that it may have.
        applies: whether it says something that the text does not; given the partner that the signature has.
        rule: what the op has to be for that.
        apply: the row as the exception has it.
    """

    needs: frozenset[str]
    may: frozenset[str]
    applies: Callable[[Override, Entry, Entry | None], bool]
    rule: str
    apply: Callable[[Override, Entry, OpRow], OpRow]


def _hidden(override: Override, schema: Schema) -> list[Parameter]:
    """The parameters that the exception calls written and the schema does not."""
    return [p for p in schema.parameters if p.name in override.results and not p.type.written]


def _pair(override: Override, entry: Entry, row: OpRow) -> OpRow:
    return replace(
        row,
        functional=override.functional,
        functional_args=override.args,
        constants=override.constants,
        written=written_rows(entry.schema, override.results),
        returns=override.returns or row.returns,
    )


def _hidden_write(override: Override, entry: Entry, row: OpRow) -> OpRow:
    hidden = {p.name: override.when for p in _hidden(override, entry.schema)}
    return replace(
        row,
        kind=Kind.MUTABLE if row.kind == Kind.FUNCTIONAL else row.kind,
        functional=override.functional,
        functional_args=override.args,
        written=written_rows(entry.schema, override.results, hidden),
        returns=override.returns or row.returns,
        non_mutating_op=override.non_mutating_op,
    )


def _refuse(override: Override, entry: Entry, row: OpRow) -> OpRow:
    hidden = {p.name: None for p in _hidden(override, entry.schema)}
    if not hidden:
        return row
    return replace(row, kind=Kind.MUTABLE, written=written_rows(entry.schema, {}, hidden))


TREATMENTS: dict[str, Treatment] = {
    "pair": Treatment(
        needs=frozenset({"functional", "results"}),
        may=frozenset({"args", "constants", "returns"}),
        applies=lambda override, entry, partner: bool(entry.schema.written) and partner is None,
        rule="a pair is given to a mutating op whose signature finds no partner",
        apply=_pair,
    ),
    "hidden_write": Treatment(
        needs=frozenset({"functional", "results"}),
        may=frozenset({"args", "returns", "when", "non_mutating_op"}),
        applies=lambda override, entry, partner: bool(_hidden(override, entry.schema)),
        rule="a hidden write is of an argument that the schema does not declare as written",
        apply=_hidden_write,
    ),
    "conditional": Treatment(
        needs=frozenset({"when"}),
        may=frozenset({"non_mutating_op"}),
        applies=lambda override, entry, partner: bool(entry.schema.written),
        rule="a conditional write is of an argument that the schema declares as written",
        apply=lambda override, entry, row: replace(
            row,
            written=tuple(written._replace(when=override.when) for written in row.written),
            non_mutating_op=override.non_mutating_op,
        ),
    ),
    "view": Treatment(
        needs=frozenset({"view", "copy"}),
        may=frozenset(),
        applies=lambda override, entry, partner: classify.view_kind(entry) == ViewKind.NONE,
        rule="a view kind is given to an op whose schema declares no alias",
        apply=lambda override, entry, row: replace(row, view=override.view or row.view, copy=override.copy),
    ),
    "fresh": Treatment(
        needs=frozenset({"functional"}),
        may=frozenset(),
        applies=lambda override, entry, partner: classify.view_kind(entry) != ViewKind.NONE,
        rule="an op is called fresh whose schema declares an alias",
        apply=lambda override, entry, row: replace(row, view=ViewKind.NONE, copy=None, functional=override.functional),
    ),
    "harmless": Treatment(
        needs=frozenset(),
        may=frozenset(),
        applies=lambda override, entry, partner: bool(entry.schema.written),
        rule="a write is called harmless which the schema declares",
        apply=lambda override, entry, row: replace(row, kind=Kind.FUNCTIONAL, written=()),
    ),
    "refuse": Treatment(
        needs=frozenset(),
        may=frozenset({"results"}),
        applies=lambda override, entry, partner: (
            bool(_hidden(override, entry.schema))
            or (bool(entry.schema.written) and not entry.composite and partner is None)
        ),
        rule="an op is refused which writes, does not decompose, and finds no partner",
        apply=_refuse,
    ),
}
