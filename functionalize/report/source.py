"""The user's source lines that a program ran: numbered, with what each did, and shown with their surroundings.

Invariant: a line has one number, however often it ran. Limits: of a file that can no longer be read, only the lines
that were noted when the program ran are shown.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from functionalize.call_stack import Location
from functionalize.report.model import Function, Line

_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)(?:\n    (.*))?', re.MULTILINE)
_TORCH = str(Path(torch.__file__).parent)
_CALLS = f"{_TORCH}/nn/modules/module.py"  # how torch calls a module: never what a reader looks for
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_AROUND = 2  # lines shown before and after one that did something


class Sources:
    """Gives numbers to lines, and counts what they did."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int], Line] = {}
        self._chains: list[tuple[Line, ...]] = []
        self._of_trace: dict[str, int | None] = {}

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """For each way to a node the numbers of its lines, outermost first."""
        return tuple(tuple(line.number for line in chain) for chain in self._chains)

    def dispatched(self, node: int, trace: str) -> int | None:
        """Note which lines led to a node. Returns the number of the chain."""
        if trace not in self._of_trace:
            chain = tuple(dict.fromkeys(self._at(*frame) for frame in _user_frames(trace)))
            self._of_trace[trace] = len(self._chains) if chain else None
            self._chains += [chain] if chain else []
        place = self._of_trace[trace]
        if place is not None:
            *outer, last = self._chains[place]
            last.nodes.append(node)
            for line in outer:
                line.through += 1
        return place

    def handled(self, location: Location, *, wrote: bool) -> int | None:
        """Note that a line wrote, or made a view. Returns its number."""
        if not location.line:
            return None
        line = self._at(location)
        line.writes += wrote
        line.views += not wrote
        return line.number

    def function(self, chain: int | None) -> tuple[str, str] | None:
        """The function that dispatched a node, and its file."""
        if chain is None:
            return None
        line = self._chains[chain][-1]
        return line.function, line.file

    def first(self) -> str | None:
        """The function of the first line of all: what was captured."""
        return self._chains[0][0].function if self._chains else None

    def functions(self) -> tuple[Function, ...]:
        """All that was seen, by function, in the order in which they began to run."""
        grouped: dict[tuple[str, str, int, int], dict[int, Line]] = {}
        for line in self.lines.values():
            grouped.setdefault((line.path, *_function_at(line)), {})[line.lineno] = line
        return tuple(
            Function(name, short(path), path, tuple(_excerpt(path, lines, start, end)), bool(_INSTALLED.match(path)))
            for (path, name, start, end), lines in grouped.items()
        )

    def _at(self, location: Location, text: str = "") -> Line:
        path, lineno, function = location
        if (path, lineno) not in self.lines:
            text = _text(path, lineno) or text
            self.lines[path, lineno] = Line(len(self.lines), short(path), path, lineno, text, function)
        return self.lines[path, lineno]


def _user_frames(trace: str) -> list[tuple[Location, str]]:
    """The lines of a stack trace that are not torch's; where all are, those of its modules."""
    frames = [(Location(file, int(lineno), name), text) for file, lineno, name, text in _FRAME.findall(trace)]
    own = [frame for frame in frames if not frame[0].file.startswith(_TORCH)]
    return own or [frame for frame in frames if frame[0].file != _CALLS]


def _excerpt(path: str, known: Mapping[int, Line], start: int, end: int) -> Iterator[Line | None]:
    """The known lines of a function with those around them; None where some are left out."""
    shown = {start, *known}
    for lineno in known:
        shown.update(range(max(start, lineno - _AROUND), min(end, lineno + _AROUND) + 1))
    shown |= {lineno + 1 for lineno in shown if lineno + 2 in shown}  # no gap for a single line
    for lineno in sorted(shown):
        if lineno > start and lineno - 1 not in shown:
            yield None
        yield known.get(lineno) or Line(-1, short(path), path, lineno, _text(path, lineno))


def _text(path: str, lineno: int) -> str:
    return linecache.getline(path, lineno).rstrip("\n")


def _function_at(line: Line) -> tuple[str, int, int]:
    """The innermost function around a line, with its first and last line; a file that is no Python counts as none."""
    inside = [found for found in _functions(line.path) if found[1] <= line.lineno <= found[2]]
    return max(inside, key=lambda found: found[1], default=(line.function, line.lineno, line.lineno))


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> list[tuple[str, int, int]]:
    try:
        return list(_named(ast.parse("".join(linecache.getlines(file))), ""))
    except (SyntaxError, ValueError):
        return []


def _named(tree: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """The functions in a tree by their qualified names, each with its first and last line."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{prefix}{node.name}."
            if not isinstance(node, ast.ClassDef):
                yield inner[:-1], node.lineno, node.end_lineno or node.lineno
        yield from _named(node, inner)


@functools.lru_cache(maxsize=1024)
def short(file: str) -> str:
    """A path as a reader wants it: from the package, or from the working directory."""
    installed = _INSTALLED.match(file)
    if installed:
        return file[installed.end() :]
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return str(Path(*Path(file).parts[-2:]))
