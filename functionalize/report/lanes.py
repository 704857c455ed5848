"""Lays out storages as lanes: a column each, time downwards, views as branches of their base, rows of one height.

Columns are used again when what held them is over. A storage that is written back begins on top and runs to its
write-backs; any other begins with its first event.

Invariant: no two lanes or branches share a column at one row. Limits: each view and write has a row,
however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
        return self.place * ROW + ROW // 2


@dataclass(frozen=True)
class Stroke:
    """A line of the picture: a lane, a branch, or what a write through a branch brings back to its lane."""

    what: str  # lane, branch or merge
    storage: Storage
    path: str


@dataclass
class Picture:
    """Rows and strokes of some storages."""

    rows: list[Row] = field(default_factory=list)
    strokes: list[Stroke] = field(default_factory=list)
    columns: int = 1
    spill: bool = False  # a stroke ends below the last row

    @property
    def width(self) -> int:
        return self.columns * COLUMN + 8

    @property
    def height(self) -> int:
        return len(self.rows) * ROW + (ROW // 2 if self.spill else 0)


def drawn(storages: Sequence[Storage]) -> Picture:
    """The picture of some storages."""
    events = sorted(_events(storages), key=lambda event: event[0])
    lanes = {storage.number: _Lane(storage) for storage in storages}
    for place, (_, what, storage, event) in enumerate(events):
        lanes[storage.number].note(place, what, event)
    picture = Picture(columns=_pack(list(lanes.values())))
    for place, (_, what, storage, event) in enumerate(events):
        picture.rows.append(Row(place, what, storage, event, lanes[storage.number].x_of(event)))
    for lane in lanes.values():
        picture.strokes += lane.strokes()
        picture.spill = picture.spill or lane.last >= len(events)
    return picture


def _events(storages: Sequence[Storage]) -> Iterator[tuple[tuple[int, int], str, Storage, Event]]:
    """All that happened, with the key that puts it in order."""
    for storage in storages:
        for view in storage.views:
            if view.parent is not None:
                yield (1, view.time), "view", storage, view
            elif storage.kind == INTERMEDIATE or not storage.backs:
                yield (1, view.time), "begin", storage, view
            else:
                yield (0, storage.number), "begin", storage, view
        for write in storage.writes:
            yield (1, write.time), "write", storage, write
        for back in storage.backs:
            yield (2, back.output), "back", storage, back


class _Lane:
    """Where one storage's line and branches go."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.left = 0  # column
        self._made: dict[int, int] = {}  # rows in which views were made
        self._last: dict[int, int] = {}  # rows in which they were last used
        self._merges: list[tuple[int, int]] = []  # views and rows of the writes through them
        self.first, self.last = -1, 0
        self._columns: dict[int, int] = {}

    def note(self, place: int, what: str, event: Event) -> None:
        """An event of the storage has this row."""
        self.first = place if self.first < 0 else self.first
        self.last = max(self.last, place)
        if isinstance(event, View):
            self._made[event.number] = self._last[event.number] = place
            if event.parent is not None:
                self._last[event.parent] = max(self._last.get(event.parent, place), place)
        elif isinstance(event, Write):
            self._last[event.view] = max(self._last.get(event.view, place), place)
            if self.storage.views[event.view].parent is not None:
                self._merges.append((event.view, place))
                self._last[event.view] = place + 1  # where the merge ends
                self.last = max(self.last, place + 1)

    @property
    def width(self) -> int:
        """How many columns the lane and its branches take."""
        busy: list[int] = [self.last + 1]
        for view in sorted(self._made, key=self._made.__getitem__):
            parent = self.storage.views[view].parent
            if parent is None:
                self._columns[view] = 0
                continue
            made, column = self._made[view], self._columns.get(parent, 0) + 1
            while column < len(busy) and busy[column] >= made:
                column += 1
            busy += [-1] * (column + 1 - len(busy))
            busy[column] = self._last[view]
            self._columns[view] = column
        return len(busy)

    def x_of(self, event: Event) -> int:
        if isinstance(event, View):
            return self._x(event.number)
        return self._x(event.view) if isinstance(event, Write) else self._x(None)

    def _x(self, view: int | None) -> int:
        column = 0 if view is None else self._columns.get(view, 0)
        return (self.left + column) * COLUMN + _LEFT

    def strokes(self) -> Iterator[Stroke]:
        """The lines to draw."""
        x = self._x(None)
        if self.last > self.first:
            yield Stroke("lane", self.storage, f"M{x} {_y(self.first)}V{_y(self.last)}")
        for view, made in self._made.items():
            parent = self.storage.views[view].parent
            if parent is not None:
                stop = max([place for number, place in self._merges if number == view] + self._uses(view) + [made])
                yield Stroke(
                    "branch", self.storage, f"{_curve(self._x(parent), made - 1, self._x(view), made)}V{_y(stop)}"
                )
        for view, place in self._merges:
            yield Stroke("merge", self.storage, _curve(self._x(view), place, x, place + 1))

    def _uses(self, view: int) -> list[int]:
        """The rows above those in which views of this view are made: their branches begin there."""
        return [self._made[other.number] - 1 for other in self.storage.views if other.parent == view]


def _y(place: int) -> int:
    return place * ROW + ROW // 2


def _curve(x: int, place: int, to_x: int, to_place: int) -> str:
    y, to_y = _y(place), _y(to_place)
    middle = (y + to_y) // 2
    return f"M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def _pack(lanes: list[_Lane]) -> int:
    """Give each lane columns of its own while it lasts. Returns how many there are."""
    busy: list[int] = []
    for lane in sorted(lanes, key=lambda lane: lane.first):
        width, left = lane.width, 0
        while any(row >= lane.first for row in busy[left : left + width]):
            left += 1
        busy += [-1] * (left + width - len(busy))
        busy[left : left + width] = [lane.last] * width
        lane.left = left
    return max(len(busy), 1)
