"""Which tensors share a storage: one base for each storage, and the view that each handle has of it.

A handle's view is derived from its storage and layout, so that metadata mutation, ``.data`` and copies of a tensor
object that bypass the dispatcher need no bookkeeping.

Invariant: replaying the rules from the top of a base's tree down to a view gives the view's layout.
Limits: strided layout. :mod:`functionalize.aliasing.regenerate` computes the values of views.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import storage_key, unbacked
from functionalize.aliasing import view_rules
from functionalize.aliasing.bases import Base, HandleRef, View
from functionalize.aliasing.geometry import Layout, hint, hinted_span, is_empty
from functionalize.aliasing.overlap import RouteStep, as_dtype, flat_base_layout, reaches, route
from functionalize.aliasing.view_rules import Call, LazyValue, OpCall, Value, ViewRule
from functionalize.ops import traits
from functionalize.ops.variants import copying
from functionalize.refusals.writes import (
    STORAGE_OF_DATA_DEPENDENT_SIZE,
    STORAGE_OF_UNKNOWN_SIZE,
    STORAGE_SHARED_UNKNOWN,
)

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class _ViewOp:
    """What the tables say of a view op."""

    op: Any  # held, so that its identity is not used again
    build: view_rules.Builder | None
    resizes: bool


_view_ops: dict[int, _ViewOp] = {}  # by identity: the hash of an op is a method in Python
_LONG_CHAIN = 3  # chains of this length or more are replaced by a shorter route from the root


class AliasGraph:
    """All bases of one call, found by storage, and the views that handles have on them."""

    def __init__(self, held: Callable[[torch.Tensor], bool] = lambda handle: False) -> None:
        self._held = held  # whether a handle outlives the call, and so does what is written to it
        self.bases: dict[int, Base] = {}
        self.keeps_writes = False  # whether bases keep all writes, also those that their values include
        self._together: dict[int, list[torch.Tensor]] = {}

    def expect_inputs(self, inputs: Sequence[torch.Tensor], storages: Sequence[int]) -> None:
        """Note the inputs of the call. Those that share a storage get one base as soon as one of them needs it."""
        count = Counter(storages)
        if len(count) < len(storages):
            for handle, key in zip(inputs, storages, strict=True):
                if count[key] > 1:
                    self._together.setdefault(key, []).append(handle)

    def leave_out(self, handle: torch.Tensor) -> None:
        """Forget an unused input: inputs that share its storage get their base without it."""
        group = self._together.get(storage_key(handle), [])
        group[:] = [other for other in group if other is not handle]

    def close(self) -> None:
        """Drop all tensors: the call has ended."""
        bases = list(self.bases.values())
        self.bases.clear()
        for base in bases:
            base.handles.clear()  # dropping a value may free a handle, which nobody needs to forget then
        for base in bases:
            base.release()
        self._together.clear()

    def find(self, handle: torch.Tensor) -> View | None:
        """The handle's view, or None when its storage was neither viewed nor written."""
        base = self.bases.get(storage_key(handle))
        return None if base is None else self.view_of(handle, base, Layout.of(handle))

    def view_of(self, handle: torch.Tensor, base: Base, layout: Layout) -> View:
        """The view with the layout of a handle: the one that it has if it still has that layout."""
        tracked = base.handles.get(id(handle))
        if tracked is not None:
            view = tracked.view
            if view.layout is layout or view.layout.matches(layout):
                return view
        if base.at(layout) is None:
            base.simplify()
        return self.locate(base, layout)

    def ensure(self, handle: torch.Tensor, key: int | None = None, layout: Layout | None = None) -> View:
        """The handle's view; makes a base for its storage unless it has one.

        ``key``, ``layout``: those of the handle, if the caller has them.
        """
        base = self.bases.get(storage_key(handle) if key is None else key)
        if base is None:
            return self.create_base(handle, handle, layout)
        return self.view_of(handle, base, Layout.of(handle) if layout is None else layout)

    def create_base(self, handle: torch.Tensor, value: Value, layout: Layout | None = None) -> View:
        """A base for the handle's storage, with ``value`` as the value of its root; returns the handle's view.

        ``layout``: that of the handle, if the caller has it.
        """
        layout = Layout.of(handle) if layout is None else layout
        group = self._together.pop(storage_key(handle), ()) if self._together else ()
        first = max(group, key=lambda member: Layout.of(member).reach) if group else handle
        base = Base(first, value if first is handle else first, layout if first is handle else Layout.of(first))
        self.bases[base.key] = base
        base.kept = {} if self.keeps_writes else None
        base.held = first if base.original and self._held(first) else None
        if value is not handle:
            self.track(handle, base.root)
        for other in group:
            view = self.locate(base, Layout.of(other))
            self.track(other, view)
            if view.value is None:
                view.set_value(other, 0)
        return base.root if first is handle else self.locate(base, layout)

    def relocate(self, handle: torch.Tensor) -> None:
        """Track a handle by its layout, after an op that no rule describes changed its metadata."""
        if base := self.bases.get(storage_key(handle)):
            self.track(handle, self.locate(base, Layout.of(handle)))
        else:
            self.create_base(handle, handle)

    def track(self, handle: torch.Tensor, view: View) -> None:
        """Record which view a handle has. A base is dropped with the last handle that depends on it."""
        reference = HandleRef(handle, self._forget)
        reference.key, reference.view = id(handle), view
        view.base.handles[reference.key] = reference

    def _forget(self, gone: HandleRef) -> None:
        base = gone.view.base
        if base.handles.get(gone.key) is gone:
            del base.handles[gone.key]
            if not base.handles and self.bases.get(base.key) is base:
                del self.bases[base.key]
                base.release()

    def derive(
        self,
        source: View,
        op: Any,
        args: tuple[Any, ...],
        layout: Layout,
        *,
        rules: list[ViewRule] | None = None,
        sized_by_data: bool = False,
    ) -> View:
        """The view that ``op(source, *args)`` makes; chains collapse where fewer steps reach the same layout.

        ``rules`` gets the op's rule, or has it from another call on plain sizes and of the same layouts and arguments.
        ``sized_by_data``: whether sizes of the source were data-dependent before the op replaced them.
        """
        base, entry = source.base, _view_ops.get(id(op))
        if entry is None:
            entry = _view_ops[id(op)] = _ViewOp(op, view_rules.VIEW_RULES.get(op), op in traits.RESIZING_VIEWS)
        build = entry.build
        view = base.at(layout)
        if view is base.root and view is source and entry.resizes and build is not None:
            return base.renamed(build(source.layout, layout, *args))
        if view is source and build is not None and (sized_by_data or (not layout.static and unbacked(layout.size))):
            return View(base, source, build(source.layout, layout, *args), layout)  # may do more when a graph runs
        if view is not None:
            return view
        if build is None:
            return self.locate(base, layout)
        if source.depth - base.root.depth >= _LONG_CHAIN:
            shortcut = self._shortcut(source, layout)
            if shortcut is not None:
                return shortcut
        if rules is None:
            rules = []
        if not rules:
            rules.append(build(source.layout, layout, *args))
        return base.add(source, rules[0], layout)

    def _shortcut(self, source: View, layout: Layout) -> View | None:
        """The view of a layout at the end of a long chain, by fewer steps from the root; None if not fewer."""
        base, root = source.base, source.base.root
        length = source.depth - root.depth
        steps = route(root.layout, layout)
        if steps is None:
            return self.locate(base, layout) if length >= 2 * _LONG_CHAIN and layout.static else None
        if len(steps) > length:
            return None
        parent, rule = self._last(root, steps)
        return base.at(layout) or base.add(parent, rule, layout)

    def _last(self, root: View, steps: Sequence[RouteStep]) -> tuple[View, ViewRule]:
        """The last step of a route as a rule, and the view that it starts from."""
        parent = root
        for step in steps[:-1]:
            parent = _step(parent, step.op, step.args, step.layout)
        last = steps[-1]
        return parent, _rule(last.op, parent, last.layout, last.args)

    def prepare_write(self, view: View) -> None:
        """Move a view that is about to be written below sources that hold each element once.

        A source whose positions share elements (`unfold`, `expand`) would keep the old one at the other positions.
        """
        base = view.base
        if not any(source.layout.has_internal_overlap for source in view.lineage() if source is not view):
            if view is base.top and view.layout.has_internal_overlap:
                self._make_flat_base(base, view.layout)
            return
        steps = route(base.root.layout, view.layout)
        parent, rule = self._last(base.root, steps) if steps else self._address(base, view.layout)
        # The route passes the view itself, or another source with overlaps.
        if any(source is view or source.layout.has_internal_overlap for source in parent.lineage()):
            parent, rule = self._address(base, view.layout)
        base.move(view, parent, rule)

    def locate(self, base: Base, layout: Layout) -> View:
        """The view with a layout; a new one is addressed through the elements of its storage in order."""
        return base.at(layout) or base.add(*self._address(base, layout), layout)

    def _address(self, base: Base, layout: Layout) -> tuple[View, ViewRule]:
        """A source whose elements are in order of the storage, and the rule that reads a layout from it."""
        if layout.conj or layout.neg:
            op = aten._conj.default if layout.conj else aten._neg_view.default
            neg = layout.neg if layout.conj else False
            plain = self.locate(base, dataclasses.replace(layout, conj=False, neg=neg))
            self.prepare_write(plain)
            return plain, _rule(op, plain, layout, ())
        top = base.top.layout
        grown = base.capacity is not None and not (type(base.capacity) is int and base.capacity == 0)
        if grown and unbacked(top.size) and not is_empty(layout):
            raise STORAGE_OF_DATA_DEPENDENT_SIZE.error(size=tuple(layout.size), old=tuple(top.size))
        source = base.top if reaches(top, layout) else self._make_flat_base(base, layout)
        if source.layout.dtype != layout.dtype:
            recast = as_dtype(source.layout, layout.dtype)
            if recast.matches(layout):
                return source, _rule(aten.view.dtype, source, layout, (layout.dtype,))
            source = _step(source, aten.view.dtype, (layout.dtype,), recast)
            self.prepare_write(source)
        return source, _addressed(source.layout, layout)

    def _make_flat_base(self, base: Base, layout: Layout) -> View:
        """A new top: the elements of the storage in order, from the first to the last that any view addresses."""
        old = base.top
        around = flat_base_layout(old.layout, layout)
        if around is None:
            raise STORAGE_SHARED_UNKNOWN.error(size=tuple(layout.size), offset=layout.offset, other=old.layout.size)
        rule = _then_lazy(_addressed(around, old.layout), _lazy_ops(old.layout.conj, old.layout.neg))
        base.seed = _seed(base, around, rule, old)
        return base.put_on_top(around, rule)


