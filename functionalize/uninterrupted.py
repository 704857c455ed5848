"""Runs cleanup to its end, even if the user interrupts it.

Invariant: the cleanup may be run again from its beginning. Limits: an interrupt before it begins.
"""

from __future__ import annotations

from collections.abc import Callable


def uninterrupted(undo: Callable[[], None]) -> None:
    """Run a function, again after each interrupt, until it ends.

    Raises:
        KeyboardInterrupt: the last interrupt, once the function has ended.

    Example:
        >>> uninterrupted([3].clear)
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            undo()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
