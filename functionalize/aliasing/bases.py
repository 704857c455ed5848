"""One storage: its views as a tree, its handles, its writes.

A `Base` stands for one storage. Its `View`s form a tree: the root is the first handle that was seen on the storage,
each other view says by a rule how it is read from its source. Above the root there may be a flat base: the elements of
the storage in order, for views that the root does not reach.

Invariant: a view's layout never changes, but for symbols that a guard has pinned. Limits: strided layout.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize.aliasing.geometry import Layout, fits, plain
from functionalize.aliasing.overlap import Box, box_of, boxes_disjoint, spans_disjoint
from functionalize.aliasing.view_rules import Call, Value, ViewRule
from functionalize.aliasing.write_log import WriteLog

_UNSET: Any = object()


class View:
    """A layout in a storage, and the rule that reads it from its source; the top of the tree has neither."""

    __slots__ = (
        "_box",
        "aliased",
        "base",
        "covers",
        "depth",
        "generation",
        "is_source",
        "layout",
        "parent",
        "rule",
        "value",
    )

    def __init__(self, base: Base, parent: View | None, rule: ViewRule | None, layout: Layout) -> None:
        self.base = base
        self.layout = layout
        self.value: Value | None = None
        self.generation = 0  # how many writes of the base's log the value has
        self.aliased = False  # the value belongs to another tensor as well
        self.is_source = False  # whether other views were read from it
        self._box: Box | None = _UNSET
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

    @property
    def box(self) -> Box | None:
        """The layout as a box of the root; None where it is none."""
        if self._box is _UNSET:
            self._box = box_of(self.base.root.layout, self.layout)
        return self._box

    def disjoint(self, other: View) -> bool:
        """Whether two views of one base provably share no element."""
        if self is other:
            return False
        if self.parent is other.parent and self.rule is not None and other.rule is not None:
            a, b = self.rule.part, other.rule.part
            if a is not None and b is not None and a.dim == b.dim:
                return a.stop <= b.start or b.stop <= a.start
        if spans_disjoint(self.layout, other.layout):
            return True
        box, other_box = self.box, other.box
        return box is not None and other_box is not None and boxes_disjoint(box, other_box)

    def lineage(self) -> Iterator[View]:
        """The view, its source, its source's source, up to the top."""
        view: View | None = self
        while view is not None:
            yield view
            view = view.parent


class HandleRef(weakref.ref[torch.Tensor]):
    """A handle, as long as it lives, and the view that it is of."""

    __slots__ = ("key", "view")

    key: int
    view: View


class Base:
    """One storage that was viewed or written: its tree of views, its handles, and the log of its writes."""

    __slots__ = (
        "_renamed",
        "_views",
        "capacity",
        "handles",
        "held",
        "kept",
        "key",
        "log",
        "original",
        "pending",
        "root",
        "seed",
        "storage",
        "top",
        "twin",
    )

    def __init__(self, handle: torch.Tensor, value: Value) -> None:
        self.key = storage_key(handle)
        # Held, so that its identity is not used again.
        self.storage: Any = handle.untyped_storage() if self.key > 0 else handle
        self.capacity: Any = None  # in bytes, before the program resized the storage
        self.root = self.top = View(self, None, None, Layout.of(handle))
        self.root.value = value
        # The handle addresses all of its storage, also what lies between and around its elements.
        self.original = weakref.ref(handle) if value is handle else None
        self.twin: Value | None = None  # of the handle, from when its metadata changed
        self.held: torch.Tensor | None = None  # the handle, where it is to be written back when the call ends
        self.seed: Callable[[Call], Value] | None = None  # computes the top's first value, where the top is no handle
        self.log = WriteLog()
        self.pending: dict[View, tuple[Value, int]] = {}  # writes that the top's value does not have yet
        self.kept: dict[View, Value] | None = None  # every write that no later one covers, where that is asked for
        self.handles: dict[int, HandleRef] = {}
        self._views: dict[tuple[Any, ...], View] = {self.root.layout.key: self.root}
        self._renamed: View | None = None

    def at(self, layout: Layout) -> View | None:
        """The view with a layout, or None."""
        return self._views.get(layout.key)

    def add(self, parent: View, rule: ViewRule, layout: Layout) -> View:
        """The view with a layout, made by a rule if there is none yet."""
        return self._views.setdefault(layout.key, View(self, parent, rule, layout))

    def renamed(self, rule: ViewRule) -> View:
        """The view which the program made of the root by a reshape to the root's own size."""
        if self._renamed is None:
            self._renamed = View(self, self.root, rule, self.root.layout)
        return self._renamed

    def set_top(self, flat_base: View, rule: ViewRule) -> None:
        """Put a new top above the old one."""
        old, self.top = self.top, flat_base
        self._views.setdefault(flat_base.layout.key, flat_base)
        self.move(old, flat_base, rule)

    def move(self, view: View, parent: View, rule: ViewRule) -> None:
        """Give a view another source; the views below it move along."""
        view.set_parent(parent, rule)
        views = [*self._views.values()] + ([self._renamed] if self._renamed else [])
        for view in sorted(views, key=lambda view: view.depth):
            view.set_parent(view.parent, view.rule)

    def note_resize(self) -> None:
        """Note the size of the storage, which the program is about to resize: what it gains holds nothing yet."""
        self.capacity = plain(self.storage.nbytes())

    def holds(self, layout: Layout) -> bool:
        """Whether the storage held a layout from the start; always, where the program has not resized it."""
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
        for view in self._views.values():
            if view is not self.top and not self.untouched(view, since=view.generation):
                view.value = None

    def release(self) -> None:
        """Drop all tensors, which the reference cycle of base and views would hold until garbage is collected."""
        for view in self._views.values():
            view.value = None
        if self._renamed is not None:
            self._renamed.value = None
        self.pending.clear()
        self.kept = None
        self.storage = self.held = self.seed = self.twin = None

    def is_original(self, handle: torch.Tensor) -> bool:
        """Whether a handle is the one that was first seen on the storage, and its value."""
        return self.original is not None and self.original() is handle

    def untouched(self, view: View, since: int) -> bool:
        """Whether no write after generation ``since`` shares an element with the view."""
        return len(self.log) <= since or next(self.log.touching(view, since), None) is None
