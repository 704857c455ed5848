"""One rule for each primitive view: how to read a view from its source, and how a written view changes the source.

Invariant: ``inverse(base, replay(base))`` is ``base``; where the view is injective, ``replay(inverse(base, v))`` is
``v``.
Rules name view ops; the executor calls the ``*_copy`` op instead where views are to be removed.
Limits: strided layout. A strided view without a rule of its own is addressed by :func:`strided`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from functionalize.aliasing.geometry import Layout
from functionalize.refusals.writes import BOOL_WRITTEN_AS_BYTES

aten = torch.ops.aten
Value = Any
LazyValue = Callable[[], Value]  # computes the source's value only for those inverses that need it
Call = Callable[..., Value]  # executes one op on values: `call(op, *args)`


@dataclass(frozen=True)
class Progression:
    """The part of its source that a rule selects: ``start <= index < stop`` along ``dim``; ``drops`` the dimension."""

    dim: int
    start: int
    stop: int
    drops: bool


class OpCall(NamedTuple):
    """An op on a tensor, and its arguments after the tensor."""

    op: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class ViewRule:
    """One view of a known source, in both directions.

    ``path``: the view ops that lead from the source to the view; nearly always one.
    ``covers``: a write through the view replaces all of the source's old value.
    ``part``: set for views that can tile their source together, see
        :func:`functionalize.aliasing.regenerate.tile_runs`.
    """

    path: tuple[OpCall, ...]
    inverse: Callable[[Call, LazyValue, Value], Value]
    covers: bool = False
    part: Progression | None = None

    @property
    def addresses_storage(self) -> bool:
        """Whether the path reads the storage of the source's value, which must not be another tensor's."""
        return any(op is aten.as_strided.default for op, _ in self.path)

    def replay(self, call: Call, base: Value) -> Value:
        """The view's value, computed from its source's."""
        for op, args in self.path:
            base = call(op, base, *args)
        return base


def along(op: Any, *args: Any) -> tuple[OpCall, ...]:
    """A path of one view op; arguments that are sequences are copied to lists."""
    return (OpCall(op, tuple([list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args])),)


Builder = Callable[..., ViewRule]
VIEW_RULES: dict[Any, Builder] = {}

UNSUPPORTED_VIEWS: dict[Any, str] = dict.fromkeys(
    (
        aten._sparse_broadcast_to.default,
        aten._indices.default,
        aten._values.default,
        aten.indices.default,
        aten.values.default,
        aten.crow_indices.default,
        aten.col_indices.default,
        aten.ccol_indices.default,
        aten.row_indices.default,
        aten._nested_view_from_buffer.default,
        aten._nested_view_from_jagged.default,
        aten._nested_get_values.default,
    ),
    "it reads the parts of a sparse or nested tensor, which has no strided storage to address",
)
"""Primitive views without a rule, and why: they pass through, and a write through them is refused."""

BY_LAYOUT = frozenset(
    {
        aten.as_strided.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh.default,
        aten._fw_primal.default,
        aten._make_dual.default,
        aten._test_autograd_multiple_dispatch_view.default,
        aten.slice_inverse.default,
    }
)
"""Views that keep the layout of their source, or are found by their layout alone (:func:`strided`)."""


def view_rule(*ops: Any) -> Callable[[Builder], Builder]:
    """Register ``build(source, out, *args) -> ViewRule`` for view ops; ``args`` are the op's own after ``self``."""

    def register(build: Builder) -> Builder:
        VIEW_RULES.update(dict.fromkeys(ops, build))
        return build

    return register


def _to_size(source: Layout, *_: Any) -> OpCall:
    return OpCall(aten.view.default, (list(source.size),))


