"""Who captures: one thread at a time in a process, and whether this thread does.

A capture puts fake tensors into objects, and hooks on modules, that other threads see as well.

Invariant: who holds another lock does not wait for this one. Limits: what Dynamo compiles runs below its own lock.
"""

from __future__ import annotations

import threading

# Held by who captures, and by who has to look twice at a call: one may find fake tensors of the other in its state.
CAPTURING = threading.RLock()


class _Captures(threading.local):
    """How many captures run a program in this thread, one inside of another."""

    running = 0


CAPTURES = _Captures()
