"""Turns a report's data into one HTML page that needs nothing else.

Invariant: all text of the user's is escaped; the page refers to nothing outside of itself. Limits: without JavaScript
it can be read, folded and followed by its links, but not searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from functionalize.report.building import size_text
from functionalize.report.code import op_name
from functionalize.report.folds import GROUPS, Cluster, clustered, folded
from functionalize.report.lanes import Picture, drawn
from functionalize.report.model import Amount, Function, Report, Storage

_TEMPLATES = Path(__file__).parent / "templates"
_OPEN_LINES = 220  # of source, at first


@dataclass(frozen=True)
class _Group:
    title: str
    detail: str
    pictures: list[tuple[Cluster, Picture]]
    open: bool

    @property
    def storages(self) -> int:
        return sum(len(cluster.storages) for cluster, _ in self.pictures)


@dataclass(frozen=True)
class _Shown:
    function: Function
    open: bool


def page(report: Report) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=size_text,
        op=_op,
        basename=_basename,
        share=_share,
        tally=_tally,
        names=_names,
        after=_after,
        bare=lambda code: code.removeprefix("aten."),
    )
    groups = [
        _Group(*GROUPS[name], [(cluster, drawn(cluster.storages)) for cluster in clusters], name.startswith("written"))
        for name, clusters in clustered(report.storages).items()
        if clusters
    ]
    functions = [function for function in report.functions if not function.passes_on]
    return environment.get_template("report.html.j2").render(
        report=report,
        counts=_counts(report),
        groups=groups,
        functions=_opened(functions),
        others=[_Shown(function, False) for function in report.functions if function.passes_on],
        tree=folded(report.nodes),
    )


def _opened(functions: Sequence[Function]) -> list[_Shown]:
    """The functions that write are open, and the first others, while there is room."""
    room, chosen = _OPEN_LINES, set()
    for place in sorted(
        range(len(functions)), key=lambda place: (functions[place].library, not functions[place].writes)
    ):
        if len(functions[place].lines) <= room:
            chosen.add(place)
            room -= len(functions[place].lines)
    return [_Shown(function, place in chosen) for place, function in enumerate(functions)]


def _counts(report: Report) -> list[tuple[str, int, str]]:
    written = sum(bool(storage.writes) for storage in report.storages)
    targets = len({back.target for storage in report.storages for back in storage.backs})
    return [
        ("nodes", report.ops, "operators in the graph"),
        ("storages", len(report.storages), "viewed or written"),
        ("views", report.views, "made by the program"),
        ("writes", report.writes, f"to {written} storage{'s' if written != 1 else ''}"),
        ("write-backs", report.backs, f"to {targets} input{'s' if targets != 1 else ''} or state"),
    ]


def _op(op: str) -> str:
    return op_name(op).removeprefix("aten.")


def _after(name: str, prefix: str) -> str:
    """A name without what its picture's title says already."""
    return name.removeprefix(prefix) or name


def _basename(path: str) -> str:
    return path.rpartition("/")[2]


def _share(amount: Amount, report: Report) -> str:
    most = max((other.bytes for other in report.amounts), default=0)
    return f"{100 * amount.bytes / most:.2f}" if most else "0"


def _tally(storages: Sequence[Storage]) -> str:
    """``3 parameters, 1 buffer · 4 writes``."""
    kinds = Counter(storage.kind for storage in storages)
    parts = [", ".join(_many(count, kind) for kind, count in kinds.items())]
    events: list[tuple[int, str]] = [
        (sum(view.parent is not None for storage in storages for view in storage.views), "view"),
        (sum(len(storage.writes) for storage in storages), "write"),
        (sum(len(storage.backs) for storage in storages), "write-back"),
    ]
    parts += [_many(count, what) for count, what in events if count]
    return " · ".join(parts)


def _names(storages: Sequence[Storage]) -> str:
    names = [storage.name for storage in storages]
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def write(report: Report, path: Any) -> Path:
    """Write the page to a file. Returns the file's path."""
    target = Path(path)
    target.write_text(page(report), encoding="utf-8")
    return target
