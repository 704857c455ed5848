"""Iterators that a program reaches: taking an item out of one is refused, as a call could not do so.

While the program runs, substitutes replace them, which refuse every use. An iterator that is merely held is unchanged.

Invariant: after the run each iterator is in its place, and has all of its items. Limits: iterators of classes that are
walked are not refused, as their attributes hold what comes next; neither are files, as programs write to them.
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
    """Whether a value is an iterator that keeps its own position, in a class that is not walked."""
    iterator_class = type(value)  # not `__class__`, which substitutes answer for
    if iterator_class in weakref.ProxyTypes:  # these have the methods of all objects
        return False
    return (
        issubclass(iterator_class, Iterator) and not is_entered(iterator_class) and not hasattr(iterator_class, "write")
    )


def refusal(value: Any, what: str) -> UnsupportedProgramError:
    """Why a program cannot use an iterator."""
    return ITERATOR.error(object=what, kind=type(value).__name__)


class Substitute:
    """Replaces an iterator while a program runs."""

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
        """Why a program cannot hand it out, or keep it elsewhere."""
        return refusal(self._of, f"{path}, which was {self._what},")


@contextlib.contextmanager
def iterators_kept(state: StateWalk, arguments: StateWalk) -> Iterator[None]:
    """Run a program with substitutes for iterators; ``state``, ``arguments``: the objects that it reaches.

    Raises:
        UnsupportedProgramError: it takes an item out of an iterator, even where it catches the error.
    """
    refused = list[Exception]()
    places = [("attribute", slot) for slot in state.others] + [("argument", slot) for slot in arguments.others]
    entries = list[tuple[Slot, Any, Any]]()  # the value before, a tuple perhaps, and now
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
