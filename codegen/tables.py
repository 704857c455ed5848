"""Builds the rows of the tables: the YAML's text joined with exceptions.yaml.

Invariant: every op has exactly one row, and a mutating op either has a functional variant, or decomposes, or
has an exception that says why not. Limits: what a row says was read from text; the tests hold it against the
live dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from . import classify
from .autogen import expand, tensor_options, unreturned
from .exceptions import Override, check_applies
from .schema import Schema
from .sources import Source
from .spec import Entry, Spec, SpecError, read

# name; position (None: keyword-only); result (None: there is no functional variant); is_list; the flag that
# has to be true for the write (None: it always takes place)
WrittenRow = tuple[str, "int | None", "int | None", bool, "str | None"]


@dataclass(frozen=True)
class Row:
    """One op of the tables. Its columns are those of `functionalize.tables.OpRow`, in the file's order."""

    name: str
    kind: str
    composite: bool = False
    random: bool = False
    returns: tuple[int, ...] = (0,)
    view: str = classify.NO_VIEW
    copy: str | None = None
    written: tuple[WrittenRow, ...] = ()
    functional: str | None = None
    functional_args: tuple[str, ...] | None = None
    options: tuple[str, ...] = ()
    constants: tuple[tuple[str, object], ...] = ()
    quiet: str | None = None

    def __str__(self) -> str:
        """The name, then the other columns as a Python literal, less trailing ones at their default."""
        columns = [(getattr(self, column.name), column.default) for column in fields(self)[1:]]
        while columns[-1][0] == columns[-1][1]:
            columns.pop()
        return f"{self.name} {tuple(value for value, _ in columns)!r}"


@dataclass(frozen=True)
class Tables:
    """All rows, and the exceptions: all that are declared, and those that apply to these sources, by op.

    `stale` are the exceptions that no longer apply; `unpaired` the ops that lack a partner and an exception.
    Tables that ship have neither; those made for another torch version may, and are used all the same.
    """

    source: Source
    spec: Spec
    rows: dict[str, Row]
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
    rows: dict[str, Row] = {}
    unpaired: list[SpecError] = []
    for name, entry in sorted(spec.entries.items()):
        exception = applying.get(name)
        rows[name] = row = _row(entry, exception, spec, partners)
        if exception is None and (rule := _missing_partner(entry, row)):
            unpaired.append(entry.error(rule))
    return Tables(source, spec, rows, tuple(overrides), applying, tuple(stale), tuple(unpaired))


def _missing_partner(entry: Entry, row: Row) -> str | None:
    if entry.composite:
        return None
    if row.kind != classify.FUNCTIONAL and row.functional is None:
        return (
            "a mutating op has a functional variant, or an exception that names it or says why there is none"
        )
    if row.view in (classify.SINGLE, classify.MULTI) and row.copy is None:
        return "a primitive view has a copy op, or an exception"
    return None


def _row(entry: Entry, override: Override | None, spec: Spec, partners: classify.Partners) -> Row:
    schema = entry.schema
    row = Row(
        name=entry.name,
        kind=classify.kind(schema),
        composite=entry.composite,
        random="nondeterministic_seeded" in entry.tags,
        returns=_returns(schema),
        view=classify.view_kind(entry),
        written=_written(schema, _results(schema)),
    )
    if row.view in (classify.SINGLE, classify.MULTI) and (copy := partners.copy(entry)):
        row = replace(row, copy=copy.name)
    if row.kind != classify.FUNCTIONAL:
        row = _pair(row, schema, partners.functional(entry))
    return row if override is None else _TREATMENTS[override.treatment](row, entry, override, spec)


def _pair(row: Row, schema: Schema, partner: Entry | None) -> Row:
    if partner is None:
        return replace(row, written=_written(schema, {}))
    return replace(
        row,
        functional=partner.name,
        functional_args=_arguments(schema, partner.schema),
        options=_options(schema, partner.schema),
    )


def _returns(schema: Schema) -> tuple[int, ...]:
    """For each return, the functional variant's result, or -(k+1) for the written argument k itself."""
    written = [p.type.alias for p in schema.written]
    return tuple(
        -(written.index(r.type.alias) + 1) if r.type.written and r.type.alias in written else index
        for index, r in enumerate(schema.returns)
    )


