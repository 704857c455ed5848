"""How a backend computes operators: a table of lowerings, one row for each, that users extend.

A lowering is a function of arrays with the operator's arguments, in the operator's order and by its names. Our graphs
have neither mutation nor views, so no backend needs a row that writes, or one that aliases: a ``*_copy`` of a view is
computed by the row of the view.

Invariant: a row is found by the very overload. Limits: rows are for overloads; a packet stands for all of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from functionalize._torch import OpOverload
from functionalize._torch.decompositions import OpOverloadPacket

Rule = TypeVar("Rule", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Lowering:
    """A row: ``rule(*args, **kwargs)``, or ``rule(call, *args, **kwargs)`` where it takes the call."""

    rule: Callable[..., Any]
    takes_call: bool = False


class Lowerings(Mapping[Any, Lowering]):
    """The rows of a backend, and the decorator that adds one.

    Args:
        name: what messages call the backend.
        parent: rows that stand where there is none here.

    Example:
        >>> import numpy, torch
        >>> lowering = Lowerings("numpy")
        >>> @lowering(torch.ops.aten.sin)
        ... def sin(x):
        ...     return numpy.sin(x)
        >>> float(lowering[torch.ops.aten.sin.default].rule(0.0))
        0.0
    """

    def __init__(self, name: str, parent: Mapping[Any, Lowering] | None = None) -> None:
        self.name, self._parent = name, {} if parent is None else parent
        self._rows: dict[Any, Lowering] = {}

    def __call__(self, *ops: Any, takes_call: bool = False) -> Callable[[Rule], Rule]:
        """Register a rule for operators: overloads, packets (all overloads of theirs), or functions on numbers.

        Args:
            ops: such as ``torch.ops.aten.add.Tensor``, ``torch.ops.aten.add``, ``math.sqrt``.
            takes_call: whether the rule's first argument is the
                :class:`~functionalize.backends.arrays.interpreter.Call`, which knows the dtype of the result, draws
                random keys and runs the graphs of higher-order operators.
        """

        def register(rule: Rule) -> Rule:
            for op in ops:
                self._rows.update(dict.fromkeys(_overloads(op), Lowering(rule, takes_call)))
            return rule

        return register

    def extended(self, name: str | None = None) -> Lowerings:
        """A table of its own that begins with these rows; what is added to it is not added here."""
        return Lowerings(name or self.name, self)

    def without(self, *ops: Any) -> Lowerings:
        """A table with these rows but for some operators, which are decomposed by torch's decompositions."""
        found = Lowerings(self.name)
        gone = {one for op in ops for one in _overloads(op)}
        found._rows = {op: self[op] for op in self if op not in gone}
        return found

    def __getitem__(self, op: Any) -> Lowering:
        for one in (op, view_of(op)):
            if one in self._rows:
                return self._rows[one]
            if one in self._parent:
                return self._parent[one]
        raise KeyError(op)

    def __iter__(self) -> Iterator[Any]:
        return iter({**dict.fromkeys(self._parent), **self._rows})

    def __len__(self) -> int:
        return len({*self._parent, *self._rows})


def _overloads(op: Any) -> list[Any]:
    if not isinstance(op, OpOverloadPacket):
        return [op]
    found = (getattr(op, name) for name in op.overloads())
    return [one for one in found if not any(argument.is_out for argument in one._schema.arguments)]


@functools.cache
def view_of(op: Any) -> Any:
    """The view that an operator copies: ``aten.t`` of ``aten.t_copy``; the operator itself where it copies none."""
    if not isinstance(op, OpOverload):
        return op
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_copy"), None)
    view = getattr(packet, op._schema.overload_name or "default", None)
    if not name.endswith("_copy") or view is None:
        return op
    arguments = ([argument.name for argument in one._schema.arguments] for one in (op, view))
    return view if len(set(map(tuple, arguments))) == 1 else op
