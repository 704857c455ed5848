"""The values of views: reading what was written, writing without mutation.

A view's ``value`` was right at its ``generation``, a position in its base's log of writes. It still is, as long as each
later write touches other elements. A write only notes the written view and its value. When someone reads a view that
pending writes overlap in part, they are folded into the top of the tree: deepest first, disjoint siblings together.

Invariant: a value is only used at a position where it is right. Limits: nothing here dispatches; ops run through
``call``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch

from functionalize.aliasing.bases import Base, PendingWrite, View, WriteLog
from functionalize.aliasing.view_rules import LazyValue, Progression, Value

aten = torch.ops.aten


class Execution(Protocol):
    """What carries out the ops that values need."""

    def call(self, op: Any, *args: Any) -> Value:
        """Execute one op on values."""

    def recorded_view(self, view: View, source_value: Value) -> Value | None:
        """A view's value, given its source's, if it is known without running an op; else None."""

    def carrying_out(self, base: Base, write: int) -> AbstractContextManager[None]:
        """A context in which ops run for a write to a base, given by its position in the log, on whichever read."""

    @property
    def views_alias(self) -> bool:
        """Whether the value of a view shares memory with its source's value."""


def regenerate(run: Execution, view: View) -> Value:
    """The view's current value."""
    base, path = view.base, []
    source: View | None = view
    while source is not None:
        if source.value is not None and base.untouched(view, since=source.generation):
            break
        path.append(source)
        source = source.parent
    else:
        _fold_pending(run, base)
        return regenerate(run, view)
    value = source.value
    for node in reversed(path):
        assert node.rule is not None
        recorded = run.recorded_view(node, value)
        value = node.rule.replay(run.call, _owned(run, node, _constant(value))) if recorded is None else recorded
        node.set_value(value, source.generation, aliased=source.aliased and run.views_alias)
    return value


def commit(view: View, value: Value, *, aliased: bool = False) -> None:
    """Note that the program wrote ``value``, of the view's shape and dtype, to the view."""
    base = view.base
    base.log.append(view)
    view.set_value(_lasting(view, value), len(base.log), aliased=aliased)
    _forget_covered(base.pending, view)
    if view is not base.top:
        base.pending[view] = PendingWrite(view, value, len(base.log))
    if base.kept is not None:
        _forget_covered(base.kept, view)
        base.kept[view] = value


def _forget_covered(writes: dict[View, Any], view: View) -> None:
    """Forget the writes that a write to a view covers, and an earlier one to the view: the newest comes last."""
    if view.covers:
        writes.clear()
    elif writes and view.is_source:
        for covered in [other for other in writes if other.is_below(view)]:
            del writes[covered]
    writes.pop(view, None)


def _lasting(view: View, value: Value) -> Value | None:
    """A written value if a read of the view returns it; None if positions share elements, which hold one value."""
    return None if view.layout.has_internal_overlap else value


def _fold_pending(run: Execution, base: Base) -> None:
    writes = list(base.pending.values())
    base.pending.clear()
    value = _fold(run, base.top, writes, lambda: top_value(run, base))
    # The value may still be aliased: views pass it on, a scatter makes a new one.
    aliased = run.views_alias and any(write.view.aliased and write.view.covers for write in writes)
    base.top.set_value(value, len(base.log), aliased=aliased)


def top_value(run: Execution, base: Base) -> Value:
    """The value of the top before the writes that are pending."""
    if base.top.value is None:
        assert base.seed is not None
        base.top.value = base.seed(run.call)
    return base.top.value


def _fold(run: Execution, node: View, writes: list[PendingWrite], before: LazyValue) -> Value:
    """The value of ``node`` after writes at or below it, in order; ``before`` computes the value before them."""
    batch: dict[View, Value] = {}  # new values of disjoint children, not part of `before` yet
    children: WriteLog | None = None  # the same children, to find those that overlap; None of a single child
    for child, consecutive in groupby(writes, key=lambda write: _child_towards(node, write.view)):
        group = list(consecutive)
        if child is None:
            batch, children, before = {}, None, _constant(group[-1].value)
            continue
        if batch:
            children = children or WriteLog.of(batch)
            if any(other is not child for other in children.touching(child, 0)):
                batch, children, before = {}, None, _constant(_scatter(run, batch, before))
            else:
                children.append(child)
        prior = _constant(batch[child]) if child in batch else _prior(run, child, group, before)
        batch[child] = value = _fold(run, child, group, prior)
        aliased = any(write.view.aliased for write in group) and (value is child.value or run.views_alias)
        child.set_value(_lasting(child, value), group[-1].generation, aliased=aliased)
    return _scatter(run, batch, before)


def _child_towards(node: View, view: View) -> View | None:
    """The child of ``node`` at or above a view; None for ``node`` itself."""
    if view is node:
        return None
    while view.parent is not node:
        assert view.parent is not None
        view = view.parent
    return view


def _prior(run: Execution, child: View, group: list[PendingWrite], before: LazyValue) -> LazyValue:
    """How to compute a child's value before a group of writes below it."""
    rule = child.rule
    assert rule is not None
    inside = {write.view for write in group}
    if child.value is not None and all(view in inside for view in child.base.log.touching(child, child.generation)):
        return _constant(child.value)
    return lambda: rule.replay(run.call, _owned(run, child, before))


def _scatter(run: Execution, batch: dict[View, Value], before: LazyValue) -> Value:
    """The value of a source, given the values of disjoint children."""
    for tiles in tile_runs([(child, child.part) for child in batch]) if len(batch) > 1 else ():
        before = _constant(_tile(run, tiles, batch, before))
        batch = {child: value for child, value in batch.items() if child not in tiles}
    for child, value in batch.items():
        assert child.rule is not None
        with run.carrying_out(child.base, child.generation):
            before = _constant(child.rule.inverse(run.call, partial(_owned, run, child, before), value))
    return before()


def _owned(run: Execution, view: View, source: LazyValue) -> Value:
    """The value of a view's source, for the view's rule: a clone if it is aliased and the rule reads its storage."""
    assert view.rule is not None and view.parent is not None
    return run.call(aten.clone.default, source()) if view.rule.addresses_storage and view.parent.aliased else source()


def tile_runs(parts: Sequence[tuple[Any, Progression | None]]) -> list[list[Any]]:
    """Groups of two or more views that are adjacent along one dimension of their common source, in order."""
    progressions = [(part.dim, part.drops, part.start, part.stop, view) for view, part in parts if part is not None]
    runs: list[list[Any]] = []
    end: tuple[Any, ...] | None = None
    for dim, drops, start, stop, view in sorted(progressions, key=lambda row: row[:4]):
        if end == (dim, drops, start):
            runs[-1].append(view)
        else:
            runs.append([view])
        end = (dim, drops, stop)
    return [run for run in runs if len(run) > 1]


def _tile(run: Execution, tiles: list[View], batch: dict[View, Value], before: LazyValue) -> Value:
    """The source's value after writes to adjacent parts, joined into one write."""
    first, last, source = tiles[0].part, tiles[-1].part, tiles[0].parent
    assert first is not None and last is not None and source is not None
    join = aten.stack.default if first.drops else aten.cat.default
    with run.carrying_out(source.base, max(child.generation for child in tiles)):
        piece = run.call(join, [batch[child] for child in tiles], first.dim)
        if first.start == 0 and last.stop == source.layout.size[first.dim]:
            return piece
        return run.call(aten.slice_scatter.default, before(), piece, first.dim, first.start, last.stop)


def _constant(value: Any) -> LazyValue:
    return lambda: value