def _rule(op: Any, source: View, layout: Layout, args: tuple[Any, ...]) -> ViewRule:
    return view_rules.VIEW_RULES[op](source.layout, layout, *args)


def _step(source: View, op: Any, args: tuple[Any, ...], layout: Layout) -> View:
    """The view with a layout; an op makes it unless its base has it."""
    return source.base.at(layout) or source.base.add(source, _rule(op, source, layout, args), layout)


def _addressed(source: Layout, layout: Layout) -> ViewRule:
    """The rule that reads a layout from a source whose elements are in order of the storage."""
    whole = layout.order is not None and layout.elements == source.elements and layout.dtype == source.dtype
    return view_rules.permuted_dense(layout) if whole and len(source.size) == 1 else view_rules.strided(source, layout)


def _lazy_ops(conj: bool, neg: bool) -> list[Any]:
    return [op for op, bit in ((aten._conj.default, conj), (aten._neg_view.default, neg)) if bit]


def _then_lazy(rule: ViewRule, ops: Sequence[Any]) -> ViewRule:
    """A rule, then lazy ops on its view, which no address has."""
    if not ops:
        return rule

    def inverse(call: Call, base: LazyValue, view: Value) -> Value:
        return rule.inverse(call, base, _undone(call, ops, view))

    return dataclasses.replace(rule, path=(*rule.path, *(OpCall(op, ()) for op in ops)), inverse=inverse)


