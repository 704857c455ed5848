"""Counterparts of an operator: the copy of a view, the view of a copy, the operator in place.

In: an operator. Out: its counterpart as an OpOverload, or None. Guarantees: derived from the tables and from schemas,
so that a counterpart takes the operator's arguments in their order, less what a function's docstring says. Limits: what
the running torch has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from functionalize.ops import tables
from functionalize.ops.calls import declared
from functionalize.ops.tables import OpOverload


@functools.cache
def copying(op: Any) -> Any:
    """The operator that computes a view's value without aliasing; for others the operator itself.

    Example:
        >>> copying(torch.ops.aten.t.default), copying(torch.ops.aten.add.Tensor)
        (<OpOverload(op='aten.t_copy', overload='default')>, <OpOverload(op='aten.add', overload='Tensor')>)
    """
    copy = tables.row(op).copy
    return op if copy is None else tables.overload(copy)


@functools.cache
def view_of(op: Any) -> Any:
    """The view that an operator computes a copy of; None if it does not compute one.

    Example:
        >>> view_of(torch.ops.aten.select_copy.int)
        <OpOverload(op='aten.select', overload='int')>
    """
    base, dot, overload = op.name().partition(".") if isinstance(op, OpOverload) else ("", "", "")
    view = f"{base.removesuffix('_copy')}{dot}{overload}"
    if not base.endswith("_copy") or view not in tables.known_ops():
        return None
    return tables.overload(view) if tables.row(tables.overload(view)).copy == op.name() else None


@functools.cache
def in_place_of(op: Any) -> Any:
    """The operator in place whose functional variant an operator is, or None.

    Example:
        >>> in_place_of(torch.ops.aten.normal_functional.default)
        <OpOverload(op='aten.normal_', overload='default')>
    """
    base = op.overloadpacket.__name__.removesuffix("_functional")
    overloads = _overloads(op.namespace, f"{base}_")
    return next((overload for overload in overloads if tables.row(overload).functional == op.name()), None)


@functools.cache
def written_view(op: Any) -> Any:
    """The view through which an operator like `select_scatter` writes to a copy; None for others.

    The view takes the arguments that follow the value. None for `as_strided_scatter` too: it addresses a storage.
    """
    base, is_scatter, _ = op.name().partition("_scatter") if isinstance(op, OpOverload) else ("", "", "")
    if not is_scatter or offset_argument(op) is not None:
        return None
    wanted = [name for name in declared(op) if name not in ("self", "src")]
    for view in _overloads(op.namespace, base.partition("::")[2]):
        if tables.row(view).copy is not None and [*declared(view)][1:] == wanted:
            return view
    return None


@functools.cache
def offset_argument(op: Any) -> int | None:
    """The position of the argument that says where in a storage an operator begins; or None.

    Example:
        >>> offset_argument(torch.ops.aten.as_strided_scatter.default)
        4
    """
    offset = declared(op).get("storage_offset") if isinstance(op, OpOverload) else None
    return None if offset is None else offset.position


def _overloads(namespace: str, name: str) -> Iterator[Any]:
    """The overloads of the operator of a name; empty if the name has no operator."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return (getattr(packet, overload) for overload in ([] if packet is None else packet.overloads()))
