"""Writes to a tensor in which several positions share an element (overlapping `unfold`, `as_strided`).

Eager goes through the positions in the order of their strides, outermost first, and writes an element once for each of
its positions, reading what it wrote before. So in a graph such a write becomes one for each slice along the outermost
dimension, until the positions of a slice are apart.

Invariant: each element sees eager's writes in eager's order. Limits: ops that are elementwise by their tag, whose
number of slices is fixed for the sizes of the trace; strides of zero are refused by eager itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from functionalize._torch import storage_key, unbacked
from functionalize.aliasing.geometry import Layout, differ, supposed
from functionalize.aliasing.overlap import spans_disjoint
from functionalize.aliasing.tensor_queries import repeats, tensor_leaves
from functionalize.errors import UnsupportedMutationError
from functionalize.ops import tables
from functionalize.transform import dry_run
from functionalize.transform.writing_call import WritingCall

aten = torch.ops.aten

# Applied twice they do what they do applied once, so that it does not matter how often an element is reached.
_IDEMPOTENT = frozenset(
    {aten.abs_, aten.ceil_, aten.clamp_, aten.clamp_max_, aten.clamp_min_, aten.copy_, aten.fill_, aten.floor_}
    | {aten.nan_to_num_, aten.relu_, aten.round_, aten.sgn_, aten.sign_, aten.trunc_, aten.zero_}
)
# Of the writes to an expanded tensor that eager lets through, these leave the same at all positions of an element.
_ALIKE_EVERYWHERE = _IDEMPOTENT | {aten.masked_fill_}


def run(call: WritingCall) -> Any:
    """Run a write whose targets overlap: returns what it returns; NotImplemented if it can run like any other.

    Raises what eager raises.
    """
    targets = _strided(tensor_leaves(call.targets, {}))
    in_order = any(_order_matters(call, target) for target in targets)
    if not (in_order or any(map(repeats, targets)) or _arguments_meet(call, targets)):
        return NotImplemented
    if not call.context.executor.observed:
        return call.on_memory()
    dry_run.on_copies(call.context.executor, call.func, call.args, call.kwargs)
    if in_order:
        return _by_slices(call)
    expanded = next(filter(repeats, targets), None)
    if expanded is not None and call.func.overloadpacket not in _ALIKE_EVERYWHERE:
        raise _refusal(call.func, expanded)
    return NotImplemented


def _refusal(func: Any, target: torch.Tensor) -> UnsupportedMutationError:
    size, stride = tuple(target.size()), tuple(target.stride())
    return UnsupportedMutationError(
        f"{func} on a tensor of size {size} and strides {stride}, whose positions share elements",
        why="eager updates a shared element once for each of its positions, in an order that depends on the kernel",
        hint="write to a copy (`.clone()`) whose elements are all its own, or call the function outside of a trace",
    )


def _strided(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The strided ones among tensors."""
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def _order_matters(call: WritingCall, target: torch.Tensor) -> bool:
    """Whether it matters that eager writes an element once for each position that shares it."""
    layout = Layout.of(target)
    if layout.contiguous or not layout.overlaps_beyond_expand:
        return False
    if call.func is aten.copy_.default:  # the last position has the last word: the scatter's too, if the order is clear
        return _ambiguous(layout)
    return call.func.overloadpacket not in _IDEMPOTENT or len(call.tensors) != 1


def _ambiguous(layout: Layout) -> bool:
    strides = [supposed(stride) for size, stride in zip(layout.size, layout.stride, strict=True) if supposed(size) > 1]
    return len(set(strides)) < len(strides)


def _arguments_meet(call: WritingCall, targets: Sequence[torch.Tensor]) -> bool:
    """Whether a written tensor shares elements with another argument: many an op of eager refuses that."""
    leaves = _strided(call.tensors)
    if len(set(map(storage_key, leaves))) == len(leaves):
        return False
    written = set(map(id, targets))
    return any(
        storage_key(one) == storage_key(other) and not spans_disjoint(Layout.of(one), Layout.of(other))
        for one, other in itertools.permutations(leaves, 2)
        if id(one) in written
    )


def _by_slices(call: WritingCall) -> torch.Tensor:
    """Run an op on a target whose positions share elements, slice by slice; returns the target."""
    func, row, target = call.func, call.row, call.row.written[0].given(call.args, call.kwargs)
    variant = tables.overload(row.functional) if row.functional else func
    elementwise = torch.Tag.pointwise in variant.tags or func is aten.copy_.default
    if not elementwise or len(row.written) > 1:
        raise _refusal(func, target)
    others = [leaf for leaf in call.tensors if leaf is not target and not differ(leaf.size(), target.size())]
    dim = _outermost(target, others)
    if unbacked([target.size(dim)]):
        raise _refusal(func, target)
    with call.context.enter():  # the slices are views of the program like any other
        for index in range(int(target.size(dim))):
            sliced = [_slice(arg, target, dim, index) for arg in call.args]
            func(*sliced, **{name: _slice(arg, target, dim, index) for name, arg in call.kwargs.items()})
    return target  # type: ignore[no-any-return]


def _outermost(target: torch.Tensor, others: Sequence[torch.Tensor]) -> int:
    """The dimension that eager's loop over the elements walks along last: TensorIterator's order."""
    dims = [dim for dim in range(target.dim()) if supposed(target.size(dim)) > 1]

    def order(one: int, two: int) -> int:
        for operand in (target, *others):
            a, b = supposed(operand.stride(one)), supposed(operand.stride(two))
            if a and b and a != b:
                return b - a
            if a and b and supposed(target.size(one)) != supposed(target.size(two)):
                return supposed(target.size(two)) - supposed(target.size(one))
        return one - two

    return min(dims, key=functools.cmp_to_key(order))


def _slice(arg: Any, target: torch.Tensor, dim: int, index: int) -> Any:
    """The slice of an argument that belongs to one slice of the target."""
    if not isinstance(arg, torch.Tensor):
        return arg
    whole = arg if arg is target else aten.expand.default(arg, list(target.size()))
    return aten.select.int(whole, dim, index)
