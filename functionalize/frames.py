"""Room for the frames of a deep call.

CPython keeps frames in chunks of 16 KiB. A loop whose calls cross the end of a chunk maps and unmaps memory each time:
from an unlucky depth of the stack, a capture took half as long again.

Invariant: what a function returns and raises does not depend on it. Limits: CPython; each call costs about 10 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def with_room_for_frames(run: Callable[[], T]) -> T:
    """Call a function with room for some thousand frames of Python in one piece of memory."""
    return run()


# A frame that is larger than a chunk gets one of its own, of a power of two. This frame takes half of 1 MiB, in slots
# of 8 bytes; the other half is for the frames that follow.
with_room_for_frames.__code__ = with_room_for_frames.__code__.replace(co_stacksize=1 << 16)
