"""The writes to one storage, in order, and which of them may have touched a view.

Writes to parts of one source along one dimension (rows, slices) are kept by where they start, so that a question about
one of n rows does not go through the writes to the others.

Invariant: what is left out shares no element with the view in question. Limits: views of other kinds are asked one by
one, each once however often it was written.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Protocol

from functionalize.aliasing.view_rules import Progression, ViewRule


class View(Protocol):
    """What is asked of a view: :class:`functionalize.aliasing.bases.View`."""

    parent: Any
    rule: ViewRule | None

    def lineage(self) -> Iterator[Any]:
        """The view, its source, its source's source, up to the top."""

    def disjoint(self, other: Any) -> bool:
        """Whether two views of one base provably share no element."""


class Parts:
    """Views that are parts of one source along one dimension, found by where they lie. A view has a position."""

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
        """Each view kept."""
        for at in self._at.values():
            yield from at

    def meeting(self, part: Progression, since: int) -> Iterator[View]:
        """The views after a position whose parts overlap one."""
        first = bisect_left(self._starts, part.start - self._longest + 1)
        for start in self._starts[first : bisect_left(self._starts, part.stop)]:
            for view, (other, position) in self._at[start].items():
                if position > since and other.stop > part.start:
                    yield view


class WriteLog:
    """The views written, in order."""

    def __init__(self) -> None:
        self._length = 0
        self._parts: dict[tuple[View, int], Parts] = {}
        self._others: dict[View, int] = {}

    def __len__(self) -> int:
        return self._length

    def append(self, view: View) -> None:
        """Note one more write."""
        self._length += 1
        part = part_of(view)
        if part is None or view.parent is None:
            self._others[view] = self._length
        else:
            self._parts.setdefault((view.parent, part.dim), Parts()).add(view, part, self._length)

    def views(self) -> Iterator[Any]:
        """Each view written, once."""
        yield from self._others
        for parts in self._parts.values():
            yield from parts.views()

    def touching(self, view: View, since: int) -> Iterator[Any]:
        """The views written after a position that may share an element with a view."""
        if since >= self._length:
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


def part_of(view: View) -> Progression | None:
    """Which part of its source a view is, if it is one."""
    return None if view.rule is None else view.rule.part


def _within(view: View, source: View, dim: int) -> Progression:
    """Which part of a source along a dimension a view lies in, as far as its sources tell."""
    for step in view.lineage():
        if step.parent is source:
            part = part_of(step)
            return part if part is not None and part.dim == dim else _EVERYWHERE
    return _EVERYWHERE
