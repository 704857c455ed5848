"""Walks over Python objects, which find the tensors that a program reaches, and the slots that hold them.

Takes arguments, modules, optimizers, variables of functions. Gives slots of tensors, constants and objects, in the
order of keys, with the containers that hold them. Guarantees that objects that are built alike are walked alike: the
n-th tensor of one corresponds to the n-th tensor of the other. Limits:
:mod:`functionalize.python_state.traversal_rules` determines which objects are entered.
"""

from __future__ import annotations

import contextvars
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize._torch import modules_of
from functionalize.python_state.containers import (
    Container,
    SetItems,
    entry,
    per_class,
)
from functionalize.python_state.decompose import Entries, decomposition_of
from functionalize.python_state.refused_objects import module_refused, refused_base
from functionalize.python_state.slots import ContainerSource, ObjectSource, Slot
from functionalize.python_state.traversal_rules import (
    PLAIN,
    behind,
    has_attributes,
    is_constant,
    is_entered,
    key_behind,
)

# Exact types, which save `isinstance`: most values are of one of these.
TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_WEAK = (weakref.ref, *weakref.ProxyTypes)
LEAF_TYPES = TENSOR_TYPES | PLAIN | {types.FunctionType}
_STRINGS = frozenset({str})
_HOLDERS = (torch.nn.Module, torch.optim.Optimizer)
_FIXED = (*_HOLDERS, type, contextvars.ContextVar)  # identified by identity: no other object takes their place


@dataclass(frozen=True, eq=False)
class _Treatment:
    """How a walk treats values of a class: as tensors, as tuples, as objects to enter, or else as constants."""

    is_tensor: bool
    is_tuple: bool
    is_entered: bool
    has_attributes: bool
    is_module: bool
    is_holder: bool
    is_fixed: bool
    entries: Callable[[Any], Iterable[Entries]]
    refused: type | None  # the base class because of which modules are refused


@per_class
def _treatment_of(cls: type) -> _Treatment:
    is_module = issubclass(cls, torch.nn.Module)
    return _Treatment(
        is_tensor=issubclass(cls, torch.Tensor),
        is_tuple=issubclass(cls, tuple),
        is_entered=not issubclass(cls, (torch.Tensor, tuple)) and is_entered(cls),
        has_attributes=has_attributes(cls),
        is_module=is_module,
        is_holder=issubclass(cls, _HOLDERS),
        is_fixed=issubclass(cls, _FIXED),
        entries=decomposition_of(cls).entries,
        refused=refused_base(cls) if is_module else None,
    )


