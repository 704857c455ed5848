"""How to read an operator's row from its own live schema.

For operators that the tables do not know: custom ones, and those of namespaces other than aten. Invariant:
for every operator that the tables do know, the live row agrees on kind, view, written arguments and returns,
save where an exception says otherwise; a test holds them against one another. Limits: a schema names no
functional variant, so a live row never has one.
"""

from __future__ import annotations

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
    written = written_arguments(op)
    return OpRow(
        name=op.name(),
        kind=kind(op),
        view=view_kind(op),
        written=written,
        returns=returns(op),
        composite=decomposes(op),
        random=torch.Tag.nondeterministic_seeded in op.tags,
    )


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def written_arguments(op: OpOverload) -> tuple[Written, ...]:
    """The arguments that the schema declares as written."""
    return tuple(
        Written(
            position=None if argument.kwarg_only else index,
            name=argument.name,
            result=None,
            is_list=isinstance(argument.type, torch.ListType),
        )
        for index, argument in enumerate(op._schema.arguments)
        if _is_written(argument)
    )


def kind(op: OpOverload) -> Kind:
    """How the schema says that the operator writes."""
    written = [argument for argument in op._schema.arguments if _is_written(argument)]
    if not written:
        return Kind.FUNCTIONAL
    base = op._schema.name.rpartition("::")[2]
    inplace_dunder = base.startswith("__i") and base.endswith("__")
    if inplace_dunder or (base.endswith("_") and not base.endswith("__")):
        return Kind.INPLACE
    return Kind.OUT if any(argument.kwarg_only for argument in written) else Kind.MUTABLE


def view_kind(op: OpOverload) -> ViewKind:
    """Whether the schema says that the operator views."""
    if torch.Tag.inplace_view in op.tags:
        return ViewKind.INPLACE_VIEW
    aliased = [r for r in op._schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    if decomposes(op) and (aliased or torch.Tag.maybe_aliasing_or_mutating in op.tags):
        return ViewKind.MAYBE_ALIAS
    if not aliased:
        return ViewKind.NONE
    return ViewKind.MULTI if any(isinstance(r.type, torch.ListType) for r in aliased) else ViewKind.SINGLE


def returns(op: OpOverload) -> tuple[int, ...]:
    """For each return its index, or -(k+1) where it is the written argument k itself."""
    written = [a.alias_info.before_set for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    found = []
    for index, returned in enumerate(op._schema.returns):
        alias = returned.alias_info
        if alias and alias.is_write and alias.before_set in written:
            index = -(written.index(alias.before_set) + 1)
        found.append(index)
    return tuple(found)