WAYS_BACK: dict[Any, Callable[..., OpCall]] = {
    aten.view.default: _to_size,
    aten.squeeze.default: _to_size,
    aten.squeeze.dims: _to_size,
    aten.squeeze.dim: lambda source, *dim: OpCall(aten.unsqueeze.default, dim),
    aten.unsqueeze.default: lambda source, *dim: OpCall(aten.squeeze.dim, dim),
    aten.permute.default: lambda source, dims: OpCall(aten.permute.default, (_inverse_order(dims),)),
    aten.transpose.int: lambda source, *dims: OpCall(aten.transpose.int, dims),
    aten.t.default: lambda source: OpCall(aten.t.default, ()),
    aten.view.dtype: lambda source, dtype: OpCall(aten.view.dtype, (source.dtype,)),
    aten.view_as_real.default: lambda source: OpCall(aten.view_as_complex.default, ()),
    aten.view_as_complex.default: lambda source: OpCall(aten.view_as_real.default, ()),
    # Physical in either mode: the source's handle has no conjugate or negative bit, so its value must not have one.
    aten._conj.default: lambda source: OpCall(aten._conj_copy.default, ()),
    aten._neg_view.default: lambda source: OpCall(aten._neg_view_copy.default, ()),
}
"""Views of all of their source, and the op that leads back: from the source's layout and the view's arguments."""


def _whole(view_op: Any) -> Builder:
    """The builder of a view in :data:`WAYS_BACK`."""
    way_back = WAYS_BACK[view_op]

    def build(source: Layout, out: Layout, *args: Any) -> ViewRule:
        def inverse(call: Call, base: LazyValue, view: Value) -> Value:
            op, back = way_back(source, *args)
            return call(op, view, *back)

        return ViewRule(along(view_op, *args), inverse, covers=True)

    return build


VIEW_RULES.update({op: _whole(op) for op in WAYS_BACK})


@view_rule(aten.view.dtype)
def recast(source: Layout, out: Layout, dtype: torch.dtype) -> ViewRule:
    whole = _whole(aten.view.dtype)(source, out, dtype)
    if source.dtype is not torch.bool or dtype.itemsize == 1:
        return whole

    def inverse(call: Call, base: LazyValue, view: Value) -> Value:
        raise BOOL_WRITTEN_AS_BYTES.error(dtype=dtype)

    return replace(whole, inverse=inverse)


@view_rule(aten._unsafe_view.default, aten._reshape_alias.default)
def reshape(source: Layout, out: Layout, size: Sequence[Any], *_: Any) -> ViewRule:
    return VIEW_RULES[aten.view.default](source, out, size)


def _inverse_order(dims: Sequence[int]) -> list[int]:
    """The inverse of a permutation."""
    return sorted(range(len(dims)), key=lambda position: dims[position] % len(dims))


@view_rule(aten.expand.default)
def expand(source: Layout, out: Layout, size: Sequence[Any], *_: Any) -> ViewRule:
    def inverse(call: Call, base: LazyValue, view: Value) -> Value:
        # Positions that share an element hold one value (eager refuses writes where they might not): take the first.
        lead = len(out.size) - len(source.size)
        for dim, have in enumerate(out.size):
            if not _is_one(have) and (dim < lead or _is_one(source.size[dim - lead])):
                view = call(aten.slice.Tensor, view, dim, 0, 1)
        return call(aten.view.default, view, list(source.size))

    return ViewRule(along(aten.expand.default, size), inverse, covers=True)


def _is_one(number: Any) -> bool:
    return type(number) is int and number == 1  # asking a symbol would add a guard


def _scattered(op: Any, scatter: Any, *args: Any, part: Progression | None = None) -> ViewRule:
    """A view of a part of its source, and the op that puts a part with these arguments into a source."""
    return ViewRule(along(op, *args), lambda call, base, view: call(scatter, base(), view, *args), part=part)


@view_rule(aten.select.int)
def select(source: Layout, out: Layout, dim: int, index: Any) -> ViewRule:
    part = _part(source, dim, index, 1, drops=True)
    return _scattered(aten.select.int, aten.select_scatter.default, dim, index, part=part)


