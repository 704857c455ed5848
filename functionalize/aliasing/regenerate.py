"""The values of views: reading what was written, writing without mutation.

A view's ``value`` was right at its ``generation``, a position in its base's log of writes. It still is, as long as each
later write touches other elements. A write only notes the written view and its value. When someone reads a view that
pending writes overlap in part, they are folded into the top of the tree: deepest first, disjoint siblings together.

Invariant: a value is only used at a position where it is right. Limits: nothing here dispatches; ops run through
``call``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from functionalize.aliasing.bases import Base, View, WriteLog
from functionalize.aliasing.view_composition import tile_runs
from functionalize.aliasing.view_rules import Value

aten = torch.ops.aten
PendingWrite = tuple[View, Value, int]  # a pending write: the view, its new value, its position in the log
LazyValue = Callable[[], Value]


class Execution(Protocol):
    """What carries out the ops that values need."""

    def call(self, op: Any, *args: Any) -> Value:
        """Execute one op on values."""

    def recorded_view(self, view: View, source_value: Value) -> Value | None:
        """A view's value, given its source's, where no op has to run for it; else None."""

    @property
    def views_alias(self) -> bool:
        """Whether the value of a view shares memory with its source's value."""


def regenerate(run: Execution, view: View) -> Value:
    """The view's current value."""
    base, path = view.base, []
    for source in view.lineage():
        if source.value is not None and base.untouched(view, since=source.generation):
            break
        path.append(source)
    else:
        _fold_pending(run, base)
        return regenerate(run, view)
    value = source.value
    for node in reversed(path):
        assert node.rule is not None
        known = run.recorded_view(node, value)
        value = node.rule.replay(run.call, _owned(run, node, value)) if known is None else known
        node.set_value(value, source.generation, aliased=source.aliased and run.views_alias)
    return value


def commit(view: View, value: Value, *, aliased: bool = False) -> None:
    """Note that the program wrote ``value``, of the view's shape and dtype, to the view."""
    base = view.base
    base.log.append(view)
    view.set_value(_lasting(view, value), len(base.log), aliased=aliased)
    if view.covers:
        base.pending.clear()
    elif base.pending and view.is_source:
        for covered in [other for other in base.pending if view in other.lineage()]:
            del base.pending[covered]
    if base.kept is not None:
        _keep(base.kept, view, value)
    base.pending.pop(view, None)  # the newest write stands last, also where the same view was written before
    if view is not base.top:
        base.pending[view] = (value, len(base.log))


def _keep(kept: dict[View, Value], view: View, value: Value) -> None:
    """Remember a write, and forget those that it covers."""
    if view.covers:
        kept.clear()
    elif view.is_source:
        for covered in [other for other in kept if view in other.lineage()]:
            del kept[covered]
    kept.pop(view, None)
    kept[view] = value


def _lasting(view: View, value: Value) -> Value | None:
    """A written value, as far as reading the view would give it back: an element has one value at all its positions."""
    return None if view.layout.has_internal_overlap else value


def _fold_pending(run: Execution, base: Base) -> None:
    entries = [(view, value, generation) for view, (value, generation) in base.pending.items()]
    base.pending.clear()
    value = _fold(run, base.top, entries, lambda: top_value(run, base))
    base.top.set_value(value, len(base.log), aliased=_still_aliased(run, entries))


def _still_aliased(run: Execution, entries: list[PendingWrite]) -> bool:
    """Whether a folded value may still be an aliased one: views carry it along, a scatter makes a new value."""
    return run.views_alias and any(view.aliased and view.covers for view, _, _ in entries)


def top_value(run: Execution, base: Base) -> Value:
    """The value of the top before the writes that are pending."""
    if base.top.value is None:
        assert base.seed is not None
        base.top.value = base.seed(run.call)
    return base.top.value


def _fold(run: Execution, node: View, entries: list[PendingWrite], before: LazyValue) -> Value:
    """The value of ``node`` after writes at or below it, in order; ``before`` computes the one before them."""
    batch: dict[View, Value] = {}  # new values of children that lie apart, not part of `before` yet
    lying = WriteLog()  # the same children, to ask which overlap
    for child, group in _by_child(node, entries):
        if child is None:
            batch, lying, before = {}, WriteLog(), _constant(group[-1][1])
            continue
        if any(other is not child for other in lying.touching(child, 0)):
            batch, lying, before = {}, WriteLog(), _constant(_scatter(run, batch, before))
        lying.append(child)
        prior = _constant(batch[child]) if child in batch else _prior(run, child, group, before)
        batch[child] = value = _fold(run, child, group, prior)
        aliased = any(view.aliased for view, _, _ in group) and (value is child.value or run.views_alias)
        child.set_value(_lasting(child, value), group[-1][2], aliased=aliased)
    return _scatter(run, batch, before)


def _by_child(node: View, entries: list[PendingWrite]) -> Iterator[tuple[View | None, list[PendingWrite]]]:
    """Consecutive entries that lie at or below the same child of ``node``; None for ``node`` itself."""
    group: list[PendingWrite] = []
    current: View | None = None
    for entry in entries:
        child = _child_towards(node, entry[0])
        if group and child is not current:
            yield current, group
            group = []
        current = child
        group.append(entry)
    if group:
        yield current, group


def _child_towards(node: View, view: View) -> View | None:
    if view is node:
        return None
    for step in view.lineage():
        if step.parent is node:
            return step
    raise AssertionError("a pending write lies outside of its base's tree")


def _prior(run: Execution, child: View, group: list[PendingWrite], before: LazyValue) -> LazyValue:
    """How to compute a child's value before a group of writes below it."""
    rule = child.rule
    assert rule is not None
    inside = {view for view, _, _ in group}
    if child.value is not None and all(write in inside for write in child.base.log.touching(child, child.generation)):
        return _constant(child.value)
    return lambda: rule.replay(run.call, _owned(run, child, before()))


def _scatter(run: Execution, batch: dict[View, Value], before: LazyValue) -> Value:
    """The value of a source, given the values of disjoint children."""
    for tiles in tile_runs([(child, child.rule.part) for child in batch if child.rule is not None]):
        before = _constant(_tile(run, tiles, batch, before))
        batch = {child: value for child, value in batch.items() if child not in tiles}
    for child, value in batch.items():
        assert child.rule is not None
        before = _constant(child.rule.inverse(run.call, _source(run, child, before), value))
    return before()


def _owned(run: Execution, view: View, value: Value) -> Value:
    """The value of a view's source, for the view's rule: a clone where an aliased one may start elsewhere."""
    assert view.rule is not None and view.parent is not None
    return run.call(aten.clone.default, value) if view.rule.addresses_storage and view.parent.aliased else value


def _source(run: Execution, view: View, before: LazyValue) -> LazyValue:
    return lambda: _owned(run, view, before())


def _tile(run: Execution, tiles: list[View], batch: dict[View, Value], before: LazyValue) -> Value:
    """The source's value after writes to adjacent parts, joined into one write."""
    first, last = tiles[0].rule, tiles[-1].rule
    assert first is not None and last is not None and tiles[0].parent is not None
    assert first.part is not None and last.part is not None
    dim, start, stop = first.part.dim, first.part.start, last.part.stop
    join = aten.stack.default if first.part.drops else aten.cat.default
    piece = run.call(join, [batch[child] for child in tiles], dim)
    if start == 0 and stop == tiles[0].parent.layout.size[dim]:
        return piece
    return run.call(aten.slice_scatter.default, before(), piece, dim, start, stop)


def _constant(value: Any) -> LazyValue:
    return lambda: value
