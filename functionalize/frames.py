"""Whose code called us, read off the stack.

Invariant: frames are only looked at, never held. Limits: code that is compiled from text counts as nobody's.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from functionalize._torch import ProxyTorchDispatchMode

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_TRACER = ProxyTorchDispatchMode.__init__.__code__.co_filename


def user_frames() -> Iterator[FrameType]:
    """The frames that are neither torch's nor ours, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_OWN, _TORCH, "<")):
            yield frame
        frame = frame.f_back


def user_frame() -> str:
    """``file:line in function: text`` of the innermost frame that is neither torch's nor ours."""
    for frame in user_frames():
        file, line, code = frame.f_code.co_filename, frame.f_lineno, frame.f_code
        return f"{file}:{line} in {code.co_name}: {linecache.getline(file, line).strip()}"
    return "unknown"


def traced_itself() -> bool:
    """Whether a tracer called the transformed function, and no code of the user between the two."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, _TORCH, "<")):
        if frame.f_code.co_filename == _TRACER:
            return True
        frame = frame.f_back
    return False