@view_rule(aten.slice.Tensor)
def slice_(source: Layout, out: Layout, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> ViewRule:
    part = _part(source, dim, 0 if start is None else start, out.size[dim], drops=False) if step == 1 else None
    return _scattered(aten.slice.Tensor, aten.slice_scatter.default, dim, start, end, step, part=part)


def _part(source: Layout, dim: int, start: Any, count: Any, *, drops: bool) -> Progression | None:
    dim = dim % len(source.size)
    length = source.size[dim]
    if not all(type(number) is int for number in (length, start, count)):
        return None
    start = min(start + length if start < 0 else start, length)
    return Progression(dim, max(start, 0), max(start, 0) + count, drops)


@view_rule(aten.diagonal.default)
def diagonal(source: Layout, out: Layout, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ViewRule:
    return _scattered(aten.diagonal.default, aten.diagonal_scatter.default, offset, dim1, dim2)


@view_rule(aten.unfold.default)
def unfold(source: Layout, out: Layout, dim: int, size: int, step: int) -> ViewRule:
    # Gaps between windows keep the source's elements, so the inverse scatters: window offset by window offset. Where
    # windows overlap, the later window wins as in eager, which is the one that reaches an element by a smaller offset.
    def inverse(call: Call, base: LazyValue, view: Value) -> Value:
        if not source.size:  # a scalar has one window of its one element
            return call(aten.view.default, view, [])
        result, axis = base(), dim % len(source.size)
        stop = (out.size[axis] - 1) * step + 1
        for offset in reversed(range(size)):
            column = call(aten.select.int, view, -1, offset)
            result = call(aten.slice_scatter.default, result, column, axis, offset, offset + stop, step)
        return result

    return ViewRule(along(aten.unfold.default, dim, size, step), inverse)


def strided(source: Layout, out: Layout) -> ViewRule:
    """Any strided view, addressed through its source's elements in storage order.

    The source is contiguous (see ``AliasGraph.locate``); ``ValueExecutor.call`` ensures that for its value.
    """
    stride, start = list(out.stride), out.offset - source.offset
    rule = _scattered(aten.as_strided.default, aten.as_strided_scatter.default, list(out.size), stride, start)
    sizes = enumerate(zip(out.size, stride, strict=True))
    repeated = [
        d for d, (size, step) in sizes if type(step) is int and step == 0 and not (type(size) is int and size <= 1)
    ]
    if not repeated:
        return rule
    once = [1 if dim in repeated else size for dim, size in enumerate(out.size)]

    def inverse(call: Call, base: LazyValue, view: Value) -> Value:
        for dim in repeated:  # a scatter refuses to write the element that its positions share more than once
            view = call(aten.slice.Tensor, view, dim, 0, 1)
        return call(aten.as_strided_scatter.default, base(), view, once, stride, start)

    return replace(rule, inverse=inverse)


def permuted_dense(out: Layout) -> ViewRule:
    """A dense tensor as a view of its own elements in storage order: the source is one-dimensional."""
    order = list(out.order or ())
    sizes, in_order = [out.size[dim] for dim in order], order == sorted(order)
    path = along(aten.view.default, sizes) + (() if in_order else along(aten.permute.default, _inverse_order(order)))

    def inverse(call: Call, base: LazyValue, view: Value) -> Value:
        value = view if in_order else call(aten.permute.default, view, order)
        return call(aten.view.default, value, [-1])

    return ViewRule(path, inverse, covers=True)


def lower(op: Any, outs: Sequence[Layout], args: tuple[Any, ...]) -> list[OpCall]:
    """A multi-output view as one ``slice`` or ``select`` for each output."""
    if op is aten.unbind.int:
        dim = args[0] if args else 0
        return [OpCall(aten.select.int, (dim, index)) for index in range(len(outs))]
    dim = args[1] if len(args) > 1 else 0
    ends = accumulate((out.size[dim] for out in outs), initial=0)
    return [OpCall(aten.slice.Tensor, (dim, start, stop)) for start, stop in pairwise(ends)]


MULTI_OUTPUT_VIEWS = frozenset(
    {
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)
