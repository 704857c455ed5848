"""The lock that lets one thread of a process capture at a time, and the count of captures in this thread.

A capture puts fake tensors into objects, and hooks on modules, which other threads see as well. No garbage is collected
meanwhile: what finalizers of other objects do, at a moment that no program chooses, would be recorded.

Invariant: a thread that holds another lock does not wait for this one. Limits: Dynamo compiles under its own lock.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

# Held during a capture, and while a call that did not pass at once is checked: its state may hold fake tensors.
CAPTURING = threading.RLock()


class _Captures(threading.local):
    """How many captures run a program in this thread, nested in each other."""

    running = 0


CAPTURES = _Captures()


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect no garbage inside, unless the program asks for it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()


def with_room_for_frames(run: Callable[[], T]) -> T:
    """Call a function with room for some thousand frames of Python in one piece of memory.

    CPython keeps frames in chunks of 16 KiB. A loop whose calls cross the end of a chunk maps and unmaps memory each
    time: from an unlucky depth of the stack, a capture took half as long again. A frame that is larger gets a chunk of
    its own, and leaves the rest to those that follow.
    """
    return run()


_STACK = 1 << 16  # slots of 8 bytes: half of a chunk of 1 MiB, whose other half is for the frames that follow
with_room_for_frames.__code__ = with_room_for_frames.__code__.replace(co_stacksize=_STACK)
