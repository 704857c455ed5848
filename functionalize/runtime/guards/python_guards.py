"""The Python values that a program may decide by: attributes of modules, variables of functions, their containers.

Invariant: settings that are found unchanged hold what they did, as far as a program can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch

from functionalize.python_state.buffers import ARRAYS, held_by
from functionalize.python_state.containers import CodeOf, Variable, copy_of, place_of, read, unchanged
from functionalize.python_state.decompose import (
    ATTRIBUTES_OF_MODULES,
    HOOKS_OF_MODULES,
    Comparison,
    decomposition_of,
    entries_of,
    items_of,
)
from functionalize.python_state.slots import is_number
from functionalize.python_state.snapshot import (
    DEPTH,
    EMPTY,
    Content,
    EnteredObject,
    frozen,
    inside,
    same,
    without,
)
from functionalize.python_state.traversal_rules import PLAIN, keys_of
from functionalize.python_state.walk import StateWalk, joined

_OF_MODULES = ATTRIBUTES_OF_MODULES - {"training", *HOOKS_OF_MODULES}
LENGTH = object()  # in the place of a key: how many entries a container has
ORDER = object()  # likewise: its keys, one after the other
_NEVER_CHANGED = {Comparison.VALUE, Comparison.EQUALITY, Comparison.IDENTITY}  # inside, to a program


class _Same:
    """What is in another place, whatever that is."""

    def __init__(self, other: Setting) -> None:
        self._other = other

    @property
    def value(self) -> Any:
        return read(self._other.container, self._other.key)

    def follow(self, moved: Callable[[Any], Any]) -> _Same:
        """The same where that place has moved."""
        return _Same(self._other._replace(container=moved(self._other.container)))

    def __repr__(self) -> str:
        return f"the same as `{self._other.path}`"


def hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    """The hooks that a module runs."""
    for name in HOOKS_OF_MODULES:
        yield from module.__dict__[name].values()


def is_numbers(value: Any) -> bool:
    """Whether a value is a number, or a list of numbers."""
    items = value if type(value) is list else [value]
    return bool(items) and all(map(is_number, items))


def is_whole(key: Any) -> bool:
    """Whether a key is that of no entry, but tells of all of them."""
    return key is LENGTH or key is ORDER


class Setting(NamedTuple):
    """One value: what messages call it, where it is, and what it was."""

    owner: str  # the path of the module whose attribute it is; empty of others
    name: str
    container: Any  # a dict, a list, or the cell of a variable that a function closes over
    key: Any
    value: Any
    content: Any  # the value, frozen

    @property
    def path(self) -> str:
        """What messages call it."""
        return joined(self.owner, self.name)


# What its class does given one by one, three times as fast: a large model has thousands.
_setting: Callable[[tuple[Any, ...]], Setting] = partial(tuple.__new__, Setting)


class Settings:
    """The settings of one program."""

    def __init__(self, apart: Iterable[Any] = ()) -> None:
        """``apart``: objects that may sit in tuples, and whose content is compared by itself."""
        self.found: list[Setting] = []
        self.apart: Mapping[int, Any] = {id(one): EnteredObject(one) for one in apart}
        self._memo: dict[int, Any] = dict(self.apart)
        self._seen: set[tuple[int, Any]] = set()
        self._modules: set[int] = set()  # the identities of their attributes' dicts

    @staticmethod
    def read(container: Any, key: Any) -> Any:
        """A value as it is now."""
        return len(container) if key is LENGTH else keys_of(container) if key is ORDER else read(container, key)

    def add(self, path: str, container: Any, key: Any) -> None:
        """One more, as it is now."""
        container, key = place_of(container, key)
        if (id(container), key) not in self._seen and id(container) not in self._modules:
            self._seen.add((id(container), key))
            value = self.read(container, key)
            self.found.append(Setting("", path, container, key, value, frozen(value, self._memo)))

    def add_module(self, module: torch.nn.Module, path: str, entered: Container[int]) -> None:
        """What a module branches on: whether it trains, its hooks, its attributes but for the ``entered`` ones."""
        content, memo, found = module.__dict__, self._memo, self.found
        self._modules.add(id(content))
        for name, value in [item for item in content.items() if item[0] not in _OF_MODULES]:
            kind = type(value)
            if kind in PLAIN:
                found.append(_setting((path, name, content, name, value, value)))
            elif not (id(value) in entered or issubclass(kind, torch.Tensor)):
                empty = kind in EMPTY and not value  # the hooks of most modules
                held = EMPTY[kind] if empty else frozen(value, memo)
                found.append(_setting((path, name, content, name, value, held)))

    def add_code(self, path: str, owner: Any, names: Sequence[str]) -> None:
        """Attributes of a function, a class or an object that decide which code runs."""
        container = CodeOf(owner, names)
        for name in names:
            value = self.read(container, name)
            held = frozen(value, self._memo)
            self.found.append(_setting(("", joined(path, name), container, name, value, held)))

    def add_structure(self, state: StateWalk) -> None:
        """Which objects sit where, and how many entries containers have."""
        for slot in state.entered:
            container, key = place_of(slot.container, slot.key)
            value = self.read(container, key)
            content = frozen(value, self._memo) if slot.steps else EnteredObject(value)
            self.found.append(_setting(("", slot.path, container, key, value, content)))
        for container, path in state.containers.values():
            kind = type(container)
            if kind is not Variable:
                length = len(container)
                self.found.append(_setting(("", f"len({path or 'the module'})", container, LENGTH, length, length)))
        for container, path in state.ordered.values():
            keys = keys_of(container)
            self.found.append(_setting(("", f"list({path or 'the module'})", container, ORDER, keys, keys)))

    def tie(self, one: Setting, other: Setting) -> None:
        """Have a place hold what another one holds, instead of what it held."""
        self.found = [each._replace(content=_Same(other)) if each is one else each for each in self.found]

    def leave_out(self, steps: Mapping[tuple[int, Any], Sequence[tuple[int, ...]]]) -> None:
        """Have items of tuples not count; ``steps``: to them, by places: identities of containers, and keys."""
        self.found = [
            one._replace(content=reduce(without, steps.get((id(one.container), one.key), ()), one.content))
            for one in self.found
        ]

    def follow(self, moved: Callable[[Any], Any], objects: Mapping[int, Any]) -> None:
        """Have other containers where ``moved`` says so, and other objects, by the identities of those that were."""

        def now_of(content: Any) -> Any:
            if type(content) is _Same:
                return content.follow(moved)
            if type(content) is Content and content.items:
                return replace(content, items=tuple(map(now_of, content.items)))
            return (
                EnteredObject(objects.get(id(content.value), content.value))
                if type(content) is EnteredObject
                else content
            )

        for number, one in enumerate(self.found):
            container, value = moved(one.container), objects.get(id(one.value), one.value)
            if not isinstance(value, tuple) or is_whole(one.key):
                self.found[number] = one._replace(container=container, value=value, content=now_of(one.content))
            else:  # which may hold such
                now = self.read(container, one.key)
                self.found[number] = one._replace(container=container, value=now, content=now_of(one.content))
        apart = [objects.get(identity, one.value) for identity, one in self.apart.items()]
        self.apart = {id(one): EnteredObject(one) for one in apart}

    def without(self, changed: Set[tuple[int, Any]]) -> Settings:
        """Those that the program itself does not change; ``changed``: containers by identity, and keys."""
        if not changed:
            return self
        kept = Settings(one.value for one in self.apart.values())
        sized = {container for container, _ in changed}
        kept.found = [
            one._replace(content=EnteredObject(one.value)) if id(one.value) in sized else one
            for one in self.found
            if not ((id(one.container), one.key) in changed or (is_whole(one.key) and id(one.container) in sized))
        ]
        return kept

    def differing(self) -> tuple[Setting, Any] | None:
        """The first that is no longer what it was, and what it is now."""
        memo = dict(self.apart)
        for setting in self.found:
            now, content = self.read(setting.container, setting.key), setting.content
            if setting.key is ORDER:  # plain keys, in a tuple that does not outlive the memo
                differs = now != content
            elif type(content) in (EnteredObject, _Same):
                differs = now is not content.value
            else:
                differs = not same(frozen(now, memo), content)
            if differs:
                return setting, now
        return None


class SettingsCheck:
    """What tells, for sure, that settings are as they were when this was made. It may say no where they are."""

    def __init__(self, settings: Settings) -> None:
        self.entries: list[tuple[Any, Any, Any]] = []  # containers, keys, and the very objects that are to be there
        self.empty: list[Any] = []  # containers that are to be empty
        self.contents: list[tuple[Any, Any]] = []  # containers, and copies of what they are to hold
        self.arrays: list[tuple[Any, Any]] = []  # likewise
        seen = set(settings.apart)
        for setting in settings.found:
            value = settings.read(setting.container, setting.key)
            self.entries.append((setting.container, setting.key, value))
            if type(setting.content) not in (EnteredObject, _Same):
                self._enter(value, seen)

    def _enter(self, value: Any, seen: set[int], depth: int = DEPTH) -> None:
        """Remember what the containers that a value consists of hold now."""
        comparison = decomposition_of(type(value)).comparison
        if comparison in _NEVER_CHANGED or id(value) in seen or not depth:
            return
        seen.add(id(value))
        array = held_by(value, ARRAYS)
        if array is not None:
            self.arrays.append((value, array))
            return
        for container, _ in entries_of(value):
            if container:
                self.contents.append((container, copy_of(container)))
            else:
                self.empty.append(container)
        for item in items_of(value).values:
            self._enter(item, seen, inside(value, depth))

    def changed(self) -> bool:
        """Whether some container may hold something else."""
        contents = any(not unchanged(container, content) for container, content in self.contents)
        return contents or any(held_by(array, ARRAYS) != content for array, content in self.arrays)