@dataclass
class StateWalk:
    """The results of a walk over objects, in order."""

    tensors: list[Slot] = field(default_factory=list)
    constants: list[Slot] = field(default_factory=list)  # values that are neither tensors nor entered
    others: list[Slot] = field(default_factory=list)  # constants that are not plain values
    leaves: list[Slot] = field(default_factory=list)  # tensors and constants
    entered: dict[Slot, ObjectSource] = field(default_factory=dict)  # of objects that were entered, without tuples
    tuples: list[Slot] = field(default_factory=list)  # of tuples that are not in a tuple
    containers: dict[int, ContainerSource] = field(default_factory=dict)  # by identity at the walk
    weak: list[Slot] = field(default_factory=list)  # weak references to tensors
    keyed_by_tensor: list[Container] = field(default_factory=list)  # dicts with tensors for keys, sets with tensors
    modules: dict[int, str] = field(default_factory=dict)  # paths, by identity
    shape: list[Any] = field(default_factory=list)  # types and keys on the way: equal for objects built alike
    objects: list[ObjectSource] = field(default_factory=list)  # that were entered
    sources: list[ObjectSource] = field(default_factory=list)  # of these objects, and of values with attributes
    _numbers: dict[int, int] = field(default_factory=dict)
    of_state: bool = False  # whether guards compare all constants of modules: then tuples of plain values are left out

    def walk(self, container: Container, key: Any, path: str) -> None:
        """Enter an entry of a container."""
        self._enter(entry(container, key), Slot(ContainerSource(container), key, path))

    @property
    def seen(self) -> Sequence[Any]:
        """The objects that were entered."""
        return [source.value for source in self.objects]

    @property
    def holds(self) -> bool:
        """Whether a module or an optimizer was found."""
        return any(isinstance(source.value, _HOLDERS) for source in self.objects)

    def resolve(self) -> bool:
        """Resolve the objects from their slots again, owners before what they hold; returns whether any was replaced.

        An object is not replaced by one of another class, and none is if two would become the same object: the guards
        then see another object in a slot.
        """
        before = [resolved for source in self.sources if (resolved := source.resolve()) is not None]
        if before and len({id(source.value) for source in self.objects}) < len(self.objects):
            for resolved in before:
                resolved.apply()
            return False
        return bool(before)

    def open(self, value: Any, path: str, held: bool = False) -> None:
        """Enter an object that is in no container; ``held``: whether it is below a module or an optimizer."""
        if id(value) not in self._numbers:
            self._open_object(value, _treatment_of(type(value)), path, held)

    def watch(self, container: Container, path: str) -> None:
        """Record a container, whose content is compared after the run."""
        source = self.containers.setdefault(id(container), ContainerSource(container, path))
        if len(container) > 1 and _is_ordered(container, container, False):
            source.is_ordered = True

    def _enter(self, value: Any, slot: Slot) -> None:
        cls = type(value)
        if cls in TENSOR_TYPES:
            self._add_leaf(torch.Tensor, self.tensors, slot)
            return
        if cls in LEAF_TYPES:
            self._add_leaf(cls, self.constants, slot)
            if cls not in PLAIN:
                self.others.append(slot)
            return
        treatment = _treatment_of(cls)
        if treatment.is_tensor:
            self._add_leaf(torch.Tensor, self.tensors, slot)
        elif treatment.is_tuple:
            self._enter_items(value, slot, treatment)
        elif not treatment.is_entered:
            self._add_leaf(cls, self.constants, slot)
            self.others.append(slot)
            self._follow_constant(value, slot, treatment)
        elif (number := self._numbers.get(id(value))) is None:
            self._open_object(value, treatment, slot.path, slot.held, slot)
        else:
            self.entered[slot] = self.objects[number]
            self.objects[number].slots.append(slot)
            self.shape.append(number)

    def _enter_items(self, value: tuple[Any, ...], slot: Slot, treatment: _Treatment) -> None:
        self.shape.append((type(value), len(value)))
        if treatment.has_attributes:
            self.open_attributes(value, slot.path, slot)
        if not slot.steps:
            self.tuples.append(slot)
        for index, item in enumerate(value):
            path = joined(slot.path, index)
            self._enter(item, Slot(slot.source, slot.key, path, (*slot.steps, index), slot.held))

    def _add_leaf(self, cls: type, slots: list[Slot], slot: Slot) -> None:
        self.shape.append(cls)
        slots.append(slot)
        self.leaves.append(slot)

    def _follow_constant(self, value: Any, slot: Slot, treatment: _Treatment) -> None:
        """Enter the object to which a value refers, and the attributes of the value."""
        shown = behind(value)
        if isinstance(shown, torch.Tensor):
            if type(value) in _WEAK:
                self.weak.append(slot)
                if slot.source.owner is not None:
                    slot.source.owner.is_fixed = True
        elif shown is not None and is_entered(type(shown)):
            self.open(shown, f"{slot.path}()", slot.held)
        if treatment.has_attributes:
            self.open_attributes(value, slot.path, slot)

    def open_attributes(self, value: Any, path: str, slot: Slot | None = None) -> None:
        """Enter only the attributes of a value. ``slot``: the slot that holds the value; None if it is fixed."""
        attributes = vars(value)
        if id(attributes) not in self.containers:
            owner = ObjectSource(value, [] if slot is None else [slot], is_fixed=isinstance(value, _FIXED))
            self.sources.append(owner)
            source = ContainerSource(attributes, path, weakref.ref(owner))
            owner.containers.append(source)
            self.containers[id(attributes)] = source
            self._open(value, source, [*attributes], path, slot is not None and slot.held)

    def _open_object(self, value: Any, treatment: _Treatment, path: str, held: bool, slot: Slot | None = None) -> None:
        identity, module = id(value), treatment.is_module
        owner = ObjectSource(value, [] if slot is None else [slot], [], treatment.is_fixed)
        self._numbers[identity] = len(self.objects)
        self.objects.append(owner)
        self.sources.append(owner)
        if slot is not None:
            self.entered[slot] = owner
        if treatment.refused is not None:
            raise module_refused(treatment.refused, path)
        if module:
            self.modules[identity] = path
        held, reference = held or treatment.is_holder, weakref.ref(owner)
        for container, keys in list(treatment.entries(value)):
            source = ContainerSource(container, path, reference)
            owner.containers.append(source)
            self.containers[id(container)] = source
            if not keys:
                self.shape.append((type(value), ()))
                continue
            if len(keys) > 1:
                source.is_ordered = _is_ordered(value, container, module)
            self._open(value, source, keys, path, held)

    def _open(self, value: Any, source: ContainerSource, keys: list[Any], path: str, held: bool) -> None:
        container = source.container
        named = _STRINGS.issuperset(map(type, keys))
        self.shape.append((type(value), tuple(keys) if named else len(keys)))
        if not named:
            self._enter_keys(source, container if isinstance(container, SetItems) else keys, path, held)
        prefix, is_dict = f"{path}." if path else "", type(container) is dict
        skips = self.of_state and is_module(value) and container is value.__dict__
        for index, key in enumerate(keys):
            item = container[key] if is_dict else entry(container, key)
            if skips and is_constant(item):
                continue
            step = key if named or isinstance(key, (str, int)) else index
            self._enter(item, Slot(source, key, f"{prefix}{step}", (), held))

    def _enter_keys(self, source: ContainerSource, keys: Iterable[Any], path: str, held: bool) -> None:
        """Enter objects that are keys, and record a dict or a set that is keyed by tensors."""
        container = source.container
        mapping = isinstance(container, dict)
        keys = list(map(key_behind, keys)) if mapping else keys
        if any(isinstance(key, torch.Tensor) for key in keys):
            self.keyed_by_tensor.append(container)
            if source.owner is not None:
                source.owner.is_fixed = True
        if mapping:
            for key in keys:
                if is_entered(type(key)) and not isinstance(key, (tuple, *_HOLDERS)):
                    self.open(key, f"{path}: a key", held)


def _is_ordered(value: Any, container: Container, module: bool) -> bool:
    """Whether the order of a container counts: a dict's and a module's submodules', but not that of attributes."""
    return isinstance(container, dict) and (container is value or (module and container is modules_of(value)))


def is_module(value: Any) -> bool:
    """Whether a value is a module, whose parameters, buffers and modules are state, whatever ``__class__`` says."""
    return issubclass(type(value), torch.nn.Module)


def joined(path: str, key: Any) -> str:
    """A path with one more step."""
    return f"{path}.{key}" if path else str(key)
