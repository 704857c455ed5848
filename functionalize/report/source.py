"""The user's source lines that a program ran: numbered, with what each did, and shown with their surroundings.

Invariant: a line has one number, however often it ran. Limits: of a file that can no longer be read, only the lines
that were noted when the program ran are shown.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from functionalize.report.model import Function, Line

_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)(?:\n    (.*))?', re.MULTILINE)
_TORCH = str(Path(torch.__file__).parent)
_CALLS = f"{_TORCH}/nn/modules/module.py"  # how torch calls a module: never what a reader looks for
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_AROUND = 2  # lines shown before and after one that did something


@dataclass(frozen=True)
class Frame:
    """A line of a file, in a function."""

    file: str
    lineno: int
    function: str
    text: str = ""


@dataclass(eq=False)
class _Seen:
    """What is known of a line."""

    number: int
    frame: Frame
    nodes: list[int] = field(default_factory=list)
    through: int = 0
    views: int = 0
    writes: int = 0

    def line(self, text: str) -> Line:
        done = (tuple(self.nodes), self.through, self.views, self.writes)
        return Line(self.number, short(self.frame.file), self.frame.file, self.frame.lineno, text, *done)


class Sources:
    """Gives numbers to lines, and counts what they did."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._chains: list[tuple[_Seen, ...]] = []
        self._of_trace: dict[str, int | None] = {}

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """For each way to a node the numbers of its lines, outermost first."""
        return tuple(tuple(seen.number for seen in chain) for chain in self._chains)

    def dispatched(self, node: int, trace: str) -> int | None:
        """Note which lines led to a node. Returns the number of the chain."""
        if trace not in self._of_trace:
            chain = tuple(dict.fromkeys(map(self._at, user_frames(trace))))
            self._of_trace[trace] = len(self._chains) if chain else None
            if chain:
                self._chains.append(chain)
        place = self._of_trace[trace]
        if place is not None:
            *outer, last = self._chains[place]
            last.nodes.append(node)
            for seen in outer:
                seen.through += 1
        return place

    def viewed(self, frame: Frame) -> int | None:
        """Note that a line made a view. Returns its number."""
        if not frame.lineno:
            return None
        seen = self._at(frame)
        seen.views += 1
        return seen.number

    def wrote(self, frame: Frame) -> int | None:
        """Note that a line wrote. Returns its number."""
        if not frame.lineno:
            return None
        seen = self._at(frame)
        seen.writes += 1
        return seen.number

    def function(self, chain: int | None) -> tuple[str, str] | None:
        """The function that dispatched a node, and its file."""
        if chain is None:
            return None
        frame = self._chains[chain][-1].frame
        return frame.function, short(frame.file)

    def first(self) -> Frame | None:
        """The first line of all: in what was captured."""
        return self._chains[0][0].frame if self._chains else None

    def functions(self) -> tuple[Function, ...]:
        """All that was seen, by function, in the order in which they began to run."""
        grouped: dict[tuple[str, str, int], list[_Seen]] = {}
        for seen in self._seen.values():
            name, start, _ = function_at(seen.frame)
            grouped.setdefault((seen.frame.file, name, start), []).append(seen)
        return tuple(self._function(file, name, group) for (file, name, _), group in grouped.items())

    def _function(self, file: str, name: str, group: list[_Seen]) -> Function:
        lines = tuple(self._excerpt(file, group))
        return Function(name, short(file), file, lines, bool(_INSTALLED.match(file)))

    def _excerpt(self, file: str, group: Sequence[_Seen]) -> Iterator[Line | None]:
        """The lines of a group with those around them; None where some are left out."""
        known = {seen.frame.lineno: seen for seen in group}
        _, start, end = function_at(group[0].frame)
        shown = {start, *known}
        for lineno in known:
            shown.update(range(max(start, lineno - _AROUND), min(end, lineno + _AROUND) + 1))
        before = start - 1
        for lineno in sorted(shown):
            if lineno == before + 2:  # no gap for a single line
                yield self._line(file, lineno - 1, known)
            elif lineno > before + 1:
                yield None
            yield self._line(file, lineno, known)
            before = lineno

    def _line(self, file: str, lineno: int, known: dict[int, _Seen]) -> Line:
        text = linecache.getline(file, lineno).rstrip("\n")
        if lineno in known:
            return known[lineno].line(text or known[lineno].frame.text)
        return Line(-1, short(file), file, lineno, text)

    def _at(self, frame: Frame) -> _Seen:
        key = (frame.file, frame.lineno)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(len(self._seen), frame)
        return seen


def user_frames(trace: str) -> list[Frame]:
    """The frames of a stack trace that are not torch's; where all are, those of its modules."""
    frames = [Frame(file, int(lineno), function, text) for file, lineno, function, text in _FRAME.findall(trace)]
    own = [frame for frame in frames if not frame.file.startswith(_TORCH)]
    return own or [frame for frame in frames if frame.file != _CALLS]


def function_at(frame: Frame) -> tuple[str, int, int]:
    """The innermost function around a line, with its first and last line; a file that is no Python counts as none."""
    inside = [found for found in _functions(frame.file) if found[1] <= frame.lineno <= found[2]]
    if inside:
        return max(inside, key=lambda found: found[1])
    return frame.function, frame.lineno, frame.lineno


@functools.lru_cache(maxsize=256)
def _functions(file: str) -> list[tuple[str, int, int]]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    found = []
    for node, name in _named(tree, ""):
        found.append((name, node.lineno, node.end_lineno or node.lineno))
    return found


def _named(tree: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield node, name
            yield from _named(node, f"{name}.")
        else:
            yield from _named(node, prefix)


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
