"""How far a capture is, on a terminal: ops so far, ops per second, the module that runs.

Invariant: in a pipe nothing is written. Limits: one capture at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

_AFTER = 0.5  # seconds: shorter captures show nothing
_EVERY = 0.1


def describe(ops: int, seconds: float, module: str) -> str:
    """One line about a capture that runs."""
    rate = f"{ops / seconds:,.0f}" if seconds > 0 else "-"
    return f"captured {ops:,} ops, {rate} ops/s{f', in {module}' if module else ''}"


def _module_of(node: Any) -> str:
    """The path of the innermost module that made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((path for path, _ in reversed(list(stack.values())) if path), "")


@contextlib.contextmanager
def shown(console: Console) -> Iterator[None]:
    """Show how captures inside get on, if the console is a terminal."""
    if not console.is_terminal:
        yield
        return
    from functionalize.graph_capture.observers import observing

    status, began = console.status("capturing"), time.monotonic()
    ops, due = 0, began + _AFTER

    def note(node: Any) -> None:
        nonlocal ops, due
        ops += 1
        now = time.monotonic()
        if now >= due:
            due = now + _EVERY
            status.update(describe(ops, now - began, _module_of(node)))
            status.start()  # does nothing where it was

    with observing(note):
        try:
            yield
        finally:
            status.stop()
