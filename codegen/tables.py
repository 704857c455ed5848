"""Builds the rows of the tables: the YAML's text joined with exceptions.yaml.

Invariant: every op has exactly one row, and a mutating op either has a functional variant, or decomposes, or
has an exception that says why not. Limits: what a row says was read from text; the tests hold it against the
live dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import classify
from .columns import Kind, OpRow, ViewKind
from .exceptions import check_applies
from .native_functions.autogen import expand
from .native_functions.sources import Source
from .native_functions.spec import Entry, Spec, SpecError, read
from .row import from_text
from .treatments import TREATMENTS, Override


@dataclass(frozen=True)
class Tables:
    """All rows, and the exceptions: all that are declared, and those that apply to these sources, by op.

    `stale` are the exceptions that no longer apply; `unpaired` the ops that lack a partner and an exception.
    Tables that ship have neither; those made for another torch version may, and are used all the same.
    """

    source: Source
    spec: Spec
    rows: dict[str, OpRow]
    declared: tuple[Override, ...]
    overrides: dict[str, Override]
    stale: tuple[SpecError, ...]
    unpaired: tuple[SpecError, ...]

    def require_complete(self) -> None:
        """Raise the first error that makes these tables unfit to ship."""
        for error in (*self.stale, *self.unpaired):
            raise error


def build(source: Source, overrides: list[Override]) -> Tables:
    """Read the source and make its rows.

    Raises:
        SpecError: an entry is malformed.
    """
    spec = expand(read(source))
    partners = classify.Partners(spec.entries.values())
    applying: dict[str, Override] = {}
    stale: list[SpecError] = []
    for override in overrides:
        if not override.concerns(source.torch_version, spec.entries):
            continue
        if error := check_applies(override, spec.entries, partners):
            stale.append(error)
        else:
            applying[override.op] = override
    rows: dict[str, OpRow] = {}
    unpaired: list[SpecError] = []
    for name, entry in sorted(spec.entries.items()):
        row = from_text(entry, partners)
        exception = applying.get(name)
        if exception is not None:
            row = TREATMENTS[exception.treatment].apply(exception, entry, row)
        rows[name] = row
        if exception is None and (rule := _missing_partner(entry, row)):
            unpaired.append(entry.error(rule))
    return Tables(source, spec, rows, tuple(overrides), applying, tuple(stale), tuple(unpaired))


def _missing_partner(entry: Entry, row: OpRow) -> str | None:
    if entry.composite:
        return None
    if row.kind != Kind.FUNCTIONAL and row.functional is None:
        return "a mutating op has a functional variant, or an exception that names it or says why there is none"
    if row.view in (ViewKind.SINGLE, ViewKind.MULTI) and row.copy is None:
        return "a primitive view has a copy op, or an exception"
    return None
