"""Writes whose arguments share memory: refused in a graph if eager's result depends on the order of its kernel.

A kernel that writes an element before it has read it, at another position, reads what it wrote. Whether it does so
depends on sizes, devices and threads, and eager's own check misses it if one of the tensors has gaps.

Guarantees: tensors of other storages are not compared. Limits: misses an overlap that depends on data-dependent sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from functionalize._torch import hint_of, on_handles, unbacked
from functionalize.aliasing.geometry import Layout, hint, same, size_hint
from functionalize.aliasing.overlap import disjoint, disjoint_guarded, meets_elsewhere, repeats_part
from functionalize.errors import UnsupportedMutationError, name_of
from functionalize.ops import tables, traits
from functionalize.ops.calls import declared
from functionalize.ops.tables import Kind
from functionalize.refusals.writes import READS_WHAT_IT_WRITES, TWO_OUTPUTS_SHARE
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.writing_call import Operand, WritingCall

aten = torch.ops.aten


def refuse(call: WritingCall) -> None:
    """Raise if what a call writes depends on the order in which eager's kernel visits the elements."""
    if call.row.kind is Kind.OUT and torch.Tag.generated in call.func.tags:
        return  # computed without the `out=`, and then copied there
    for target, other in call.meetings:
        if target.index != other.index or _is_read_first(call, target, other):
            continue
        if _depends_on_order(call, target, other):
            raise _order_matters(call, target, other)


def _is_read_first(call: WritingCall, target: Operand, other: Operand) -> bool:
    """Whether all of an argument is read before something is written."""
    if other.name == "value":
        return call.func in traits.READS_VALUE_FIRST
    masks = call.func is aten.index_put_.default and other.name == "indices"
    if not masks or other.tensor.dtype not in (torch.bool, torch.uint8):
        return False  # masks become positions, unless they are those of `masked_fill_`
    return not call.puts_one_number or _in_one_place(Layout.of(target.tensor), Layout.of(other.tensor))


def _depends_on_order(call: WritingCall, target: Operand, other: Operand) -> bool:
    """Whether what is written depends on whether an element of the other operand is read, or written, before it."""
    to, source = Layout.of(target.tensor), Layout.of(other.tensor)
    variant = tables.overload(call.row.functional) if call.row.functional else call.func
    by_elements = (
        torch.Tag.pointwise in variant.tags or call.func in traits.WRITES_BY_ELEMENT or call.written[0].is_list
    )
    if by_elements and not other.written:
        expanded = _expanded(source, to)
        if expanded is None or _in_one_place(to, expanded):
            return False  # sizes that do not fit are an error of the op
        packet = call.func.overloadpacket
        keeps = packet in traits.KEEPS_EQUAL or (
            packet in traits.KEEPS_EQUAL_BOOLS and to.dtype is source.dtype is torch.bool
        )
        if keeps and repeats_part(to, expanded):
            return False

        def moves(written: Layout, read: Layout) -> bool:
            return meets_elsewhere(written, read) and not (keeps and repeats_part(written, read))

        return _holds(call.context, moves, (target, other), (to, expanded))
    if not other.written and _in_one_place(to, source):
        first = next(iter(declared(call.func))) == other.name
        return (
            not first or call.func.overloadpacket in traits.READS_WHAT_IT_WROTE or torch.Tag.reduction in variant.tags
        )
    return _holds(call.context, lambda written, read: not disjoint(written, read), (target, other), (to, source))


def _in_one_place(target: Layout, source: Layout) -> bool:
    """Whether two layouts have the same elements at the same positions."""
    if not same(target.size, source.size) or target.dtype.itemsize != source.dtype.itemsize:
        return False
    steps, others = (
        [step for step, size in zip(layout.stride, layout.size, strict=True) if not (type(size) is int and size == 1)]
        for layout in (target, source)
    )
    return same((*steps, target.offset), (*others, source.offset))


def _expanded(source: Layout, target: Layout) -> Layout | None:
    """A layout broadcast to the size of another; None if the sizes do not fit.

    A data-dependent size is taken for the other's, if that is data-dependent, too; else for a 1 that is broadcast.
    """
    added = len(target.size) - len(source.size)
    if any(_size(size, 1) != 1 for size in source.size[: max(-added, 0)]):
        return None
    sizes = (1,) * added + source.size[max(-added, 0) :]
    strides = (0,) * added + source.stride[max(-added, 0) :]
    wanted = ((want, size_hint(want)) for want in target.size)
    pairs = [
        (_size(size, many if unbacked([want]) else 1), many) for size, (want, many) in zip(sizes, wanted, strict=True)
    ]
    if any(size not in (1, want) and not unbacked([to]) for (size, want), to in zip(pairs, target.size, strict=True)):
        return None
    kept = (0 if size == 1 != want else step for step, (size, want) in zip(strides, pairs, strict=True))
    return replace(source, size=target.size, stride=tuple(kept))


def _size(size: Any, of_data: int) -> int:
    """A size in this trace; ``of_data`` if it is data-dependent."""
    return of_data if unbacked([size]) else hint(size)


def _holds(
    context: FunctionalizationContext,
    question: Callable[[Layout, Layout], bool],
    operands: tuple[Operand, Operand],
    layouts: tuple[Layout, Layout],
) -> bool:
    """Whether ``question``, a way in which two layouts can meet, holds for the sizes of this trace.

    If it does not, it must not for other sizes: a guard says that the layouts are disjoint, or else fixes the sizes.
    Data-dependent sizes get no guards: there it can hold only if the distance of the two layouts is known, or one is a
    part of the other.
    """
    target, source = layouts
    symbols = [*target.symbols, *source.symbols]
    if not symbols:
        return question(target, source)
    if unbacked(symbols):
        distance = on_handles(lambda: source.offset - target.offset, (), {})
        distances = {distance} if type(distance) is int else {hint_of(distance, many) for many in (61, 67)}
        whole, part = (context.graph.find(operand.tensor) for operand in operands)
        is_part = whole is not None and part is not None and part.is_below(whole)
        comparable = target.dtype is source.dtype and (len(distances) == 1 or is_part)
        return comparable and question(_sized(target, 0), _sized(source, distances.pop() if len(distances) == 1 else 0))
    if question(_sized(target, hint(target.offset)), _sized(source, hint(source.offset))):
        return True
    if not on_handles(disjoint_guarded, (target, source), {}):
        for symbol in symbols:
            int(symbol)
    return False


def _sized(layout: Layout, offset: int) -> Layout:
    """A layout for the sizes of this trace."""
    return replace(
        layout, size=tuple(map(size_hint, layout.size)), stride=tuple(map(size_hint, layout.stride)), offset=offset
    )


def _order_matters(call: WritingCall, target: Operand, other: Operand) -> UnsupportedMutationError:
    if other.written:
        return TWO_OUTPUTS_SHARE.error(op=call.func, argument=target.name, other=other.name)
    return READS_WHAT_IT_WRITES.error(op=call.func, tensor=name_of(target.tensor), argument=other.name)