def _undone(call: Call, ops: Sequence[Any], value: Value) -> Value:
    """A value without what lazy ops do to it: each is its own inverse."""
    for op in ops:
        value = call(copying(op), value)
    return value


def _seed(base: Base, layout: Layout, rule: ViewRule, old: View) -> Callable[[Call], Value]:
    """A function that computes a flat base: from the old top's value, and the elements around it from the storage."""
    original, old_seed, value, empty = base.original, base.seed, old.value, is_empty(old.layout)

    def seed(call: Call) -> Value:
        first = old_seed(call) if value is None and old_seed is not None else value
        handle = base.twin if base.twin is not None else original() if original else None
        inside = base.holds(layout)

        def around() -> Value:
            held = layout.size[0] if inside else _held(base, layout, old.layout)
            if handle is None or not (inside or held > 0):
                return call(aten.new_zeros.default, first, list(layout.size))
            read = call(aten.as_strided_copy.default, handle, [held], [1], layout.offset)
            elements = _undone(call, _lazy_ops(handle.is_conj(), handle.is_neg()), read)
            gained = [] if inside else [call(aten.new_zeros.default, first, [layout.size[0] - held])]
            return call(aten.cat.default, [elements, *gained]) if gained else elements

        if empty or (first is handle and not rule.covers and inside):
            return around()
        return rule.inverse(call, around, first)

    return seed


def _held(base: Base, layout: Layout, old: Layout) -> int:
    """How many elements of a layout the storage had before it grew; 0 if it had only those of the old top."""
    if type(base.capacity) is int:
        return int(base.capacity // layout.dtype.itemsize - layout.offset)
    if hinted_span(old) == (0, hint(base.capacity)):
        return 0
    raise STORAGE_OF_UNKNOWN_SIZE.error(size=tuple(old.size))
