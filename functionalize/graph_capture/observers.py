"""Who wants to hear of each op that is captured: to show how a long capture gets on.

Invariant: where nobody listens, a capture pays nothing for it. Limits: a listener hears of captures that begin while it
listens, in all threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch.fx import Node

Annotate = Callable[[Node], None]
_listeners: list[Annotate] = []


@contextlib.contextmanager
def listening(listener: Annotate) -> Iterator[None]:
    """Tell a function of each node, once its module is noted."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def heard(annotate: Annotate) -> Annotate:
    """A function that annotates a node, and then tells those who listen."""
    if not _listeners:
        return annotate
    listeners = tuple(_listeners)

    def noted(node: Node) -> None:
        annotate(node)
        for listener in listeners:
            listener(node)

    return noted
