"""The lock that lets one thread of a process capture at a time, and the count of captures in this thread.

A capture puts fake tensors into objects, and hooks on modules, which other threads see as well. No garbage is collected
meanwhile: what finalizers of other objects do, at a moment that no program chooses, would be recorded.

Invariant: a thread that holds another lock does not wait for this one. Limits: Dynamo compiles under its own lock.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

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
