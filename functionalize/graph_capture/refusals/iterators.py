"""Iterators that a program reaches: what takes something out of one is refused, as a call could not do so.

While the program runs, others stand for them, which refuse whatever they are asked for. An iterator that is merely held
is as it was.

Invariant: after the run each is in its place, and has all that it had. Limits: iterators of classes that are walked, as
they keep what comes next in attributes, are not refused; neither are files, as programs write to them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from functionalize.errors import UnsupportedProgramError
from functionalize.python_state.containers import Variable, entry, read, write
from functionalize.python_state.slots import Slot
from functionalize.python_state.traversal_rules import is_entered
from functionalize.python_state.walk import StateWalk
from functionalize.refusals.python_objects import ITERATOR
from functionalize.uninterrupted import uninterrupted


def is_iterator(value: Any) -> bool:
    """Whether a value, of a class that is not walked, knows by itself what comes next."""
    iterator_class = type(value)  # other substitutes are not asked for their class
    if iterator_class in weakref.ProxyTypes:  # which have the methods of all objects
        return False
    return (
        issubclass(iterator_class, Iterator) and not is_entered(iterator_class) and not hasattr(iterator_class, "write")
    )


def refusal(value: Any, what: str) -> UnsupportedProgramError:
    """Why a program cannot use an iterator."""
    return ITERATOR.error(object=what, kind=type(value).__name__)


class Substitute:
    """What a program finds where an iterator is."""

    __slots__ = ("_of", "_refused", "_what")

    def __init__(self, of: Any, slot: Slot, place: str, refused: list[Exception]) -> None:
        place = "variable" if isinstance(slot.container, Variable) else f"{place} or item"
        self._of, self._what, self._refused = of, f"the {place} `{slot.path}` of the program", refused

    @property
    def __class__(self) -> Any:
        return type(self._of)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        self._refused.append(refusal(self._of, self._what))
        raise self._refused[-1]

    def __iter__(self) -> Substitute:
        return self

    def __next__(self) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse()

    def refused_as(self, path: str) -> UnsupportedProgramError:
        """Why a program cannot give it, or keep it elsewhere."""
        return refusal(self._of, f"{path}, which was {self._what},")


@contextlib.contextmanager
def iterators_kept(state: StateWalk, arguments: StateWalk) -> Iterator[None]:
    """Around a program's run; ``state``, ``arguments``: the objects that it reaches.

    Raises:
        UnsupportedProgramError: it takes something out of an iterator, whoever catches that inside of it.
    """
    refused = list[Exception]()
    places = [("attribute", slot) for slot in state.constants] + [("argument", slot) for slot in arguments.constants]
    entries = list[tuple[Slot, Any, Any]]()  # what was there, a tuple perhaps, and what is there instead
    for place, slot in places:
        if is_iterator(slot.found()):
            before = entry(slot.container, slot.key)
            slot.set(Substitute(slot.get(), slot, place, refused))
            entries.append((slot, before, entry(slot.container, slot.key)))
    try:
        yield
    finally:

        def put_back() -> None:
            for slot, before, placed in reversed(entries):
                if read(slot.container, slot.key) is placed:  # else the program put something else there
                    write(slot.container, slot.key, before)

        uninterrupted(put_back)
    if refused:
        raise refused[0]
