"""Finds the user's code on the stack, and the line of it that runs; makes room on the stack.

Invariant: frames are only read; only the frame of a scope is held, while the scope runs. Limits: code from text without
a file name (`exec`, `python -c`) counts as the program's, but its lines are not named.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple, TypeVar

import torch

_OWN = f"{Path(__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_GENERATED = tuple(f"<{name}" for name in ("frozen ", "eval_with_key", "lambdifygenerated", "attrs generated"))
_RUNNERS = (contextlib.__file__, threading.__file__)
_UNNAMED = "<string>"  # of `exec`: as methods of dataclasses, too
_LIBRARIES = tuple(f"{_TORCH}{part}/" for part in ("nn", "optim"))  # parts of torch that programs are written with


_ENTRY = re.compile(r'File "(.+)", line (\d+), in (.+)((?:\n(?! *File ).*)?)')  # of a stack trace


def user_frames() -> Iterator[FrameType]:
    """The frames that are neither torch's nor ours, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


class Location(NamedTuple):
    """A line of the user's code. As text: ``file:line in function: source``."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if not self.line:
            return self.file
        return f"{self.file}:{self.line} in {self.function}: {self.source}"

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()


def user_location() -> Location:
    """The line of the innermost frame that is neither torch's nor ours."""
    frame = next(user_frames(), None)
    if frame is None:
        return Location("unknown", 0, "")
    return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


Modules = dict[str, tuple[str, str]]  # as the meta of nodes has them: by a module's name, its path and its class
Positions = tuple[tuple[int, int], ...]  # of the program's frames, innermost first: a code's identity, its instruction


class _Lines(NamedTuple):
    """Lines as in a traceback."""

    all: str
    text: str  # as a node's meta has them: without the space at the end


class Origin:
    """Where a program is: the frames of the scope that runs, and the origin of the scope itself.

    ``modules``: those whose ``forward`` runs.
    """

    __slots__ = ("_lines", "frames", "modules", "outer")

    def __init__(self, frames: Positions, outer: Origin | Location, modules: Modules) -> None:
        self.frames, self.outer = frames, outer  # outermost: the line that calls the program
        self.modules = modules
        self._lines: _Lines | None = None

    @property
    def location(self) -> Location:
        """The line of the innermost frame that is the user's; else the line that calls the program."""
        return self._users_line or self._caller

    @property
    def inside(self) -> Location:
        """The line of the innermost frame of the program that is the user's; else of a library."""
        return self._users_line or self.decisive

    @property
    def _users_line(self) -> Location | None:
        user = next((position for position in self.frames if _is_users(_CODES[position[0]].co_filename)), None)
        if user is not None:
            return location_of(user)
        return None if isinstance(self.outer, Location) else self.outer._users_line

    @property
    def _caller(self) -> Location:
        return self.outer if isinstance(self.outer, Location) else self.outer._caller

    @property
    def decisive(self) -> Location:
        """The innermost line of the program, which a library may be a part of."""
        if self.frames:
            return location_of(self.frames[0])
        return self.outer if isinstance(self.outer, Location) else self.outer.decisive

    @property
    def lines(self) -> _Lines:
        """The program's lines, outermost first, as in a traceback: the user's, and those of torch's modules."""
        if self._lines is None:
            outer = "" if isinstance(self.outer, Location) else self.outer.lines.all
            self._lines = _lines_of(outer, self.frames)
        return self._lines


class _Scope:
    """A frame of the program and what runs inside of it; ``origins``: of all places in it that were asked for."""

    __slots__ = ("frame", "modules", "origins", "outer")

    def __init__(self, frame: FrameType | None, outer: Origin, modules: Modules) -> None:
        self.frame, self.outer, self.modules = frame, outer, modules
        self.origins: dict[Positions, Origin] = {}


