"""The columns of the tables: what is known of one operator, as codegen writes it and the transform reads it.

Invariant: `OpRow.parse(str(row)) == row`. Limits: knows neither torch nor the YAML, so that both sides can import it.
"""

from __future__ import annotations

import ast
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


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


class Written(NamedTuple):
    """One argument that an operator writes.

    Attributes:
        name: its name.
        position: index among the positional arguments; None for a keyword-only one.
        result: which result of the functional variant carries its new value; None without such a variant.
        is_list: whether it is a list of tensors.
        when: a flag among the operator's arguments; where it is false, this one is not written. None: always.
    """

    name: str
    position: int | None
    result: int | None
    is_list: bool
    when: str | None = None

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call passes for it; None where the call leaves it out."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name)

    def value_among(self, results: Sequence[Any]) -> Any:
        """Its new value, among the results of the functional variant.

        Raises:
            LookupError: the row names none.
        """
        if self.result is None:
            raise LookupError(f"no result of a functional variant is the new value of `{self.name}`")
        return results[self.result]


@dataclass(frozen=True, slots=True)
class OpRow:
    """What one operator is.

    Attributes:
        name: `aten::add_.Tensor`; the default overload prints without a dot, `aten::relu_`.
        kind: how it writes.
        composite: whether it decomposes (CompositeImplicitAutograd).
        random: whether it draws random numbers.
        returns: for each return the variant's result i >= 0, or -(k+1) for the written argument k itself.
        view: whether it views.
        copy: the operator that computes a primitive view's value without aliasing.
        written: the arguments that it writes: those that the schema declares in its order, then others.
        functional: the functional variant. On a row of kind FUNCTIONAL, the operator to run in its place.
        functional_args: None: the functional variant takes the operator's own arguments, less `out=` ones, as
            they are. Else the operator's arguments in the order of the variant's parameters; those for its
            keyword-only parameters have these parameters' names. One that a call leaves out has the
            operator's default, which need not be the variant's.
        options: tensor options (`dtype`, `layout`, `device`) that the functional variant takes beside; they
            have to be those of the first written argument.
        constants: further arguments of the functional variant, by name, always these.
        non_mutating_op: the operator that computes the same when no argument with a `when` is written (its flag is
            false, or the argument is None); None: this operator itself.
    """

    name: str
    kind: Kind
    composite: bool = False
    random: bool = False
    returns: tuple[int, ...] = (0,)
    view: ViewKind = ViewKind.NONE
    copy: str | None = None
    written: tuple[Written, ...] = ()
    functional: str | None = None
    functional_args: tuple[str, ...] | None = None
    options: tuple[str, ...] = ()
    constants: tuple[tuple[str, object], ...] = ()
    non_mutating_op: str | None = None

    @classmethod
    def parse(cls, text: str) -> OpRow:
        """The row of a line of the tables."""
        name, _, columns = text.partition(" ")
        values = zip((column.name for column in fields(cls)[1:]), ast.literal_eval(columns), strict=False)
        return cls(
            name,
            **{column: _FROM_LITERAL[column](value) if column in _FROM_LITERAL else value for column, value in values},
        )

    def __str__(self) -> str:
        """The name, then the other columns as a Python literal, less trailing ones at their default."""
        columns = [(getattr(self, column.name), column.default) for column in fields(self)[1:]]
        while columns[-1][0] == columns[-1][1]:
            columns.pop()
        return f"{self.name} {tuple(as_literal(value) for value, _ in columns)!r}"


def as_literal(value: Any) -> Any:
    """A column's value as the tables have it: texts, numbers and tuples."""
    if isinstance(value, enum.Enum):
        return value.value
    return tuple(map(as_literal, value)) if isinstance(value, tuple) else value


_FROM_LITERAL: Mapping[str, Callable[[Any], Any]] = {
    "kind": Kind,
    "view": ViewKind,
    "written": lambda written: tuple(itertools.starmap(Written, written)),
}
