"""What each view is worth now: reading what was written, writing without mutation.

A view's ``value`` was right at its ``stamp``, a position in its base's log of writes. It still is, as long as each
later write lies elsewhere. A write only notes the written view and its value. When someone reads a place that pending
writes meet in part, they are folded into the top of the tree: deepest first, siblings that lie apart together.

Invariant: a value is only used at a position where it is right. Limits: nothing here dispatches; ops run through
``call``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize.alias_graph import Base, View, disjoint
from functionalize.view_rules import Call, Value, tile_runs

aten = torch.ops.aten
Entry = tuple[View, Value, int]  # a pending write: the view, its new value, its position in the log
Before = Callable[[], Value]


Record = Callable[[View, Value], "Value | None"]  # a view's value of its source's without running an op, if known


def regenerate(call: Call, view: View, record: Record) -> Value:
    """The view's current value."""
    base, path = view.base, []
    for source in view.lineage():
        if source.value is not None and base.untouched(view, since=source.stamp):
            break
        path.append(source)
    else:
        _fold_pending(call, base)
        return regenerate(call, view, record)
    value = source.value
    for node in reversed(path):
        assert node.rule is not None
        known = record(node, value)
        value = node.rule.replay(call, value) if known is None else known
        node.settle(value, source.stamp)
    return value


def commit(view: View, value: Value, *, borrowed: bool = False) -> None:
    """Note that the program wrote ``value``, of the view's shape and dtype, to the view."""
    base = view.base
    base.log.append(view)
    view.settle(value, len(base.log), borrowed=borrowed)
    if view.covers:
        base.pending.clear()
    elif base.pending:
        for covered in [other for other in base.pending if view in other.lineage()]:
            del base.pending[covered]
    if view is not base.top:
        base.pending[view] = (value, len(base.log))


def _fold_pending(call: Call, base: Base) -> None:
    entries = [(view, value, stamp) for view, (value, stamp) in base.pending.items()]
    base.pending.clear()
    base.top.settle(_fold(call, base.top, entries, lambda: _top_value(call, base)), len(base.log))


def _top_value(call: Call, base: Base) -> Value:
    if base.top.value is None:
        assert base.seed is not None
        base.top.value = base.seed(call)
    return base.top.value


def _fold(call: Call, node: View, entries: list[Entry], before: Before) -> Value:
    """The value of ``node`` after writes at or below it, in order; ``before`` computes the one before them."""
    batch: dict[View, Value] = {}  # new values of children that lie apart, not part of `before` yet
    for child, group in _by_child(node, entries):
        if child is None:
            batch, before = {}, _constant(group[-1][1])
            continue
        if not all(other is child or disjoint(other, child) for other in batch):
            batch, before = {}, _constant(_scatter(call, batch, before))
        prior = _constant(batch[child]) if child in batch else _prior(call, child, group, before)
        batch[child] = value = _fold(call, child, group, prior)
        child.settle(value, group[-1][2], borrowed=child.borrowed and value is child.value)
    return _scatter(call, batch, before)


def _by_child(node: View, entries: list[Entry]) -> Iterator[tuple[View | None, list[Entry]]]:
    """Consecutive entries that lie at or below the same child of ``node``; None for ``node`` itself."""
    group: list[Entry] = []
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


def _prior(call: Call, child: View, group: list[Entry], before: Before) -> Before:
    """How to compute a child's value before a group of writes below it."""
    rule = child.rule
    assert rule is not None
    inside = {view for view, _, _ in group}
    others = (write for write in child.base.log[child.stamp :] if write not in inside)
    if child.value is not None and all(disjoint(write, child) for write in others):
        return _constant(child.value)
    return lambda: rule.replay(call, before())


def _scatter(call: Call, batch: dict[View, Value], before: Before) -> Value:
    """Carry the values of children that lie apart back to their common source."""
    for run in tile_runs([(child, child.rule.part) for child in batch if child.rule is not None]):
        before = _constant(_tile(call, run, batch, before))
        batch = {child: value for child, value in batch.items() if child not in run}
    for child, value in batch.items():
        assert child.rule is not None
        before = _constant(child.rule.inverse(call, before, value))
    return before()


def _tile(call: Call, run: list[View], batch: dict[View, Value], before: Before) -> Value:
    """Adjacent parts of one source as a single piece: one write in place of one for each part."""
    first, last = run[0].rule, run[-1].rule
    assert first is not None and last is not None and run[0].parent is not None
    assert first.part is not None and last.part is not None
    dim, start, stop = first.part.dim, first.part.start, last.part.stop
    join = aten.stack.default if first.part.drops else aten.cat.default
    piece = call(join, [batch[child] for child in run], dim)
    if start == 0 and stop == run[0].parent.geometry.size[dim]:
        return piece
    return call(aten.slice_scatter.default, before(), piece, dim, start, stop)


def _constant(value: Any) -> Before:
    return lambda: value
