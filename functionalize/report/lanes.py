"""Lays out storages as lanes: a column each, time downwards, views as branches of their base, rows of one height.

Columns are used again when what held them is over. A storage that is written back begins on top and runs to its
write-backs; any other begins with its first event.

Invariant: no two lanes or branches share a column at one row. Limits: each view and write has a row,
however many there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from functionalize.report.model import INTERMEDIATE, Back, Storage, View, Write

ROW = 24  # pixels
COLUMN = 16
_LEFT = 12
Event = View | Write | Back


@dataclass(frozen=True)
class Row:
    """One event, where it is drawn."""

    place: int
    what: str  # begin, view, write or back
    storage: Storage
    event: Event
    x: int

    @property
    def y(self) -> int:
        return _y(self.place)


@dataclass(frozen=True)
class Stroke:
    """A line of the picture: a lane, a branch, or what a write through a branch brings back to its lane."""

    what: str  # lane, branch or merge
    storage: Storage
    path: str


@dataclass(frozen=True)
class Picture:
    """Rows and strokes of some storages."""

    rows: list[Row]
    strokes: list[Stroke]
    columns: int
    spill: bool  # a stroke ends below the last row

    @property
    def width(self) -> int:
        return self.columns * COLUMN + 8

    @property
    def height(self) -> int:
        return len(self.rows) * ROW + (ROW // 2 if self.spill else 0)


def drawn(storages: Sequence[Storage]) -> Picture:
    """The picture of some storages."""
    events = sorted(_events(storages), key=lambda event: event[0])
    lanes: dict[int, _Lane] = {}  # in the order in which they begin
    for place, (_, _, storage, event) in enumerate(events):
        lanes.setdefault(storage.number, _Lane(storage, place)).note(place, event)
    columns = _pack(lanes.values())
    rows = [
        Row(place, what, storage, event, lanes[storage.number].x_of(event))
        for place, (_, what, storage, event) in enumerate(events)
    ]
    strokes = [stroke for storage in storages for stroke in lanes[storage.number].strokes()]
    return Picture(rows, strokes, columns, any(lane.last >= len(events) for lane in lanes.values()))


def _events(storages: Sequence[Storage]) -> Iterator[tuple[tuple[int, int], str, Storage, Event]]:
    """All that happened, with the key that puts it in order."""
    for storage in storages:
        root, *views = storage.views
        waits = storage.kind == INTERMEDIATE or not storage.backs
        yield (1, root.time) if waits else (0, storage.number), "begin", storage, root
        yield from (((1, view.time), "view", storage, view) for view in views)
        yield from (((1, write.time), "write", storage, write) for write in storage.writes)
        yield from (((2, back.output), "back", storage, back) for back in storage.backs)


class _Lane:
    """Where one storage's line and branches go. The storage's first tensor is in the lane's own column."""

    def __init__(self, storage: Storage, first: int) -> None:
        self.storage = storage
        self.first = self.last = first
        self.left = 0  # column
        self._made: dict[int, int] = {}  # rows in which views branch off
        self._last: dict[int, int] = {}  # rows in which these were last used
        self._merges: list[tuple[int, int]] = []  # views and rows of the writes through them
        self._columns = {0: 0}

    def note(self, place: int, event: Event) -> None:
        """An event of the storage has this row, below those of the earlier ones."""
        self.last = place
        if isinstance(event, View) and event.parent is not None:
            self._made[event.number] = self._last[event.number] = self._last[event.parent] = place
        elif isinstance(event, Write) and event.view:
            self._merges.append((event.view, place))
            self._last[event.view] = self.last = place + 1  # where the merge ends

    def spread(self) -> int:
        """Give each branch a column that is free while it lasts. Returns how many columns there are."""
        busy = [self.last + 1]
        for view, made in self._made.items():
            column = self._columns[self._parent(view)] + 1
            while column < len(busy) and busy[column] >= made:
                column += 1
            busy += [-1] * (column + 1 - len(busy))
            busy[column] = self._last[view]
            self._columns[view] = column
        return len(busy)

    def _parent(self, view: int) -> int:
        return self.storage.views[view].parent or 0

    def x_of(self, event: Event) -> int:
        if isinstance(event, View):
            return self._x(event.number)
        return self._x(event.view if isinstance(event, Write) else 0)

    def _x(self, view: int) -> int:
        return (self.left + self._columns[view]) * COLUMN + _LEFT

    def strokes(self) -> Iterator[Stroke]:
        """The lines to draw."""
        x = self._x(0)
        if self.last > self.first:
            yield Stroke("lane", self.storage, f"M{x} {_y(self.first)}V{_y(self.last)}")
        for view, made in self._made.items():
            end = max(made, self._last[view] - 1)  # what comes of the view begins a row above where it ends
            curve = _curve(self._x(self._parent(view)), made - 1, self._x(view), made)
            yield Stroke("branch", self.storage, f"{curve}V{_y(end)}")
        for view, place in self._merges:
            yield Stroke("merge", self.storage, _curve(self._x(view), place, x, place + 1))


def _y(place: int) -> int:
    return place * ROW + ROW // 2


def _curve(x: int, place: int, to_x: int, to_place: int) -> str:
    y, to_y = _y(place), _y(to_place)
    middle = (y + to_y) // 2
    return f"M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def _pack(lanes: Collection[_Lane]) -> int:
    """Give each lane columns of its own while it lasts. Returns how many there are."""
    busy: list[int] = []
    for lane in lanes:
        width, left = lane.spread(), 0
        while any(row >= lane.first for row in busy[left : left + width]):
            left += 1
        busy += [-1] * (left + width - len(busy))
        busy[left : left + width] = [lane.last] * width
        lane.left = left
    return len(busy)
