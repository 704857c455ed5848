"""The lock that lets one thread of a process capture at a time, and the count of captures in this thread.

A capture puts fake tensors into objects, and hooks on modules, which other threads see as well.

Invariant: a thread that holds another lock does not wait for this one. Limits: Dynamo compiles under its own lock.
"""

from __future__ import annotations

import threading

# Held during a capture, and while a call that did not pass at once is checked: its state may hold fake tensors.
CAPTURING = threading.RLock()


class _Captures(threading.local):
    """How many captures run a program in this thread, nested in each other."""

    running = 0


CAPTURES = _Captures()