class Scopes:
    """Finds where a program is, at a cost that does not grow with the depth of its calls.

    The frames outside a scope are read once, when it is entered.
    """

    def __init__(self, until: CodeType) -> None:
        self._until = until  # the code that calls the program
        self._base = Origin((), user_location(), {})
        self._scopes = [_Scope(None, self._base, self._base.modules)]

    @property
    def modules(self) -> Modules:
        """The modules whose ``forward`` runs."""
        return self._scopes[-1].modules

    def enter(self, frame: FrameType, modules: Modules) -> None:
        """Begin a scope: what a frame of the program runs, with the modules that run then."""
        assert frame.f_back is not None
        self._scopes.append(_Scope(frame, self.here(frame.f_back), modules))

    def leave(self) -> None:
        """End the innermost scope."""
        self._scopes.pop()

    def here(self, frame: FrameType | None = None) -> Origin:
        """The origin of a frame; by default of the caller's."""
        if frame is None:
            frame = sys._getframe(1)
        scope, until = self._scopes[-1], self._until
        outer, last = scope.outer, scope.frame
        positions: list[tuple[int, int]] = []
        while frame is not None:
            code = frame.f_code
            if _PROGRAMS[code.co_filename]:
                key = id(code)
                positions.append((key, frame.f_lasti))
                _CODES[key] = code
                if frame is last:
                    break
            elif code is until:  # the scope is another thread's, or there is no scope
                outer = self._base
                break
            frame = frame.f_back
        frames = tuple(positions)
        origin = scope.origins.get(frames)
        if origin is None or origin.outer is not outer:
            origin = scope.origins[frames] = Origin(frames, outer, scope.modules)
        return origin


# By identity: the hash of a code object is computed from all its parts each time.
_CODES: dict[int, CodeType] = {}


@cache
def location_of(position: tuple[int, int]) -> Location:
    """The line of the user's code at a code object and instruction."""
    code, instruction = _CODES[position[0]], position[1]
    lines = (line for start, stop, line in code.co_lines() if start <= instruction < stop and line is not None)
    return Location(code.co_filename, next(lines, code.co_firstlineno), code.co_name)


@cache
def _line_of_trace(position: tuple[int, int]) -> str:
    line = location_of(position)
    return f'  File "{line.file}", line {line.line}, in {line.function}\n    {line.source}\n'


@lru_cache(maxsize=1 << 12)  # another capture of the program asks for the same
def _lines_of(outer: str, frames: Positions) -> _Lines:
    """The lines of a scope, with those outside of it before them."""
    lines = outer + "".join(map(_line_of_trace, reversed(frames)))
    return _Lines(lines, lines.rstrip())


def line_in(trace: str | None) -> str | None:
    r"""The innermost line of the user's in the stack trace of a node, as :class:`Location` writes it; None without one.

    >>> line_in('  File "model.py", line 7, in forward\n    return x.sum()')
    'model.py:7 in forward: return x.sum()'
    """
    entries = _ENTRY.findall(trace or "")
    users = [entry for entry in entries if _is_users(entry[0])] or entries
    if not users:
        return None
    file, line, function, source = users[-1]
    return f"{file}:{line} in {function}" + (f": {source.strip()}" if source.strip() else "")


def line_of_trace(trace: str | None) -> str:
    """The same; "unknown" in place of None."""
    return line_in(trace) or "unknown"


def decisive_line(error: BaseException) -> str:
    """The innermost line of the user's code, or of the libraries that it is written with, in an error's traceback."""
    decisive = "unknown"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _PROGRAMS[frame.f_code.co_filename]:
            decisive = str(Location(frame.f_code.co_filename, line, frame.f_code.co_name))
    return decisive


def is_of_program(code: CodeType) -> bool:
    """Whether code is the user's, or of the libraries that programs are written with."""
    return _PROGRAMS[code.co_filename]


def raised_by_program(error: BaseException) -> bool:
    """Whether an error was raised by the program itself, in the user's code or in that of the libraries."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _PROGRAMS[frames[-1].f_code.co_filename]


@cache
def _is_users(file: str) -> bool:
    """Whether code is neither torch's nor ours, nor of Python's modules that run functions of others."""
    return not file.startswith((_OWN, _TORCH, _UNNAMED, *_GENERATED, *_RUNNERS))


class _Programs(dict[str, bool]):
    """By file: whether code is the user's, or of a part of torch that programs are written with."""

    def __missing__(self, file: str) -> bool:
        users = not file.startswith((_OWN, *_GENERATED)) and (
            not file.startswith(_TORCH) or file.startswith(_LIBRARIES)
        )
        self[file] = users
        return users


_PROGRAMS = _Programs()  # a dict, as each frame of each op is looked up


T = TypeVar("T")


def with_room_for_frames(run: Callable[[], T]) -> T:
    """Call a function with room for some thousand frames of Python in one piece of memory; it costs about 10 us.

    CPython keeps frames in chunks of 16 KiB. A loop whose calls cross the end of a chunk maps and unmaps memory each
    time: from an unlucky depth of the stack, a capture took half as long again.
    """
    return run()


# A frame that is larger than a chunk gets one of its own, of a power of two. This frame takes half of 1 MiB, in slots
# of 8 bytes; the other half is for the frames that follow.
with_room_for_frames.__code__ = with_room_for_frames.__code__.replace(co_stacksize=1 << 16)
