"""Refuses programs that change code while they run: functions get other code or defaults, objects another class.

A graph records the code that ran, and a call does not change code: the next call would have to run the changed code.

Invariant: after a capture all code is as it was. Limits: the functions, methods and classes that the program is known
to reach.
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

_SPECIAL = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__class__"})  # not in the object's own dict


class _Place(NamedTuple):
    """An attribute and its value in each object that may hold it; for a class, in its base classes as well."""

    guard: PythonGuard
    value: Any
    holders: tuple[tuple[Any, Any], ...]


@contextlib.contextmanager
def code_put_back(guards: PythonGuards) -> Iterator[None]:
    """Run a program, with substitutes in its tensors' places, and restore code that it changes.

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
    """The attribute of the owner; the rest of the key leads into its value, as into a class method."""
    name: str = guard.key.partition(".")[0]
    return name


def _is_changed(place: _Place) -> bool:
    now = read(place.guard.container, place.guard.key)
    is_computed = now is not read(place.guard.container, place.guard.key)  # at each read
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
