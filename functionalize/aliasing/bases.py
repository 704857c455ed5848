"""One storage: its views as a tree, its handles, its writes.

A `Base` stands for one storage. Its `View`s form a tree: the root is the first handle that was seen on the storage,
each other view has a rule that reads it from its source. Above the root there may be a flat base: the elements of
the storage in order, for views that the root does not reach.

Invariant: a view's layout never changes, except for symbols that a guard has pinned; a write that the log does not
return for a view shares no element with it. Limits: strided layout.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize.aliasing.geometry import Layout, fits, plain
from functionalize.aliasing.overlap import Box, box_of, boxes_disjoint, spans_disjoint
from functionalize.aliasing.view_rules import Call, Progression, Value, ViewRule


class View:
    """A layout in a storage, and the rule that reads it from its source; the top of the tree has neither."""

    def __init__(self, base: Base, parent: View | None, rule: ViewRule | None, layout: Layout) -> None:
        self.base = base
        self.layout = layout
        self.value: Value | None = None
        self.generation = 0  # how many writes of the base's log the value includes
        self.aliased = False  # the value belongs to another tensor as well
        self.is_source = False  # whether other views were read from it
        self.record: Any = None  # of the program's history, once the program has made the view
        self.set_parent(parent, rule)

    def set_parent(self, parent: View | None, rule: ViewRule | None) -> None:
        """Set the source and the rule; ``covers`` and ``depth`` follow from them."""
        self.parent, self.rule = parent, rule
        self.depth: int = 0 if parent is None else parent.depth + 1
        if parent is not None:
            parent.is_source = True
        self.covers: bool = parent is None or (parent.covers and rule is not None and rule.covers)

    def set_value(self, value: Value, generation: int, *, aliased: bool = False) -> None:
        """Set the value, and the generation at which it is right; ``aliased``: it belongs to another tensor too."""
        self.value, self.generation, self.aliased = value, generation, aliased

    @cached_property
    def box(self) -> Box | None:
        """The layout as a box of the root; None where it is not a box."""
        return box_of(self.base.root.layout, self.layout)

    @property
    def part(self) -> Progression | None:
        """Which part of its source the view is, if it is one."""
        return None if self.rule is None else self.rule.part

    def disjoint(self, other: View) -> bool:
        """Whether two views of one base provably share no element."""
        if self is other:
            return False
        mine, its = self.part, other.part
        if self.parent is other.parent and mine is not None and its is not None and mine.dim == its.dim:
            return mine.stop <= its.start or its.stop <= mine.start
        if spans_disjoint(self.layout, other.layout):
            return True
        if self.is_below(other) or other.is_below(self):
            return False
        box, other_box = self.box, other.box
        return box is not None and other_box is not None and boxes_disjoint(box, other_box)

    def is_below(self, source: View) -> bool:
        """Whether the view was read from a source, directly or by others."""
        view = self
        while view.parent is not None and view.depth > source.depth:
            view = view.parent
        return view is source

    def lineage(self) -> Iterator[View]:
        """The view, its source, its source's source, up to the top."""
        view: View | None = self
        while view is not None:
            yield view
            view = view.parent


@dataclass(frozen=True, eq=False)
class PendingWrite:
    """A write that the value of the top does not have yet: to which view, what, and its generation."""

    view: View
    value: Value
    generation: int


class _Parts:
    """Written views that are parts of one source along one dimension (rows, slices), found by their positions.

    A query for one of n rows does not visit the writes to other rows.
    """

    def __init__(self) -> None:
        self.last = 0
        self._starts: list[int] = []
        self._at: dict[int, dict[View, tuple[Progression, int]]] = {}
        self._longest = 0

    def add(self, view: View, part: Progression, position: int) -> None:
        """Note a write to a view, at a position of the log."""
        if part.start not in self._at:
            insort(self._starts, part.start)
            self._at[part.start] = {}
        self._at[part.start][view] = (part, position)
        self._longest = max(self._longest, part.stop - part.start)
        self.last = position

    def views(self) -> Iterator[View]:
        """Each view that was written."""
        for at in self._at.values():
            yield from at

    def meeting(self, part: Progression, since: int) -> Iterator[View]:
        """The views written after a position whose parts overlap ``part``."""
        first = bisect_left(self._starts, part.start - self._longest + 1)
        for start in self._starts[first : bisect_left(self._starts, part.stop)]:
            for view, (other, position) in self._at[start].items():
                if position > since and other.stop > part.start:
                    yield view


class WriteLog:
    """The writes to one storage, in order. Finds those that may have touched a view. Keeps each view once."""

    def __init__(self) -> None:
        self.length = 0
        self._parts: dict[tuple[View, int], _Parts] = {}
        self._others: dict[View, int] = {}

    def __len__(self) -> int:
        return self.length

    @classmethod
    def of(cls, views: Iterable[View]) -> WriteLog:
        """A log of one write to each view."""
        log = cls()
        for view in views:
            log.append(view)
        return log

    def append(self, view: View) -> None:
        """Note a write to a view."""
        self.length += 1
        part = view.part
        if part is None or view.parent is None:
            self._others[view] = self.length
        else:
            self._parts.setdefault((view.parent, part.dim), _Parts()).add(view, part, self.length)

    def views(self) -> Iterator[View]:
        """Each view written, once."""
        yield from self._others
        for parts in self._parts.values():
            yield from parts.views()

    def touching(self, view: View, since: int) -> Iterator[View]:
        """The views written after a position that may share an element with a view."""
        if since >= self.length:
            return
        for write, position in self._others.items():
            if position > since and not write.disjoint(view):
                yield write
        for (source, dim), parts in self._parts.items():
            if parts.last > since:
                for write in parts.meeting(_within(view, source, dim), since):
                    if not write.disjoint(view):
                        yield write


