"""Guards on Python values: attributes of modules, variables of functions, containers, and objects that a call changes.

Invariant: values that pass are the same to a program as those of the capture. Limits: those of ``frozen``; the fast
lines compare objects by identity.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial, reduce
from itertools import starmap
from operator import is_
from typing import Any, NamedTuple

import torch

from functionalize.errors import InputMismatchError, NumberMismatchError, StateMismatchError
from functionalize.python_state.buffers import ARRAYS, held_by
from functionalize.python_state.containers import (
    CodeOf,
    SetItems,
    Variable,
    cell_content,
    code_now,
    copy_of,
    place_of,
    read,
    unchanged,
)
from functionalize.python_state.decompose import (
    ATTRIBUTES_OF_MODULES,
    HOOKS_OF_MODULES,
    Comparison,
    decomposition_of,
    entries_of,
    hooks_in,
    items_of,
)
from functionalize.python_state.reconstruct import TensorRef
from functionalize.python_state.slots import ContainerSource, ObjectSource, Slot, is_number
from functionalize.python_state.snapshot import (
    DEPTH,
    EMPTY,
    Content,
    frozen,
    holds_the_same,
    inside,
    same,
    without,
)
from functionalize.python_state.traversal_rules import PLAIN, is_constant, key_behind, keys_of
from functionalize.python_state.walk import StateWalk, joined
from functionalize.runtime.guards.compiled import FunctionWriter
from functionalize.runtime.guards.guard import WHEN, CallInputs, FastCode, Guard, GuardKind, mismatch, words
from functionalize.runtime.metadata import OutputAlias, ProgramMetadata
from functionalize.runtime.outputs.side_effects import SideEffect

_OF_MODULES = ATTRIBUTES_OF_MODULES.difference(("training", *HOOKS_OF_MODULES))
_ASSIGNABLE = 1 << 9  # the flag of classes that a program can give an object instead of its own
LENGTH = object()  # in the place of a key: how many entries a container has
ORDER = object()  # likewise: its keys, in order
_NEVER_CHANGED = {Comparison.VALUE, Comparison.EQUALITY, Comparison.IDENTITY}  # to a program, these never change inside
_WRAPPERS = ("torch.distributed.", "torch.nn.parallel.")  # of models: what they keep changes with each run of the model
_EMPTY_IS_FALSE = (dict, OrderedDict, list)  # `not container` takes a third of the time of `len`
_CHANGES_IT = (
    "the program changes it, and supports only the value from the capture: restore that value, or capture again"
)


class Code(NamedTuple):
    """What decides which code runs: attributes of a function or a class, or the class of an object."""

    path: str
    owner: ObjectSource
    names: tuple[str, ...]
    values: tuple[Any, ...]  # of the attributes

    @classmethod
    def of(cls, path: str, value: Any, names: tuple[str, ...]) -> Code:
        """Attributes of a function or a class, as they are now."""
        return cls(path, ObjectSource(value), names, code_now(value, names))

    def now(self) -> Code:
        """The same attributes, as they are now."""
        return Code(self.path, self.owner, self.names, code_now(self.owner.value, self.names))

    def guards(self, memo: dict[int, Any]) -> Iterator[PythonGuard]:
        """Guards on them; ``memo``: of :func:`frozen`."""
        path, owner, names, values = self
        source = ContainerSource(CodeOf(owner.value, names), path, weakref.ref(owner))
        owner.containers.append(source)
        for name, value in zip(names, values, strict=True):
            yield _guard(("", joined(path, name), source, name, value, frozen(value, memo)))


class _Same:
    """The value of another guard, whatever it is."""

    def __init__(self, other: PythonGuard) -> None:
        self._other = other

    @property
    def value(self) -> Any:
        return read(self._other.container, self._other.key)

    def __repr__(self) -> str:
        return f"the same as `{self._other.path}`"


def is_numbers(value: Any) -> bool:
    """Whether a value is a number, or a list of numbers."""
    items = value if type(value) is list else [value]
    return bool(items) and all(map(is_number, items))


def is_whole(key: Any) -> bool:
    """Whether a key stands for all entries of a container, instead of one."""
    return key is LENGTH or key is ORDER


class PythonGuard(NamedTuple):
    """One value: its name in messages, where it is, and what it was at the capture."""

    owner: str  # the path of the module whose attribute it is, or empty
    name: str
    source: ContainerSource  # of a dict, a list, or the cell of a closure variable
    key: Any
    value: Any
    content: Any  # the value, frozen; or the source of an object that has guards of its own

    @property
    def container(self) -> Any:
        """The container, as it was resolved last."""
        return self.source.container

    @property
    def path(self) -> str:
        """Its name in messages."""
        return joined(self.owner, self.name)

    @property
    def is_known_by_identity(self) -> bool:
        """Whether it must be a certain object, whatever that holds."""
        return type(self.content) in (ObjectSource, _Same)

    def now(self) -> Any:
        """The value now."""
        return PythonGuards.read(self.container, self.key)

    def differs(self, now: Any, memo: dict[int, Any]) -> bool:
        """Whether the value now is another one to a program; ``memo``: of :func:`frozen`."""
        if self.key is ORDER:  # plain keys, in a tuple that does not outlive the memo
            return bool(now != self.content)
        if self.is_known_by_identity:
            return now is not self.content.value
        return not same(frozen(now, memo), self.content)

    def has_changed_inside(self, memo: dict[int, Any]) -> bool:
        """Whether the place holds the same value, and this holds something else; ``memo``: of :func:`frozen`."""
        if type(self.content) is not Content or holds_the_same(self.value, self.content):
            return False
        return self.now() is self.value and not same(frozen(self.value, memo), self.content)

    def failure(self, now: Any) -> InputMismatchError:
        """The error for another value."""
        numbers = self.key is not LENGTH and is_numbers(now) and is_numbers(self.value)
        error = partial(NumberMismatchError, key=self.key) if numbers else self._state_error(now)
        return mismatch(f"`{self.path}`", now, self.content, error, containers=[self.container])

    def _state_error(self, now: Any) -> Callable[..., StateMismatchError]:
        is_reordered = self.key is ORDER and set(now) == set(self.content)
        owner = self.source.owner
        is_of_wrapper = owner is not None and str(type(owner.value).__module__).startswith(_WRAPPERS)
        return partial(StateMismatchError, is_option=not (is_reordered or is_of_wrapper))


# Takes a tuple of all fields, and is three times as fast as the class: a large model has thousands of guards.
_guard: Callable[[tuple[Any, ...]], PythonGuard] = partial(tuple.__new__, PythonGuard)


class _Module(NamedTuple):
    """A module, as the capture met it."""

    path: str
    source: ContainerSource  # of its `__dict__`
    content: dict[str, Any]  # a copy of that
    entered: Container[int]  # the identities of objects and containers that have guards of their own
    rows: dict[str, PythonGuard]  # of its own attributes that are not constants

    def guards(self) -> Iterator[PythonGuard]:
        """Guards on whether it trains, its hooks, and its own attributes."""
        path, source, rows = self.path, self.source, self.rows
        for name, value in self.content.items():
            if name in _OF_MODULES:
                continue
            if is_constant(value):
                yield _guard((path, name, source, name, value, frozen(value, {})))
            elif name in rows:
                yield rows[name]
            elif name in HOOKS_OF_MODULES and id(value) not in self.entered:
                was_empty = type(value) in EMPTY  # others are entered
                content = EMPTY[type(value)] if was_empty else frozen(value, {})
                yield _guard((path, name, source, name, value, content))


def _of_whole(call: str, key: object, source: ContainerSource, value: Any) -> PythonGuard:
    """The guard on what the call of a function says of a container: its length, or its keys."""
    return _guard(("", f"{call}({source.path or 'the module'})", source, key, value, value))


def _classes_of(state: StateWalk) -> Iterator[Code]:
    """The classes of objects to which a program can give another one."""
    for source in state.objects:
        value = source.value
        if type(value).__flags__ & _ASSIGNABLE and not isinstance(value, type):
            path = state.modules.get(id(value)) or (source.slots[-1].path if source.slots else "")
            yield Code(path, source, ("__class__",), (value.__class__,))


class PythonGuards(GuardKind):
    """The guards of one program on Python values; the capture adds them, without values that become inputs."""

    def __init__(self, in_tuples: Sequence[ObjectSource] = ()) -> None:
        """``in_tuples``: objects in tuples, and dicts of defaults, whose content has guards of its own."""
        self.code: Sequence[Code] = ()  # of functions and classes
        self._rows: list[PythonGuard] = []
        self._later: list[Callable[[], Iterable[PythonGuard]]] | None = []  # give the rows; None once these are made
        self._in_tuples = in_tuples
        self._memo = self.memo()
        self._seen: set[tuple[int, Any]] = set()
        self._modules: dict[int, _Module] = {}  # by the identities of their `__dict__`
        self._holding: list[PythonGuard] = []  # of values that hold others

    @property
    def rows(self) -> list[PythonGuard]:
        """All guards. Few captures need them: they are made when asked for, of what was taken before the run."""
        if self._later is not None:
            self._rows = [row for rows in self._later for row in rows()]
            self._later = None
        return self._rows

    @rows.setter
    def rows(self, rows: list[PythonGuard]) -> None:
        self._rows, self._later = rows, None

    def _add(self, rows: Callable[[], Iterable[PythonGuard]]) -> None:
        """Add guards that are made later."""
        assert self._later is not None
        self._later.append(rows)

    def memo(self) -> dict[int, Any]:
        """The memo for :func:`frozen`: the sources of objects in tuples, by identity as last resolved."""
        return {id(source.value): source for source in self._in_tuples}

    @staticmethod
    def read(container: Any, key: Any) -> Any:
        """The current value under a key."""
        return len(container) if key is LENGTH else keys_of(container) if key is ORDER else read(container, key)

    def add(self, slots: Iterable[Slot]) -> None:
        """Add guards on the current values of slots."""
        rows = list[PythonGuard]()
        for slot in slots:
            source, key = _place_of(slot)
            place = id(source.container), key
            if place in self._seen:
                continue
            self._seen.add(place)
            value, module = read(source.container, key), self._modules.get(place[0])
            if module is None:
                rows.append(self._row("", slot.path, source, key, value))
            else:
                module.rows[key] = self._row(module.path, key, module.source, key, value)
        self._add(lambda: rows)

    def _row(self, owner: str, name: str, source: ContainerSource, key: Any, value: Any) -> PythonGuard:
        if type(value) in PLAIN:
            return _guard((owner, name, source, key, value, value))
        row = _guard((owner, name, source, key, value, frozen(value, self._memo)))
        if not is_constant(value):
            self._holding.append(row)
        return row

    def add_module(self, path: str, attributes: ContainerSource, entered: Container[int]) -> None:
        """Add guards on a module: whether it trains, its hooks, its plain attributes; others are added as slots."""
        content = attributes.container
        module = self._modules[id(content)] = _Module(path, attributes, content.copy(), entered, {})
        self._add(module.guards)

    def add_code(self, code: Iterable[Code]) -> None:
        """Add guards on attributes of functions and classes that decide which code runs."""
        self.code = [*code]
        rows = [row for each in self.code for row in each.guards(self._memo)]
        self._holding += rows  # the defaults of functions
        self._add(lambda: rows)

    def add_structure(self, state: StateWalk) -> None:
        """Add guards on which objects are in which slots, their classes, lengths of containers, and orders of dicts."""
        rows = list[PythonGuard]()
        for slot, held in state.entered.items():
            source, key = _place_of(slot)
            if slot.steps:
                rows.append(self._row("", slot.path, source, key, read(source.container, key)))
            else:
                rows.append(_guard(("", slot.path, source, key, held.value, held)))
        self._add(lambda: rows)
        sized = [source for source in state.containers.values() if type(source.container) is not Variable]
        lengths = [(source, len(source.container)) for source in sized]
        self._add(lambda: starmap(partial(_of_whole, "len", LENGTH), lengths))
        ordered = [(source, keys_of(source.container)) for source in sized if source.is_ordered]
        self._add(lambda: starmap(partial(_of_whole, "list", ORDER), ordered))
        classes = [*_classes_of(state)]
        self._add(lambda: (row for each in classes for row in each.guards({})))

    def changed_inside(self) -> PythonGuard | None:
        """The first guard whose value has changed inside since it was taken, if any."""
        modules = self._modules.values()
        hooked = any(id(hooks) not in module.entered for module in modules for hooks in hooks_in(module.content))
        rows, memo = self._holding if self._later is not None and not hooked else self.rows, self.memo()
        is_changed = any(row.has_changed_inside(memo) for row in rows)
        return next((row for row in self.rows if row.has_changed_inside(memo)), None) if is_changed else None

    def tie(self, guard: PythonGuard, other: PythonGuard) -> None:
        """Have one guard expect the current value of another one, instead of its own from the capture."""
        self.rows = [each._replace(content=_Same(other)) if each is guard else each for each in self.rows]

    def leave_out(self, steps: Mapping[tuple[int, Any], Sequence[tuple[int, ...]]]) -> None:
        """Ignore items of tuples; ``steps``: to the items, by identity of the container and key."""
        self.rows = [
            row._replace(content=reduce(without, steps.get((id(row.source.container), row.key), ()), row.content))
            for row in self.rows
        ]

    def without(self, changed: Set[tuple[int, Any]]) -> PythonGuards:
        """The guards on values that the program does not change; ``changed``: containers by identity, and keys."""
        if not changed:
            return self
        kept = PythonGuards(self._in_tuples)
        sized = {container for container, _ in changed}
        kept.rows = [
            row._replace(content=ObjectSource(row.value))
            if id(row.value) in sized and not row.is_known_by_identity
            else row
            for row in self.rows
            if not (
                (id(row.source.container), row.key) in changed
                or (is_whole(row.key) and id(row.source.container) in sized)
            )
        ]
        return kept

    def compares(self, containers: Sequence[Any], key: Any) -> bool:
        """Whether a guard compares the value under a key in one of these containers."""
        same_place = (row for row in self.rows if any(row.source.container is container for container in containers))
        plain = type(key) in PLAIN  # keys of other classes would run the program's `__eq__`
        return any(row.key is key or (plain and type(row.key) is type(key) and row.key == key) for row in same_place)

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        memo = self.memo()
        for row in self.rows:
            now = row.now()
            if row.differs(now, memo):
                return row.failure(now)
        return None

    def write(self, code: FastCode) -> None:
        body, contents = code.body, _ContainerContents(self.memo())
        shown_empty, lines = set[int](), list[str]()
        for row in self.rows:
            value = row.now()
            lines.append(f"if {_differs(body, row.container, row.key, value)}: return None")
            shown_empty.add(id(_shown_empty(row.container, row.key, value)))
            if not row.is_known_by_identity:
                contents.add(value)
        body.attempt(lines, "LookupError", "AttributeError")
        for container in contents.empty:
            if id(container) not in shown_empty:
                body.refuse(body.name("empty", container))
        if not contents.is_empty:
            body.refuse("changed()", changed=contents.changed)

    def listed(self) -> Iterator[Guard]:
        return (Guard(f"`{row.path}`", "value", row.content) for row in self.rows)


class _ContainerContents:
    """The contents of the containers in some values, which are compared by identity."""

    def __init__(self, entered: Iterable[int]) -> None:
        """``entered``: the identities of objects that other guards compare."""
        self._seen = set(entered)
        self.empty: list[Any] = []  # containers that must be empty
        self._containers: list[tuple[Any, Any]] = []  # with copies of what they must hold
        self._arrays: list[tuple[Any, Any]] = []  # likewise

    @property
    def is_empty(self) -> bool:
        """Whether all containers are empty."""
        return not (self._containers or self._arrays)

    def add(self, value: Any, depth: int = DEPTH) -> None:
        """Record the contents of the containers in a value."""
        comparison = decomposition_of(type(value)).comparison
        if comparison in _NEVER_CHANGED or id(value) in self._seen or not depth:
            return
        self._seen.add(id(value))
        array = held_by(value, ARRAYS)
        if array is not None:
            self._arrays.append((value, array))
            return
        for container, _ in entries_of(value):
            if container:
                self._containers.append((container, copy_of(container)))
            else:
                self.empty.append(container)
        for item in items_of(value).values:
            self.add(item, inside(value, depth))

    def changed(self) -> bool:
        """Whether some container may hold something else by now."""
        contents = any(not unchanged(container, content) for container, content in self._containers)
        return contents or any(held_by(array, ARRAYS) != content for array, content in self._arrays)


def _shown_empty(container: Any, key: Any, value: Any) -> Any:
    """The container that is compared with `not container`, as it was empty; None for most guards."""
    if key is LENGTH and type(container) in _EMPTY_IS_FALSE and not value:
        return container
    named = type(key) is str and key in HOOKS_OF_MODULES
    return value if named and type(value) in _EMPTY_IS_FALSE and not value else None


def _differs(writer: FunctionWriter, container: Any, key: Any, value: Any) -> str:
    """The condition that an entry of a container is not the very object that it was."""
    if _shown_empty(container, key, value) is not None:
        # Hooks are read again, instead of held: to torch, all empty dicts of hooks are alike.
        return writer.name("container", container) if key is LENGTH else writer.entry(container, key)
    if key is LENGTH:
        return f"len({writer.name('container', container)}) != {value}"
    if key is ORDER:
        writer.names["keys_of"] = keys_of
        return f"{_keys(container).format(writer.name('container', container))} != {writer.name('keys', value)}"
    if type(container) is CodeOf and all(map(str.isidentifier, key.split("."))):
        now = f"{writer.name('owner', container.owner)}.{key}"
    elif isinstance(container, types.CellType):
        writer.names["content"] = cell_content
        now = f"content({writer.name('cell', container)})"
    else:
        now = writer.entry(container, key)
    literal = any(value is constant for constant in (True, False, None))
    return f"{now} is not {value if literal else writer.name('value', value)}"


def _keys(container: Any) -> str:
    """The fastest expression that reads the keys of a dict as ``keys_of`` does."""
    if all(map(is_, container, keys_of(container))):
        return "tuple({})"
    tensors = all(isinstance(key_behind(key), torch.Tensor) for key in container)
    return "tuple(map(id, {}))" if tensors else "keys_of({})"


class ChangedObjects(GuardKind):
    """Guards on the entries of Python objects that a program changes: a call must find the values of the capture."""

    def __init__(self, metadata: ProgramMetadata, state: StateWalk) -> None:
        self._metadata, self._state = metadata, state

    @property
    def is_empty(self) -> bool:
        return not self._metadata.side_effects

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        states = self._state, call.arguments.walk
        for effect in self._metadata.side_effects:
            container = effect.container_in(states)
            error = self._shape_failure(effect, container) or self._entry_failure(effect, container, states, call)
            if error is not None:
                return error
        return None

    def _shape_failure(self, effect: SideEffect, container: Any) -> StateMismatchError | None:
        if effect.length not in (None, len(container)):
            return StateMismatchError(
                f"`{effect.path}` has {len(container)} items, and had {effect.length} {WHEN}",
                hint=_CHANGES_IT,
                containers=[place_of(container, 0)[0]],
            )
        if not effect.is_in_order(container):
            said = f"`{effect.path}` has its keys in the order {tuple(container)}, and had {effect.order} {WHEN}"
            return StateMismatchError(said, hint=_CHANGES_IT, containers=[container])
        return None

    def _entry_failure(
        self, effect: SideEffect, container: Any, states: Sequence[StateWalk], call: CallInputs
    ) -> StateMismatchError | None:
        items = container if isinstance(container, SetItems) else ()  # in Python's order
        for name, before in effect.before.items():
            number = self._input_of(name) if isinstance(name, TensorRef) else None
            now = read(container, name if number is None else call.values[number])
            label = name if number is None else self._metadata.inputs[number].target
            if not any(before.is_found(value, states) for value in (now, *items)):
                shown, expected = before.shown(now, states, words)
                return StateMismatchError(
                    f"`{joined(effect.path, label)}` is {shown}, and was {expected} {WHEN}",
                    hint=_CHANGES_IT,
                    containers=[place_of(container, label)[0]],
                )
        return None

    def _input_of(self, name: TensorRef) -> int:
        alias: OutputAlias = self._metadata.outputs[name.number]
        assert alias.input is not None
        return alias.input


def changed_places(metadata: ProgramMetadata, state: StateWalk) -> set[tuple[int, Any]]:
    """The entries that a program changes, or whose tensors get other metadata: containers by identity, and keys."""
    places = [
        place_of(effect.container_in([state]), key)
        for effect in metadata.side_effects
        if effect.state == 0
        for key in (effect.before or (0,))
    ]
    moved = (metadata.inputs[write.input].slot for write in metadata.mutations if write.metadata or write.after)
    places += [place_of(slot.container, slot.key) for slot in moved if slot is not None]
    return {(id(container), key) for container, key in places}


def changed_containers(metadata: ProgramMetadata, state: StateWalk) -> set[int]:
    """The identities of containers that a program changes or replaces, or whose tensors get other metadata."""
    changed, inside = changed_places(metadata, state), set[ObjectSource]()
    if not changed:
        return set()

    def is_changed(slot: Slot) -> bool:
        container, key = place_of(slot.container, slot.key)
        return slot.source.owner in inside or (id(container), key) in changed

    inside.update(source for source in state.objects if any(map(is_changed, source.slots)))
    held = {id(held.container) for source in inside for held in source.containers}
    return {container for container, _ in changed} | held


def _place_of(slot: Slot) -> tuple[ContainerSource, Any]:
    """The container and key of a slot's value: for a variable of a function, its cell or the globals."""
    source = slot.source
    if type(source.container) is not Variable:
        return source, slot.key
    container, key = source.container.place
    return ContainerSource(container, slot.path), key
