"""Turns a report's data into one HTML page that needs nothing else.

Invariant: all text of the user's is escaped; the page refers to nothing outside of itself. Limits: without JavaScript
it can be read, folded and followed by its links, but not searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from functionalize.report.code import op_name, size_text
from functionalize.report.folds import GROUPS, clustered, folded
from functionalize.report.lanes import drawn
from functionalize.report.model import Collective, Function, Report, Storage

_TEMPLATES = Path(__file__).parent / "templates"
_OPEN_LINES = 220  # of source, at first


def page(report: Report) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size_text, op=_op, tally=_tally, many=_many, drawn=drawn)
    functions = [function for function in report.functions if not function.passes_on]
    return environment.get_template("report.html.j2").render(
        report=report,
        titles=GROUPS,
        groups={name: clusters for name, clusters in clustered(report.storages).items() if clusters},
        functions=functions,
        others=[function for function in report.functions if function.passes_on],
        opened=_opened(functions),
        tree=folded(report.nodes),
        axes=_axes(report.collectives),
    )


def _axes(collectives: Sequence[Collective]) -> dict[str, dict[str, list[Collective]]]:
    """The collectives over each axis, by kind; both in the order in which they come first."""
    axes: dict[str, dict[str, list[Collective]]] = {}
    for entry in collectives:
        axes.setdefault(f"{entry.axis}, {_many(entry.ranks, 'rank')}", {}).setdefault(entry.kind, []).append(entry)
    return axes


def _opened(functions: Sequence[Function]) -> list[Function]:
    """The functions that write are open, and the first others, while there is room."""
    room, chosen = _OPEN_LINES, []
    for function in sorted(functions, key=lambda function: (function.library, not function.writes)):
        if len(function.lines) <= room:
            chosen.append(function)
            room -= len(function.lines)
    return chosen


def _op(op: str) -> str:
    return op_name(op).removeprefix("aten.")


def _tally(storages: Sequence[Storage]) -> str:
    """``3 parameters, 1 buffer · 4 writes``."""
    kinds = Counter(storage.kind for storage in storages)
    events = {
        "view": sum(storage.made for storage in storages),
        "write": sum(len(storage.writes) for storage in storages),
        "write-back": sum(len(storage.backs) for storage in storages),
    }
    counts = [_many(count, what) for what, count in events.items() if count]
    return " · ".join([", ".join(_many(count, kind) for kind, count in kinds.items()), *counts])


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def write(report: Report, path: Any) -> Path:
    """Write the page to a file. Returns the file's path."""
    target = Path(path)
    target.write_text(page(report), encoding="utf-8")
    return target