_EVERYWHERE = Progression(0, 0, 1 << 62, drops=False)


def _within(view: View, source: View, dim: int) -> Progression:
    """The part of a source along a dimension that contains a view, as far as its sources show."""
    for step in view.lineage():
        if step.parent is source:
            return step.part if step.part is not None and step.part.dim == dim else _EVERYWHERE
    return _EVERYWHERE


class HandleRef(weakref.ref[torch.Tensor]):
    """A weak reference to a handle, and the handle's view."""

    __slots__ = ("key", "view")

    key: int
    view: View


class Base:
    """One storage that was viewed or written: its tree of views, its handles, and the log of its writes."""

    def __init__(self, handle: torch.Tensor, value: Value, layout: Layout) -> None:
        self.key = storage_key(handle)
        # Held, so that its identity is not used again.
        self.storage: Any = handle.untyped_storage() if self.key > 0 else handle
        self.capacity: Any = None  # in bytes, before the program resized the storage
        self.root = self.top = View(self, None, None, layout)
        self.root.value = value
        # The handle addresses all of its storage, also the elements between and around its own.
        self.original = weakref.ref(handle) if value is handle else None
        self.twin: Value | None = None  # an alias of the handle at its old metadata, once these changed
        self.held: torch.Tensor | None = None  # the handle, if it is written back when the call ends
        self.seed: Callable[[Call], Value] | None = None  # computes the top's first value, if the top is not a handle's
        self.log = WriteLog()
        self.pending: dict[View, PendingWrite] = {}
        self.kept: dict[View, Value] | None = None  # if asked for: every write that no later one covers
        self.handles: dict[int, HandleRef] = {}
        self._views: dict[tuple[Any, ...], View] = {self.root.layout.key: self.root}
        self._renamed: list[View] = []  # see `renamed`; at most one

    def at(self, layout: Layout) -> View | None:
        """The view with a layout, or None."""
        return self._views.get(layout.key)

    def add(self, parent: View, rule: ViewRule, layout: Layout) -> View:
        """The view with a layout; a rule makes it unless the base has it."""
        return self._views.setdefault(layout.key, View(self, parent, rule, layout))

    def renamed(self, rule: ViewRule) -> View:
        """The view that the program made of the root by a reshape to the root's own size."""
        if not self._renamed:
            self._renamed.append(View(self, self.root, rule, self.root.layout))
        return self._renamed[0]

    def put_on_top(self, layout: Layout, rule: ViewRule) -> View:
        """Put a flat base with a layout above the old top, which is read from it by a rule."""
        old, self.top = self.top, View(self, None, None, layout)
        self.top.generation = old.generation
        self._views.setdefault(layout.key, self.top)
        self.move(old, self.top, rule)
        return self.top

    def move(self, view: View, parent: View, rule: ViewRule) -> None:
        """Give a view another source; the views below it move along."""
        view.set_parent(parent, rule)
        for view in sorted(chain(self._views.values(), self._renamed), key=lambda view: view.depth):
            view.set_parent(view.parent, view.rule)

    def note_resize(self) -> None:
        """Note the size of the storage, which the program is about to resize: new bytes have no contents yet."""
        self.capacity = plain(self.storage.nbytes())

    def holds(self, layout: Layout) -> bool:
        """Whether the storage held a layout before the program resized it; true if it did not."""
        return self.capacity is None or fits(layout, self.capacity)

    def simplify(self) -> None:
        """Replace symbols that guards have pinned by integers in the layouts of all views."""
        if all(view.layout.static for view in self._views.values()):
            return
        for view in self._views.values():
            view.layout = view.layout.simplified()
        self._views = {view.layout.key: view for view in reversed(self._views.values())}

    def drop_stale(self) -> None:
        """Forget values that no read would use."""
        if not self.log.length:
            return
        for view in self._views.values():
            if view is not self.top and not self.untouched(view, since=view.generation):
                view.value = None

    def release(self) -> None:
        """Drop all tensors, which the reference cycle of base and views would hold until garbage is collected."""
        for view in chain(self._views.values(), self._renamed):
            view.value = None
        self.pending.clear()
        self.kept = None
        self.storage = self.held = self.seed = self.twin = None

    @property
    def first(self) -> torch.Tensor | None:
        """The handle that was first seen on the storage, if it lives and addresses all of it."""
        return None if self.original is None else self.original()

    def is_original(self, handle: torch.Tensor) -> bool:
        """Whether a handle is the one that was first seen on the storage, and its value."""
        return self.original is not None and self.original() is handle

    def untouched(self, view: View, since: int) -> bool:
        """Whether no write after generation ``since`` shares an element with the view."""
        return self.log.length <= since or next(self.log.touching(view, since), None) is None
