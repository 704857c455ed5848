"""One op of the tables, as its own text and its partner's give it.

Invariant: a row made here rests on native_functions.yaml alone; treatments change it for exceptions. Limits:
what a functional variant makes of an argument is told by names and defaults, not by what kernels do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from . import classify
from .columns import Kind, OpRow, ViewKind, Written
from .native_functions.autogen import tensor_options, unreturned
from .native_functions.schema import Schema
from .native_functions.spec import Entry


def from_text(entry: Entry, partners: classify.Partners) -> OpRow:
    """The row of an entry."""
    schema = entry.schema
    row = OpRow(
        name=entry.name,
        kind=classify.kind(schema),
        composite=entry.composite,
        random="nondeterministic_seeded" in entry.tags,
        returns=_returns(schema),
        view=classify.view_kind(entry),
        written=written_rows(schema, {}),
    )
    if row.view in (ViewKind.SINGLE, ViewKind.MULTI) and (copy := partners.copy(entry)):
        return replace(row, copy=copy.name)
    if row.kind == Kind.FUNCTIONAL or (partner := partners.functional(entry)) is None:
        return row
    return replace(
        row,
        written=written_rows(schema, _results(schema)),
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


def written_rows(
    schema: Schema, results: Mapping[str, int | None], hidden: Mapping[str, str | None] | None = None
) -> tuple[Written, ...]:
    """The declared writes in the order of the schema, then the hidden ones with the flag they depend on."""
    hidden = hidden or {}
    declared = [(p, None) for p in schema.written]
    undeclared = [(p, hidden[p.name]) for p in schema.parameters if p.name in hidden]
    return tuple(
        Written(p.name, schema.position(p.name), results.get(p.name), p.type.is_list, when)
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
