"""Whose code called us, read off the stack.

Invariant: frames are only looked at, never held. Limits: code that is compiled from text counts as nobody's.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from functionalize._torch import ProxyTorchDispatchMode

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = tuple(f"{_TORCH}/{part}/" for part in ("nn", "optim"))  # torch's code that programs are written with
_TRACER = ProxyTorchDispatchMode.__init__.__code__.co_filename


def user_frames() -> Iterator[FrameType]:
    """The frames that are neither torch's nor ours, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_OWN, _TORCH, "<")):
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
        return f"{self.file}:{self.line} in {self.function}: {linecache.getline(self.file, self.line).strip()}"


def user_location() -> Location:
    """The line of the innermost frame that is neither torch's nor ours."""
    for frame in user_frames():
        return Location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    return Location("unknown", 0, "")


def frames_below(code: CodeType) -> Iterator[FrameType]:
    """The frames that run inside of a call of ``code``, innermost first, but for ours and for those of torch's core."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        if _is_program(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def user_frame() -> str:
    """``file:line in function: text`` of the innermost frame that is neither torch's nor ours."""
    return str(user_location())


def decisive_line(error: BaseException) -> str:
    """The innermost line of the user's code, or of the libraries that it is written with, in an error's traceback."""
    found = "unknown"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_program(frame.f_code.co_filename):
            found = str(Location(frame.f_code.co_filename, line, frame.f_code.co_name))
    return found


def _is_program(file: str) -> bool:
    """Whether code is the user's, or a part of torch that programs are written with."""
    return not file.startswith((_OWN, "<")) and (not file.startswith(_TORCH) or file.startswith(_LIBRARIES))


def traced_itself() -> bool:
    """Whether a tracer called the transformed function, and no code of the user between the two."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _TORCH, "<")):
        if frame.f_code.co_filename == _TRACER:
            return True
        frame = frame.f_back
    return False
