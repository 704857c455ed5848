"""Threads that a program starts: what they compute is not in the graph, so a capture refuses them.

Invariant: threads that others start are not affected. Limits: threads of libraries (a progress bar's) may start.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from functionalize.patches import Patch
from functionalize.python_state.ownership import is_own
from functionalize.refusals.python_objects import THREAD_STARTED

_STARTS = tuple(name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name))


def rows_for_threads() -> Iterator[Patch]:
    """Have the program raise `UnsupportedProgramError` where it starts a thread."""
    return (Patch(threading, name, _refusing) for name in _STARTS)


def _refusing(start: Callable[..., Any]) -> Callable[..., Any]:
    def started(run: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_of_program(getattr(run, "__self__", None)):
            raise THREAD_STARTED.error()
        return start(run, *args, **kwargs)

    return started


def _is_of_program(thread: Any) -> bool:
    """Whether the class of a thread is the program's own, or Python's, and not a library's."""
    module = type(thread).__module__
    return is_own(module) or module.partition(".")[0] in sys.stdlib_module_names
