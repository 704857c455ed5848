"""Code that a program changes while it runs: functions get other code or defaults, objects another class. Refused.

A graph is of the code that ran, and a call changes none: the next call would have to run what this one left.

Invariant: after a capture all is what it was. Limits: the functions, methods and classes that the program is known to
come to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from functionalize.python_state.containers import ABSENT, CodeOf, read
from functionalize.refusals.python_objects import CODE_CHANGED
from functionalize.runtime.guards.python_guards import PythonGuard, PythonGuards
from functionalize.uninterrupted import uninterrupted

_SPECIAL = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__class__"})  # in no dict of the object's


class _Place(NamedTuple):
    """An attribute, and what was there: by each object that may hold it, of a class those that it inherits from."""

    guard: PythonGuard
    value: Any
    holders: tuple[tuple[Any, Any], ...]


@contextlib.contextmanager
def code_put_back(guards: PythonGuards) -> Iterator[None]:
    """Around a program's run, in which substitutes are where tensors were.

    Raises:
        UnsupportedProgramError: the program changed code.
    """
    places = [_place(guard) for guard in guards.rows if type(guard.container) is CodeOf]
    changed = list[_Place]()
    try:
        yield
    finally:
        changed += filter(_is_changed, places)
        uninterrupted(functools.partial(_restore, changed))
    if changed:
        raise CODE_CHANGED.error(places=", ".join(f"`{place.guard.path}`" for place in changed))


def _place(guard: PythonGuard) -> _Place:
    owner, name = guard.container.owner, _name(guard)
    if name in _SPECIAL:
        return _Place(guard, read(guard.container, guard.key), ((owner, getattr(owner, name, ABSENT)),))
    holders = type.__dict__["__mro__"].__get__(owner) if isinstance(owner, type) else (owner,)
    held = tuple((holder, vars(holder).get(name, ABSENT)) for holder in holders if hasattr(holder, "__dict__"))
    return _Place(guard, read(guard.container, guard.key), held)


def _name(guard: PythonGuard) -> str:
    """The attribute of the owner's; what follows leads into what it holds, as into a class method."""
    name: str = guard.key.partition(".")[0]
    return name


def _is_changed(place: _Place) -> bool:
    now = read(place.guard.container, place.guard.key)
    is_computed = now is not read(place.guard.container, place.guard.key)  # for whoever asks
    return now is not place.value and not is_computed


def _restore(places: Sequence[_Place]) -> None:
    for place in places:
        for holder, value in place.holders:
            _write(holder, _name(place.guard), value)


def _write(holder: Any, name: str, value: Any) -> None:
    if name in _SPECIAL:
        object.__setattr__(holder, name, value)
    elif vars(holder).get(name, ABSENT) is not value:
        base = type if isinstance(holder, type) else object
        base.__delattr__(holder, name) if value is ABSENT else base.__setattr__(holder, name, value)
