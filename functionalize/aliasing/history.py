"""What happened to each storage while a program ran: its views, its writes, in order, and the lines that did it.

Invariant: records outlive the program and hold no tensor. Limits: one record per layout in a storage: views with
the same layout are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from functionalize.aliasing.bases import Base, View
from functionalize.aliasing.geometry import Layout
from functionalize.call_stack import Location, Origin


@dataclass(eq=False)
class ViewRecord:
    """One layout in a storage that the program had a tensor for."""

    index: int
    base: BaseRecord
    parent: ViewRecord | None
    op: str  # the op that made it; of a base's first tensor empty
    region: Layout
    origin: Origin
    time: int  # position among all events of the program

    @property
    def location(self) -> Location:
        """The line in the user's code."""
        return self.origin.location


@dataclass(eq=False)
class WriteRecord:
    """One write."""

    index: int
    base: BaseRecord
    view: ViewRecord
    op: str
    origin: Origin
    time: int

    @property
    def location(self) -> Location:
        """The line in the user's code."""
        return self.origin.location


@dataclass(eq=False)
class BaseRecord:
    """One storage that was viewed or written."""

    index: int
    name: str  # of the input, the state or the graph's node that it began as
    views: list[ViewRecord] = field(default_factory=list)
    writes: list[WriteRecord] = field(default_factory=list)

    @property
    def root(self) -> ViewRecord:
        """The first tensor that was seen on the storage."""
        return self.views[0]


class AliasHistory:
    """All bases of one program, with their views and writes."""

    def __init__(self) -> None:
        self.bases: list[BaseRecord] = []

    @property
    def views(self) -> list[ViewRecord]:
        """Every view, in the order in which they were made."""
        return sorted((view for base in self.bases for view in base.views), key=lambda view: view.time)

    @property
    def writes(self) -> list[WriteRecord]:
        """Every write, in order."""
        return sorted((write for base in self.bases for write in base.writes), key=lambda write: write.time)

    def base(self, name: str) -> BaseRecord:
        """The base that began as the input, state or node of a name. Raises KeyError."""
        for base in self.bases:
            if base.name == name:
                return base
        raise KeyError(f"no base is named {name!r}; there are {', '.join(base.name for base in self.bases)}")

    def to_dot(self) -> str:
        """The graph in Graphviz's language: bases, their views, and their writes as dashed edges."""
        lines = ["digraph aliases {", "  rankdir=LR; node [shape=box, fontname=monospace];"]
        for view in self.views:
            label = _quoted(_label(view))
            lines.append(f"  v{view.index} [label={label}{'' if view.parent else ', style=bold'}];")
            if view.parent is not None:
                lines.append(f"  v{view.parent.index} -> v{view.index} [label={_quoted(view.op)}];")
        for write in self.writes:
            lines.append(f"  w{write.index} [label={_quoted(f'{write.op} at {write.location}')}, shape=ellipse];")
            lines.append(f"  w{write.index} -> v{write.view.index} [style=dashed];")
        return "\n".join([*lines, "}"])

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart."""
        lines = ["flowchart LR"]
        for view in self.views:
            lines.append(f'  v{view.index}["{_safe(_label(view))}"]')
            if view.parent is not None:
                lines.append(f'  v{view.parent.index} -->|"{_safe(view.op)}"| v{view.index}')
        for write in self.writes:
            lines.append(f'  w{write.index}(["{_safe(f"{write.op} at {write.location}")}"]) -.-> v{write.view.index}')
        return "\n".join(lines)


class Historian:
    """Notes what happens while a program runs; the :class:`AliasHistory` is written when somebody wants to read it."""

    def __init__(self, name_of: Callable[[Base], str], here: Callable[[], Origin]) -> None:
        self._name_of, self._here = name_of, here
        self._names: dict[Base, str] = {}
        self._numbers: dict[Base, int] = {}  # of the bases in the history
        self._seen: set[View] = set()
        self._events: list[tuple[View, View | None, Layout, Any, Origin, bool]] = []  # the last: whether a write

    def viewed(self, view: View, op: Any) -> None:
        """Note that the program made a view."""
        if view in self._seen:
            return
        self._seen.add(view)
        if view.parent is not None:
            self.viewed(view.parent, op)
        elif view.base not in self._names:
            self._names[view.base] = self._name_of(view.base)
        self._events.append((view, view.parent, view.layout, op, self._here(), False))

    def wrote(self, view: View, op: Any) -> None:
        """Note that the program wrote to a view."""
        self.viewed(view, op)
        self._events.append((view, view.parent, view.layout, op, self._here(), True))

    def detach(self) -> None:
        """Nothing more will happen: let go of what told where the program was."""
        self._name_of, self._here = _nameless, _nowhere

    @cached_property
    def history(self) -> AliasHistory:
        """The history of all noted events."""
        history = AliasHistory()
        views: dict[View, ViewRecord] = {}
        writes = 0
        for time, (view, parent, layout, op, origin, is_write) in enumerate(self._events):
            number = self._numbers.setdefault(view.base, len(history.bases))
            if number == len(history.bases):
                history.bases.append(BaseRecord(number, self._names[view.base]))
            base = history.bases[number]
            if is_write:
                base.writes.append(WriteRecord(writes, base, views[view], str(op), origin, time))
                writes += 1
            else:
                name = "" if parent is None else str(op)
                source = None if parent is None else views[parent]
                views[view] = ViewRecord(len(views), base, source, name, layout, origin, time)
                base.views.append(views[view])
        return history

    def writes_of(self, base: Base) -> Sequence[WriteRecord]:
        """The writes to a base, in order."""
        bases, number = self.history.bases, self._numbers.get(base)
        return () if number is None else bases[number].writes


def _nameless(base: Base) -> str:
    return "storage"


def _nowhere() -> Origin:
    return Origin((), None)


def _label(view: ViewRecord) -> str:
    region = view.region
    name = f"{view.base.name}\\n" if view.parent is None else ""
    return f"{name}{list(region.size)} strides {list(region.stride)} at {region.offset}"


def _quoted(text: str) -> str:
    escaped = text.replace('"', r"\"")
    return f'"{escaped}"'


def _safe(text: str) -> str:
    return text.replace('"', "'").replace("\\n", " ")
