"""Refuses programs that change code while they run: functions get other code or defaults, objects another class.

An object that gets another ``__dict__`` is refused likewise: a call sets attributes, in the dict that the object has.

A graph records the code that ran, and a call does not change code: the next call would have to run the changed code.

Invariant: after a capture all code is as it was. Limits: the functions, methods and classes that the program is known
to reach.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

from functionalize.python_state.containers import ABSENT, CodeOf, read
from functionalize.python_state.decompose import dict_of
from functionalize.python_state.slots import ObjectSource
from functionalize.python_state.traversal_rules import CONTAINERS
from functionalize.python_state.walk import StateWalk, joined
from functionalize.refusals.python_objects import CODE_CHANGED
from functionalize.runtime.guards.python_guards import Code, PythonGuards
from functionalize.uninterrupted import uninterrupted

_BUILT_IN = frozenset(CONTAINERS)  # objects of these classes keep their class, and have no `__dict__`


@dataclass(frozen=True, eq=False)
class _Changed:
    """An attribute that the program has changed, and the value before."""

    path: str
    owner: Any
    key: str
    before: Any

    def restore(self, classes: Mapping[type, Mapping[str, Any]]) -> None:
        """``classes``: what each class had in its own dict."""
        owner = self.owner
        if not isinstance(owner, type):
            object.__setattr__(owner, self.key, self.before)
            return
        name = self.key.partition(".")[0]  # the rest leads into the value, as into a class method
        for cls, attributes in classes.items():
            before = attributes.get(name, ABSENT)
            if vars(cls).get(name, ABSENT) is not before:
                type.__delattr__(cls, name) if before is ABSENT else type.__setattr__(cls, name, before)


class _Body(NamedTuple):
    """An object that the program reaches, with its class and its ``__dict__`` when the program began."""

    source: ObjectSource
    cls: type
    attributes: dict[str, Any] | None

    @classmethod
    def of(cls, source: ObjectSource) -> _Body:
        return cls(source, type(source.value), dict_of(source.value))

    def changed(self) -> Iterator[_Changed]:
        """The class and the ``__dict__``, where they are others by now."""
        value = self.source.value
        path = self.source.containers[0].path if self.source.containers else ""
        if type(value) is not self.cls:
            yield _Changed(path, value, "__class__", self.cls)
        if self.attributes is not None and dict_of(value) is not self.attributes:
            yield _Changed(path, value, "__dict__", self.attributes)


@contextlib.contextmanager
def code_put_back(guards: PythonGuards, *states: StateWalk) -> Iterator[None]:
    """Run a program, with substitutes in its tensors' places, and restore code that it changes.

    ``states``: of the program, whose objects may get another class or ``__dict__``.

    Raises:
        UnsupportedProgramError: the program changed code.
    """
    sources = [source for state in states for source in state.objects if type(source.value) not in _BUILT_IN]
    bodies = [_Body.of(source) for source in sources if not isinstance(source.value, type)]
    code, changed = [each.now() for each in guards.code], list[_Changed]()
    owners = [each.owner.value for each in code if isinstance(each.owner.value, type)]
    bases = {base: None for owner in owners for base in type.__dict__["__mro__"].__get__(owner)}
    classes = {base: vars(base).copy() for base in bases}

    def put_back() -> None:
        for place in changed:
            place.restore(classes)

    try:
        yield
    finally:
        for before in code:
            now = before.now()
            if not all(map(is_, now.values, before.values)):
                changed += _changed(before, now)
        changed += (place for body in bodies for place in body.changed())
        uninterrupted(put_back)
    if changed:
        places = ", ".join(dict.fromkeys(f"`{joined(place.path, place.key)}`" for place in changed))
        raise CODE_CHANGED.error(places=places)


def _changed(before: Code, now: Code) -> Iterator[_Changed]:
    owner = before.owner.value
    for name, value, current in zip(before.names, before.values, now.values, strict=True):
        if current is not value and current is read(CodeOf(owner, ()), name):  # else it is computed at each read
            yield _Changed(before.path, owner, name, value)
