"""Where one row comes from: its lines in the YAML, its partner, its view rule, its exception.

Invariant: every column of the row that is not at its default is shown. Limits: text for people, not programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from .columns import Kind, OpRow, ViewKind, as_literal
from .tables import Tables


def lines(tables: Tables, name: str, rules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Labels and texts about one op, in the order in which they are to be read."""
    row = tables.rows[name]
    yield "op", name
    yield from _entry(tables, name, "yaml")
    for column in fields(OpRow):
        value = getattr(row, column.name)
        if column.name not in ("name", "functional", "copy") and value != column.default:
            yield column.name, _text(value)
    if row.functional is not None:
        yield "functional", row.functional
        yield from _entry(tables, row.functional, "  yaml")
    if row.copy is not None:
        yield "copy", row.copy
    if name in rules:
        yield "rule", rules[name]
    elif row.view in (ViewKind.SINGLE, ViewKind.MULTI):
        yield "rule", "none: write one, or give the reason in UNSUPPORTED_VIEWS"
    if override := tables.overrides.get(name):
        yield "exception", f"{override.file.name}:{override.line}, {override.treatment}: {override.reason}"
        yield "", override.link
    elif row.kind != Kind.FUNCTIONAL and row.functional is None:
        yield "functional", "none: it decomposes" if row.composite else "none"


def _entry(tables: Tables, name: str, label: str) -> Iterator[tuple[str, str]]:
    entry = tables.spec.entries[name]
    origin = f", made by the autogen line of {entry.generated_from}" if entry.generated_from else ""
    yield label, f"{entry.file}:{entry.line}{origin}"
    yield "", str(entry.schema)


def _text(value: object) -> str:
    literal = as_literal(value)
    return literal if isinstance(literal, str) else repr(literal)
