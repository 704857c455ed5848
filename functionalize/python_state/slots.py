"""Sources: how a value is found again, from a root that stays, through objects that the program may replace.

A :class:`Slot` is an entry of a container, and steps into the tuples that it holds. A :class:`ContainerSource` is a
root (the globals of a module, a closure cell), or one of the containers of an object. An :class:`ObjectSource` is that
object, with the slots that hold it. Reads and writes use the containers that were resolved last: a call that compares
guards resolves all sources first (:meth:`~functionalize.python_state.walk.StateWalk.resolve`), so a list that replaces
another list is read in its place.

Guarantees that reads and writes do what the program's own would do. Limits: modules, optimizers and sets of tensors are
identified by identity and never replaced; if an item of a tuple is replaced, a new tuple is made, without running code
of its class, and it keeps the attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize.python_state.containers import ABSENT, CodeOf, Container, entry, write
from functionalize.python_state.decompose import attributes_of, entries_of, native_class
from functionalize.python_state.traversal_rules import has_attributes


@dataclass(eq=False, repr=False)
class ObjectSource:
    """An object, by the slots that hold it. Whoever walked it owns its source: nothing else keeps the object."""

    value: Any  # as it was resolved last
    slots: list[Slot] = field(default_factory=list)  # in the order in which a walk met them
    containers: list[ContainerSource] = field(default_factory=list)  # of its values, then of its code
    is_fixed: bool = False  # whether no other object may take its place

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__}>"

    def resolve(self) -> Resolved | None:
        """If no slot holds the object any more, replace it by the object in the first slot, if of the same class.

        Returns the previous object and containers; None if it stays.
        """
        if self.is_fixed or not self.slots or any(slot.found() is self.value for slot in self.slots):
            return None
        now = self.slots[0].found()
        if type(now) is not type(self.value):
            return None
        before = Resolved(self, self.value, [held.container for held in self.containers])
        containers = [container for container, _ in entries_of(now)][: len(before.containers)]
        containers += (CodeOf(now, code.names) for code in before.containers[len(containers) :])
        if list(map(type, containers)) != list(map(type, before.containers)):
            return None
        Resolved(self, now, containers).apply()
        return before


@dataclass(frozen=True, eq=False)
class Resolved:
    """An object and its containers, to which a source was resolved."""

    source: ObjectSource
    value: Any
    containers: Sequence[Container]

    def apply(self) -> None:
        """Set the source to this object."""
        self.source.value = self.value
        for held, container in zip(self.source.containers, self.containers, strict=True):
            held.container = container


Reference = weakref.ReferenceType[ObjectSource]


class ContainerSource:
    """A container: a root, or one of an object's containers.

    The object's source has this one, which refers to it weakly: a cycle would keep the values of a walk that is over.
    """

    __slots__ = ("_owner", "container", "is_ordered", "path")

    def __init__(self, container: Container, path: str = "", owner: Reference | None = None) -> None:
        """``container``: as it was resolved last; ``owner``: None for a root."""
        self.container, self.path, self._owner = container, path, owner
        self.is_ordered = False  # whether a program may see the order of its entries

    @property
    def owner(self) -> ObjectSource | None:
        """The source of the object; None for a root, and once the walk is gone."""
        return None if self._owner is None else self._owner()


@dataclass(slots=True, eq=False)
class Slot:
    """The place of a value: an entry of a container, and steps into the tuples that it may hold."""

    source: ContainerSource
    key: Any
    path: str
    steps: tuple[int, ...] = ()
    held: bool = False  # whether it is below a module or an optimizer

    @property
    def container(self) -> Container:
        """The container, as it was resolved last."""
        return self.source.container

    @property
    def owner(self) -> Any:
        """The object that has this entry; None for an entry of a root."""
        owner = self.source.owner
        return None if owner is None else owner.value

    def get(self) -> Any:
        container = self.source.container
        value = container[self.key] if type(container) is dict else entry(container, self.key)  # most are
        for step in self.steps:
            value = value[step]
        return value

    def found(self) -> Any:
        """The value, or ``ABSENT`` if the slot no longer exists."""
        try:
            return self.get()
        except (LookupError, TypeError):
            return ABSENT

    def set(self, value: Any) -> None:
        container = self.source.container
        write(container, self.key, _with(entry(container, self.key), self.steps, value))


NUMBERS: dict[type, torch.dtype] = {float: torch.float64, int: torch.int64}  # the dtypes of tensors that hold numbers
_LIMIT = 2**63


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor holds unchanged."""
    return type(value) in NUMBERS and (type(value) is not int or -_LIMIT <= value < _LIMIT)


@dataclass(slots=True, eq=False)
class NumberSlot(Slot):
    """The place of a number that a graph takes as a tensor without dimensions."""

    kind: type = float
    count: int | None = None  # the length of the list or tuple that holds it

    def get(self) -> Any:
        value = Slot.get(self)
        if self.count is not None and len(entry(self.source.container, self.key)) != self.count:
            raise TypeError(f"the container of `{self.path}` has another length")
        if type(value) is not self.kind:
            raise TypeError(f"`{self.path}` is {value!r}, and was of type {self.kind.__name__}")
        if not is_number(value):
            raise TypeError(f"`{self.path}` is {value!r}, which does not fit into 64 bits")
        return torch.tensor(value, dtype=NUMBERS[self.kind], device="cpu")


def _with(whole: Any, steps: tuple[int, ...], value: Any) -> Any:
    """A nest of tuples, or a list of numbers, with one leaf replaced."""
    if not steps:
        return value
    items = list(whole)
    items[steps[0]] = _with(items[steps[0]], steps[1:], value)
    return items if type(whole) is list else _tuple_like(whole, items)


def _tuple_like(whole: tuple[Any, ...], items: list[Any]) -> Any:
    cls: Any = type(whole)
    made = native_class(cls).__new__(cls, items)
    if has_attributes(cls):
        object.__setattr__(made, "__dict__", attributes_of(whole))
    return made
