"""Who is notified of each op that is captured: to show how a long capture gets on.

Invariant: where nobody observes, a capture pays nothing for it. Limits: an observer is notified of captures that begin
while it observes, in all threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch.fx import Node

Annotate = Callable[[Node], None]
_observers: list[Annotate] = []


@contextlib.contextmanager
def observing(observer: Annotate) -> Iterator[None]:
    """Tell a function of each node, once its module is noted."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def notify(annotate: Annotate) -> Annotate:
    """A function that annotates a node, and then notifies the observers."""
    if not _observers:
        return annotate
    observers = tuple(_observers)

    def noted(node: Node) -> None:
        annotate(node)
        for observer in observers:
            observer(node)

    return noted
