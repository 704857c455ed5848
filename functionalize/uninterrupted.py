"""What puts things back runs to its end, also where the user interrupts it.

Invariant: what is run so may be run again from its beginning. Limits: an interrupt that comes in before it begins.
"""

from __future__ import annotations

from collections.abc import Callable


def uninterrupted(undo: Callable[[], None]) -> None:
    """Run a function until it was not interrupted; it may be run several times.

    Raises:
        KeyboardInterrupt: the last one that came in meanwhile.

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
