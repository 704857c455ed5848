"""The row of an operator, and how to read one from the operator's own live schema.

For operators that the tables do not know: custom ones, and those of namespaces other than aten. Invariant:
for every operator that the tables do know, the live row agrees on kind, view, written arguments and returns,
save where an exception says otherwise; a test holds them against one another. Limits: a schema names no
functional variant, so a live row never has one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch import OpOverload, decomposes


class Kind(enum.Enum):
    """How an operator writes."""

    FUNCTIONAL = "functional"
    INPLACE = "inplace"
    OUT = "out"
    MUTABLE = "mutable"  # writes arguments that are neither `self` of an in-place op nor `out=`


class ViewKind(enum.Enum):
    """Whether what an operator returns shares memory with what it takes."""

    NONE = "none"
    SINGLE = "single"
    MULTI = "multi"
    INPLACE_VIEW = "inplace_view"  # changes the metadata of its `self`
    MAYBE_ALIAS = "maybe_alias"  # a composite: it may return a view, its argument, or a new tensor


@dataclass(frozen=True, slots=True)
class Written:
    """One argument that an operator writes.

    Attributes:
        position: index among the positional arguments; None for a keyword-only one.
        name: its name.
        result: which result of the functional variant carries its new value; None without such a variant.
        is_list: whether it is a list of tensors.
        when: a flag among the operator's arguments; where it is false, this one is not written. None: always.
    """

    position: int | None
    name: str
    result: int | None
    is_list: bool
    when: str | None = None

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call passes for it; None where the call leaves it out."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name)


@dataclass(frozen=True, slots=True)
class OpRow:
    """What one operator is.

    Attributes:
        name: `aten::add_.Tensor`; the default overload prints without a dot, `aten::relu_`.
        kind: how it writes.
        view: whether it views.
        written: the arguments that it writes: those that the schema declares in its order, then others.
        functional: the functional variant. On a row of kind FUNCTIONAL, the operator to run in its place.
        functional_args: None: the functional variant takes the operator's own arguments, less `out=` ones, as
            they are. Else the operator's arguments in the order of the variant's parameters; those for its
            keyword-only parameters have these parameters' names. One that a call leaves out has the
            operator's default, which need not be the variant's.
        returns: for each return the variant's result i >= 0, or -(k+1) for the written argument k itself.
        copy: the operator that computes a primitive view's value without aliasing.
        composite: whether it decomposes (CompositeImplicitAutograd).
        random: whether it draws random numbers.
        options: tensor options (`dtype`, `layout`, `device`) that the functional variant takes beside; they
            have to be those of the first written argument.
        constants: further arguments of the functional variant, by name, always these.
        quiet: the operator that computes the same when no argument with a `when` is written (its flag is
            false, or the argument is None); None: this operator itself.
    """

    name: str
    kind: Kind
    view: ViewKind
    written: tuple[Written, ...]
    functional: str | None
    functional_args: tuple[str, ...] | None
    returns: tuple[int, ...]
    copy: str | None
    composite: bool
    random: bool
    options: tuple[str, ...] = ()
    constants: tuple[tuple[str, object], ...] = ()
    quiet: str | None = None


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
        functional=None,
        functional_args=None,
        returns=returns(op),
        copy=None,
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
