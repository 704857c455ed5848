"""The state of a program while it runs: substitutes replace its tensors, and each change of a container is seen.

Takes a walk over objects, and substitutes for tensors. Returns the containers that the program has changed so far, with
their contents when it began. Guarantees that everything is restored at the end, also where the program raises.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import ne
from typing import Any

from functionalize._torch.dicts import dict_version
from functionalize.python_state.containers import (
    Container,
    SetItems,
    assign,
    copy_of,
    entry,
    identity,
    unchanged,
    write,
)
from functionalize.python_state.slots import Slot
from functionalize.python_state.traversal_rules import behind, key_behind
from functionalize.python_state.walk import StateWalk
from functionalize.uninterrupted import uninterrupted

_WEAK: Mapping[type, Any] = {weakref.ref: weakref.ref, **dict.fromkeys(weakref.ProxyTypes, weakref.proxy)}


@dataclass(frozen=True, eq=False)
class ChangedContainer:
    """A container whose content the program has changed."""

    number: int  # on the walk
    container: Container
    path: str
    before: Any  # a copy of what it held


@dataclass(frozen=True, eq=False)
class _Beginning:
    """The contents of containers when the program began; of plain dicts, Python counts the writes."""

    contents: Sequence[Any] = ()  # a copy of what each container held
    dicts: Mapping[int, dict[Any, Any]] = field(default_factory=dict)  # the plain dicts, by number
    versions: Sequence[Any] = ()  # of the dicts
    empty: Mapping[int, set[Any]] = field(default_factory=dict)  # the plain sets that held nothing
    others: Sequence[int] = ()  # the numbers of the other containers

    @classmethod
    def of(cls, containers: Sequence[Container]) -> _Beginning:
        """What containers hold now."""
        contents, dicts, empty, others = list[Any](), dict[int, dict[Any, Any]](), dict[int, set[Any]](), list[int]()
        for number, container in enumerate(containers):
            if type(container) is dict:
                dicts[number] = container
                contents.append(container.copy())
            elif type(container) is SetItems and type(container.members) is set and not container.members:
                empty[number] = container.members
                contents.append([])
            else:
                others.append(number)
                contents.append(copy_of(container))
        return cls(contents, dicts, [*map(dict_version, dicts.values())], empty, others)

    def written(self) -> Iterator[int]:
        """The numbers of the containers that may hold something else by now."""
        yield from self.others
        yield from (number for number, members in self.empty.items() if members)
        now = [*map(dict_version, self.dicts.values())]
        if now != self.versions:
            yield from itertools.compress(self.dicts, map(ne, now, self.versions))


class WatchedState:
    """The objects of one walk, while a program runs."""

    def __init__(self, walk: StateWalk) -> None:
        self.walk = walk
        self._beginning = _Beginning()

    @contextlib.contextmanager
    def substituted(self, substitutes: Mapping[int, Any]) -> Iterator[None]:
        """Put substitutes in the tensors' places, by the tensors' identities; restore everything at the end."""
        walk = self.walk
        slots = [slot for slot in walk.tensors if type(slot.source.container) is not SetItems]
        entries = [(slot.container, slot.key, entry(slot.container, slot.key)) for slot in [*slots, *walk.weak]]
        keyed_by_tensor = [(container, copy_of(container)) for container in walk.keyed_by_tensor]
        places = (*walk.leaves, *walk.entered) if keyed_by_tensor else ()
        keys = {id(key): _key_of_substitute(key, substitutes) for _, content in keyed_by_tensor for key in content}
        rekeyed = [(slot, slot.key) for slot in places if id(slot.key) in keys]
        try:
            _place(slots, substitutes)
            for container, content in keyed_by_tensor:
                new = [keys[id(key)] for key in content]
                mapping = isinstance(content, dict)
                assign(container, dict(zip(new, copy_of(container).values(), strict=True)) if mapping else new)
            for slot, key in rekeyed:
                slot.key = keys[id(key)]
            for slot in walk.weak:
                tensor: Any = behind(slot.get())
                slot.set(_WEAK[type(slot.get())](substitutes.get(id(tensor), tensor)))
            self.begin()
            yield
        finally:

            def put_back() -> None:
                for slot, key in rekeyed:
                    slot.key = key
                for change in self.changed:
                    assign(change.container, change.before)
                for container, content in keyed_by_tensor:
                    assign(container, content)
                for container, key, value in entries:
                    write(container, key, value)

            uninterrupted(put_back)
            self._beginning = _Beginning()

    def begin(self) -> None:
        """Take the present contents of the containers as those that the program finds."""
        self._beginning = _Beginning.of([source.container for source in self.walk.containers.values()])

    def watch_late(self, container: Container, path: str, before: Any) -> None:
        """Watch a container that was not watched from the beginning, when its content was ``before``."""
        self.walk.watch(container, path)
        now = self._beginning
        self._beginning = replace(now, contents=(*now.contents, before), others=(*now.others, len(now.contents)))

    def content(self, container: Container) -> Any:
        """The content of a container when the program began; None for a container that was not walked."""
        wanted, containers = identity(container), self.walk.containers.values()
        number = next((n for n, source in enumerate(containers) if identity(source.container) == wanted), None)
        return None if number is None else self.begun[number]

    @property
    def begun(self) -> Sequence[Any]:
        """The contents of the containers, in their order, when the program began."""
        return self._beginning.contents

    @property
    def changed(self) -> list[ChangedContainer]:
        """The containers whose content the program has changed so far."""
        beginning, sources = self._beginning, [*self.walk.containers.values()]
        return [
            ChangedContainer(number, sources[number].container, sources[number].path, beginning.contents[number])
            for number in sorted(beginning.written())
            if not unchanged(sources[number].container, beginning.contents[number])
        ]


def _place(slots: Iterable[Slot], substitutes: Mapping[int, Any]) -> None:
    for slot in slots:
        value = slot.get()
        slot.set(substitutes.get(id(value), value))  # a tensor that arguments share with state was replaced there


def _key_of_substitute(key: Any, substitutes: Mapping[int, Any]) -> Any:
    """The key for a key's substitute: the substitute, or a weak reference to it; else the key itself."""
    substitute = substitutes.get(id(key_behind(key)))
    if substitute is None:
        return key
    return type(key)(substitute) if isinstance(key, weakref.ReferenceType) else substitute
