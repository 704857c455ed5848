"""How to read an operator's row from its own live schema.

For operators that the tables do not know: custom ones, and those of namespaces other than aten. Invariant:
for every operator that the tables do know, the live row agrees on kind, view, written arguments and returns,
save where an exception says otherwise; a test holds them against one another. Limits: a schema names no
functional variant, so a live row never has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from functionalize._torch import OpOverload, decomposes
from functionalize.codegen.columns import Kind, OpRow, ViewKind, Written


def row(op: OpOverload) -> OpRow:
    """The row that the live schema of `op` gives.

    Example:
        >>> import torch
        >>> found = row(torch.ops.aten.add_.Tensor)
        >>> found.kind, [written.name for written in found.written]
        (<Kind.INPLACE: 'inplace'>, ['self'])
    """
    written = tuple(
        Written(one.name, None if one.kwarg_only else index, None, isinstance(one.type, torch.ListType))
        for index, one in enumerate(op._schema.arguments)
        if _written_alias(one) is not None
    )
    return OpRow(
        name=op.name(),
        kind=_kind(op, written),
        view=_view_kind(op),
        written=written,
        returns=_returns(op),
        composite=decomposes(op),
        random=torch.Tag.nondeterministic_seeded in op.tags,
    )


def _written_alias(value: torch.Argument) -> set[str] | None:
    """The names under which the schema says that an argument or return is written; None where it is not."""
    return value.alias_info.before_set if value.alias_info is not None and value.alias_info.is_write else None


def _kind(op: OpOverload, written: Sequence[Written]) -> Kind:
    if not written:
        return Kind.FUNCTIONAL
    base = op._schema.name.rpartition("::")[2]
    inplace_dunder = base.startswith("__i") and base.endswith("__")
    if inplace_dunder or (base.endswith("_") and not base.endswith("__")):
        return Kind.INPLACE
    return Kind.OUT if any(one.position is None for one in written) else Kind.MUTABLE


def _view_kind(op: OpOverload) -> ViewKind:
    if torch.Tag.inplace_view in op.tags:
        return ViewKind.INPLACE_VIEW
    aliased = [r for r in op._schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    if decomposes(op) and (aliased or torch.Tag.maybe_aliasing_or_mutating in op.tags):
        return ViewKind.MAYBE_ALIAS
    if not aliased:
        return ViewKind.NONE
    return ViewKind.MULTI if any(isinstance(r.type, torch.ListType) for r in aliased) else ViewKind.SINGLE


def _returns(op: OpOverload) -> tuple[int, ...]:
    """For each return its index, or -(k+1) where it is the written argument k itself."""
    written = [alias for alias in map(_written_alias, op._schema.arguments) if alias is not None]
    returned = enumerate(map(_written_alias, op._schema.returns))
    return tuple(-(written.index(alias) + 1) if alias in written else index for index, alias in returned)
