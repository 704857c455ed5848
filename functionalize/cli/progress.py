"""How far a capture is, on a terminal: ops so far, ops per second, the module that runs.

Invariant: in a pipe nothing is written. Limits: one capture at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.status import Status

_AFTER = 0.5  # seconds: shorter captures show nothing
_EVERY = 0.1


class _Meter:
    """Told of each op that is captured; shows now and then how many there are."""

    def __init__(self, status: Status) -> None:
        self._status, self._shown = status, False
        self._began = self._last = time.monotonic()
        self.ops = 0

    def note(self, node: Any) -> None:
        self.ops += 1
        now = time.monotonic()
        if now - self._last < (_EVERY if self._shown else _AFTER):
            return
        self._last = now
        self._status.update(describe(self.ops, now - self._began, module_of(node)))
        if not self._shown:
            self._shown = True
            self._status.start()


def describe(ops: int, seconds: float, module: str) -> str:
    """One line about a capture that runs."""
    rate = f"{ops / seconds:,.0f}" if seconds > 0 else "-"
    return f"captured {ops:,} ops, {rate} ops/s{f', in {module}' if module else ''}"


def module_of(node: Any) -> str:
    """The path of the innermost module that made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values())) if path), "")


@contextlib.contextmanager
def shown(console: Console) -> Iterator[None]:
    """Show how captures inside get on, if the console is a terminal."""
    if not console.is_terminal:
        yield
        return
    from functionalize.graph_capture.provenance import observing

    status = console.status("capturing")
    with observing(_Meter(status).note):
        try:
            yield
        finally:
            status.stop()
