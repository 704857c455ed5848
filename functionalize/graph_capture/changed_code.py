"""Code that a program changes while it runs: functions get other code or defaults, objects another class. Refused.

A graph is of the code that ran, and a call changes none: the next one would have to run what this one left.

Invariant: after a capture all is what it was. Limits: the functions, methods and classes that the program is known to
come to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from functionalize.errors import UnsupportedProgramError
from functionalize.runtime.containers import ABSENT, CodeOf, read
from functionalize.runtime.settings import Setting, Settings

_SPECIAL = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__class__"})  # in no dict of the object's


class _Place(NamedTuple):
    """An attribute, and what was there: by each object that may hold it, of a class those that it inherits from."""

    setting: Setting
    value: Any
    holders: tuple[tuple[Any, Any], ...]


@contextlib.contextmanager
def code_put_back(settings: Settings) -> Iterator[None]:
    """Around a program's run, in which stand-ins are where tensors were.

    Raises:
        UnsupportedProgramError: the program changed code.
    """
    places = [_place(one) for one in settings.found if type(one.container) is CodeOf]
    changed = list[str]()
    try:
        yield
    finally:
        for place in places:
            container, key = place.setting.container, place.setting.key
            now = read(container, key)
            if now is not place.value and now is read(container, key):  # else it is made for who asks
                changed.append(f"`{place.setting.path}`")
                _restore(key.rpartition(".")[2], place.holders)
    if changed:
        raise UnsupportedProgramError(
            f"the program changes {', '.join(changed)}",
            why="that decides which code runs, and a captured program is the code that ran",
            hint="change it outside of what is captured, or choose by an attribute (`if self.ready: ...`)",
        )


def _place(setting: Setting) -> _Place:
    container = setting.container
    parent, _, name = setting.key.rpartition(".")
    owner = read(container, parent) if parent else container.owner
    if name in _SPECIAL:
        return _Place(setting, read(container, setting.key), ((owner, getattr(owner, name, ABSENT)),))
    holders = type.__dict__["__mro__"].__get__(owner) if isinstance(owner, type) else (owner,)
    held = tuple((one, vars(one).get(name, ABSENT)) for one in holders if hasattr(one, "__dict__"))
    return _Place(setting, read(container, setting.key), held)


def _restore(name: str, holders: tuple[tuple[Any, Any], ...]) -> None:
    for holder, value in holders:
        if name in _SPECIAL:
            object.__setattr__(holder, name, value)
        elif vars(holder).get(name, ABSENT) is not value:
            write = type.__setattr__ if isinstance(holder, type) else object.__setattr__
            remove = type.__delattr__ if isinstance(holder, type) else object.__delattr__
            remove(holder, name) if value is ABSENT else write(holder, name, value)
