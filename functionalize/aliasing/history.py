"""What happened to each storage while a program ran: its views, its writes, in order, and the lines that did it.

Invariant: records outlive the program and hold no tensor. Limits: one record per layout in a storage: views with
the same layout are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from functionalize.aliasing.bases import Base, View
from functionalize.aliasing.geometry import Layout
from functionalize.call_stack import Location, Origin


@dataclass(eq=False, slots=True)
class _Event:
    index: int  # among the program's views, or among its writes
    base: BaseRecord
    called: Any  # the op; None for a base's first tensor
    origin: Origin
    time: int  # position among all events of the program

    @property
    def op(self) -> str:
        """The name of the op; empty for a base's first tensor."""
        return "" if self.called is None else str(self.called)

    @property
    def location(self) -> Location:
        """The line in the user's code."""
        return self.origin.location


@dataclass(eq=False, slots=True)
class ViewRecord(_Event):
    """One layout in a storage that the program had a tensor for."""

    parent: ViewRecord | None
    region: Layout


@dataclass(eq=False, slots=True)
class WriteRecord(_Event):
    """One write."""

    view: ViewRecord


@dataclass(eq=False, slots=True)
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
    """Writes the history while a program runs."""

    def __init__(self, name_of: Callable[[Base], str], origin: Callable[[], Origin]) -> None:
        self.history = AliasHistory()
        self._name_of, self._origin = name_of, origin
        self._bases: dict[Base, BaseRecord] = {}
        self._views = self._writes = 0  # how many

    def viewed(self, view: View, op: Any) -> ViewRecord:
        """Note that the program made a view."""
        record: ViewRecord | None = view.record
        if record is not None:
            return record
        if view.parent is None:
            parent, base, op = None, self._base(view.base), None
        else:
            parent = view.parent.record or self.viewed(view.parent, op)
            base = parent.base
        index = self._views
        view.record = record = ViewRecord(index, base, op, self._origin(), index + self._writes, parent, view.layout)
        self._views = index + 1
        base.views.append(record)
        return record

    def _base(self, base: Base) -> BaseRecord:
        """The record of a base."""
        record = self._bases.get(base)
        if record is None:
            record = self._bases[base] = BaseRecord(len(self._bases), self._name_of(base))
            self.history.bases.append(record)
        return record

    def wrote(self, view: View, op: Any) -> None:
        """Note that the program wrote to a view."""
        record = self.viewed(view, op)
        time = self._views + self._writes
        record.base.writes.append(WriteRecord(self._writes, record.base, op, self._origin(), time, record))
        self._writes += 1

    def detach(self) -> None:
        """End the run: drop the functions that find names and lines of the program."""
        del self._name_of, self._origin

    def writes_of(self, base: Base) -> Sequence[WriteRecord]:
        """The writes to a base, in order."""
        return self._bases[base].writes if base in self._bases else ()


def _label(view: ViewRecord) -> str:
    region = view.region
    name = f"{view.base.name}\\n" if view.parent is None else ""
    return f"{name}{list(region.size)} strides {list(region.stride)} at {region.offset}"


def _quoted(text: str) -> str:
    escaped = text.replace('"', r"\"")
    return f'"{escaped}"'


def _safe(text: str) -> str:
    return text.replace('"', "'").replace("\\n", " ")