def _results(schema: Schema) -> dict[str, int | None]:
    """For each written parameter, the result of a functional variant of this signature that is its value."""
    position = {r.type.alias: index for index, r in enumerate(schema.returns) if r.type.written}
    results: dict[str, int | None] = {p.name: position.get(p.type.alias) for p in schema.written}
    for index, parameter in enumerate(unreturned(schema)):
        results[parameter.name] = len(schema.returns) + index
    return results


def _written(
    schema: Schema, results: dict[str, int | None], hidden: dict[str, str | None] | None = None
) -> tuple[WrittenRow, ...]:
    """The declared writes in the order of the schema, then the hidden ones with the flag they depend on."""
    hidden = hidden or {}
    declared = [(p, None) for p in schema.written]
    undeclared = [(p, hidden[p.name]) for p in schema.parameters if p.name in hidden]
    return tuple(
        (p.name, schema.position(p.name), results.get(p.name), p.type.is_list, when)
        for p, when in (*declared, *undeclared)
    )


def _arguments(schema: Schema, partner: Schema) -> tuple[str, ...] | None:
    """The arguments to name for the partner; None where those of the op do as they are.

    The dispatcher leaves out arguments that have their default. Where the partner's default is another one,
    or none, they have to be named, so that the op's own default is passed.
    """
    ours = {p.name: p for p in schema.parameters if not p.is_out}
    if all(p.name not in ours or ours[p.name].default in (None, p.default) for p in partner.parameters):
        return None
    return tuple(p.name for p in partner.parameters if p.name in ours)


def _options(schema: Schema, partner: Schema) -> tuple[str, ...]:
    """The tensor options that the partner takes and the op takes from its `out`."""
    return () if tensor_options(schema) else tuple(o for o in tensor_options(partner) if o != "pin_memory")


_Treatment = Callable[[Row, Entry, Override, Spec], Row]


def _treat_pair(row: Row, entry: Entry, override: Override, spec: Spec) -> Row:
    return replace(
        row,
        functional=override.functional,
        functional_args=override.args,
        constants=override.constants,
        written=_written(entry.schema, dict(override.results)),
        returns=override.returns or row.returns,
    )


def _treat_hidden_write(row: Row, entry: Entry, override: Override, spec: Spec) -> Row:
    hidden = {
        p.name: override.when
        for p in entry.schema.parameters
        if p.name in override.results and not p.type.written
    }
    return replace(
        row,
        kind=classify.MUTABLE if row.kind == classify.FUNCTIONAL else row.kind,
        functional=override.functional,
        functional_args=override.args,
        written=_written(entry.schema, dict(override.results), hidden),
        returns=override.returns or row.returns,
        quiet=override.quiet,
    )


def _treat_conditional(row: Row, entry: Entry, override: Override, spec: Spec) -> Row:
    return replace(row, written=tuple((*w[:4], override.when) for w in row.written))


def _treat_view(row: Row, entry: Entry, override: Override, spec: Spec) -> Row:
    return replace(row, view=override.view or row.view, copy=override.copy)


def _treat_fresh(row: Row, entry: Entry, override: Override, spec: Spec) -> Row:
    return replace(row, view=classify.NO_VIEW, copy=None, functional=override.functional)


def _treat_harmless(row: Row, entry: Entry, override: Override, spec: Spec) -> Row:
    return replace(row, kind=classify.FUNCTIONAL, written=())


def _treat_refuse(row: Row, entry: Entry, override: Override, spec: Spec) -> Row:
    hidden: dict[str, str | None] = dict.fromkeys(override.results)
    return replace(row, kind=classify.MUTABLE, written=_written(entry.schema, {}, hidden)) if hidden else row


_TREATMENTS: dict[str, _Treatment] = {
    "pair": _treat_pair,
    "hidden_write": _treat_hidden_write,
    "conditional": _treat_conditional,
    "view": _treat_view,
    "fresh": _treat_fresh,
    "harmless": _treat_harmless,
    "refuse": _treat_refuse,
}
