"""Says what an entry is: its kind, its view kind, what it writes, and which op is its functional partner.

Invariant: all of it follows from the YAML's own text; what the text cannot tell stands in exceptions.yaml.
Limits: partners are found by signature, so an op whose partner is spelled otherwise needs an exception.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .columns import Kind, ViewKind
from .native_functions.autogen import functional_returns, tensor_options
from .native_functions.schema import OpName, Schema
from .native_functions.spec import Entry


def kind(schema: Schema) -> Kind:
    """How the op writes: not at all, its `self`, its `out=` arguments, or other arguments."""
    if not schema.written:
        return Kind.FUNCTIONAL
    if schema.name.inplace:
        return Kind.INPLACE
    return Kind.OUT if any(p.is_out for p in schema.parameters) else Kind.MUTABLE


def view_kind(entry: Entry) -> ViewKind:
    """Whether what the op returns shares memory with what it takes."""
    if "inplace_view" in entry.tags:
        return ViewKind.INPLACE_VIEW
    aliased = [r for r in entry.schema.returns if r.type.alias and not r.type.written]
    if entry.composite and (aliased or "maybe_aliasing_or_mutating" in entry.tags):
        return ViewKind.MAYBE_ALIAS
    if not aliased:
        return ViewKind.NONE
    return ViewKind.MULTI if any(r.type.is_list for r in aliased) else ViewKind.SINGLE


@dataclass(frozen=True)
class Signature:
    """What the variants of one op have in common.

    Dropped are the overload, the marks of a variant, `out=` parameters, alias annotations, defaults, and the
    tensor options of factories, which an `out=` variant takes from its `out`.
    """

    root: str
    parameters: tuple[tuple[str, str, bool], ...]
    returns: tuple[str, ...]

    @staticmethod
    def of(schema: Schema) -> Signature:
        options = tensor_options(schema)
        parameters = tuple(
            (str(p.type.plain()), p.name, p.kwarg_only)
            for p in schema.parameters
            if not p.is_out and p.name not in options
        )
        returns = tuple(str(r.type) for r in functional_returns(schema))
        return Signature(schema.name.root, parameters, returns)


class Partners:
    """The functional op of each signature, and the copy op of each view."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_name: dict[OpName, Entry] = {}
        self._functional: dict[Signature, Entry] = {}
        for entry in entries:
            self._by_name[entry.schema.name] = entry
            if kind(entry.schema) == Kind.FUNCTIONAL:
                signature = Signature.of(entry.schema)
                other = self._functional.setdefault(signature, entry)
                if other is not entry:
                    raise entry.error(f"a signature belongs to one functional op; {other.name} has it too")

    def functional(self, entry: Entry) -> Entry | None:
        """The op that computes what `entry` writes; None where the text names none."""
        return self._functional.get(Signature.of(entry.schema))

    def copy(self, entry: Entry) -> Entry | None:
        """The op that computes a view's value without aliasing: `x_copy`, and `x_scatter` for `x_inverse`."""
        base, overload = entry.schema.name.base, entry.schema.name.overload
        inverse = base.endswith("_inverse")
        copy = f"{base.removesuffix('_inverse')}_scatter" if inverse else f"{base}_copy"
        found = self._by_name.get(OpName(copy, overload))
        return found if found is not None and _same_parameters(found.schema, entry.schema) else None


def _same_parameters(left: Schema, right: Schema) -> bool:
    return [(str(p.type.plain()), p.name) for p in left.parameters] == [
        (str(p.type.plain()), p.name) for p in right.parameters
    ]
