"""Refuses programs that change code while they run: functions get other code or defaults, objects another class.

A graph records the code that ran, and a call does not change code: the next call would have to run the changed code.

Invariant: after a capture all code is as it was. Limits: the functions, methods and classes that the program is known
to reach.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.python_state.containers import ABSENT, read
from functionalize.python_state.slots import ContainerSource
from functionalize.python_state.walk import joined
from functionalize.refusals.python_objects import CODE_CHANGED
from functionalize.runtime.guards.python_guards import PythonGuards
from functionalize.uninterrupted import uninterrupted

_bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__  # a class may have another `__mro__`


@dataclass(frozen=True, eq=False)
class _Changed:
    """An attribute that the program has changed, and the value before."""

    source: ContainerSource
    key: str
    before: Any

    def restore(self, classes: Mapping[type, Mapping[str, Any]]) -> None:
        """``classes``: what each class had in its own dict."""
        owner = self.source.container.owner
        if not isinstance(owner, type):
            object.__setattr__(owner, self.key, self.before)
            return
        name = self.key.partition(".")[0]  # the rest leads into the value, as into a class method
        for cls, attributes in classes.items():
            before = attributes.get(name, ABSENT)
            if vars(cls).get(name, ABSENT) is not before:
                type.__delattr__(cls, name) if before is ABSENT else type.__setattr__(cls, name, before)


@contextlib.contextmanager
def code_put_back(guards: PythonGuards) -> Iterator[None]:
    """Run a program, with substitutes in its tensors' places, and restore code that it changes.

    Raises:
        UnsupportedProgramError: the program changed code.
    """
    sources, changed = guards.code, list[_Changed]()
    values = [source.container.now() for source in sources]
    owners = [owner for source in sources if isinstance(owner := source.container.owner, type)]
    classes = {base: dict(vars(base)) for base in {base: None for owner in owners for base in _bases_of(owner)}}

    def put_back() -> None:
        for place in changed:
            place.restore(classes)

    try:
        yield
    finally:
        for source, before in zip(sources, values, strict=True):
            now = source.container.now()
            if not all(map(operator.is_, now, before)):
                changed += _changed(source, before, now)
        uninterrupted(put_back)
    if changed:
        places = ", ".join(f"`{joined(place.source.path, place.key)}`" for place in changed)
        raise CODE_CHANGED.error(places=places)


def _changed(source: ContainerSource, before: Sequence[Any], after: Sequence[Any]) -> list[_Changed]:
    code = source.container
    return [
        _Changed(source, name, value)
        for name, value, now in zip(code.names, before, after, strict=True)
        if now is not value and now is read(code, name)  # else it is computed at each read
    ]
