"""The tensors that a program reaches through Python objects: found, replaced for a while, and looked at afterwards.

A program gets at tensors through its arguments, through modules and optimizers, and through containers and plain
objects inside of these, such as caches. All are walked the same way, in the order of their keys.

Invariant: objects that are built alike are walked alike, so that the n-th tensor of the one is the n-th of the other.
Limits: objects with ``__slots__`` and sets are not entered.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from functionalize._torch import buffers_of, modules_of, parameters_of
from functionalize.runtime.refused_objects import refuse_module

Container = Any  # a dict or a list: what values sit in

# Never entered: they hold no state of a program's.
OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger),
    *(enum.Enum, torch.Generator, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(str, bytes, int, float, complex, type(None), range, torch.SymInt),
)

# By type, what isinstance would say: most values are one of these.
TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_PLAIN = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device, types.FunctionType})
LEAF_TYPES = TENSOR_TYPES | _PLAIN
_STRINGS = frozenset({str})


@dataclass(slots=True, eq=False)
class Slot:
    """Where a value sits: an entry of a container, and the steps into the tuples that it may hold."""

    container: Container
    key: Any
    path: str
    owner: Any = None  # the object whose entry it is
    steps: tuple[int, ...] = ()

    def get(self) -> Any:
        value = self.container[self.key]
        for step in self.steps:
            value = value[step]
        return value

    def set(self, value: Any) -> None:
        self.container[self.key] = _with(self.container[self.key], self.steps, value)


def _with(whole: Any, steps: tuple[int, ...], value: Any) -> Any:
    """A nest of tuples with one leaf replaced."""
    if not steps:
        return value
    items = list(whole)
    items[steps[0]] = _with(items[steps[0]], steps[1:], value)
    return type(whole)(*items) if hasattr(whole, "_fields") else type(whole)(items)


@dataclass
class StateWalk:
    """What a walk over objects found, in order."""

    tensors: list[Slot] = field(default_factory=list)
    constants: list[Slot] = field(default_factory=list)  # values that are neither tensors nor entered
    leaves: list[Slot] = field(default_factory=list)  # both
    containers: dict[int, tuple[Container, str]] = field(default_factory=dict)
    keyed_by_tensor: list[Container] = field(default_factory=list)  # containers that have tensors for keys
    modules: dict[int, str] = field(default_factory=dict)  # paths
    shape: list[Any] = field(default_factory=list)  # what was met on the way: equal for objects built alike
    seen: list[Any] = field(default_factory=list)  # what was entered; held, so that no identity is used again
    _numbers: dict[int, int] = field(default_factory=dict)
    _holding: dict[int, bool] = field(default_factory=dict)  # of objects of modules: whether they hold tensors
    _before: list[Any] = field(default_factory=list)  # content of the containers when the program begins

    def walk(self, container: Container, key: Any, path: str, owner: Any = None) -> None:
        """Enter an entry of a container."""
        self._enter(container[key], Slot(container, key, path, owner))

    def _enter(self, value: Any, slot: Slot) -> None:
        kind = type(value)
        if kind in TENSOR_TYPES or isinstance(value, torch.Tensor):
            self.shape.append(torch.Tensor)
            self.tensors.append(slot)
            self.leaves.append(slot)
        elif kind in _PLAIN or ((isinstance(value, OPAQUE) or callable(value)) and not is_module(value)):
            self.shape.append(kind)
            self.constants.append(slot)
            self.leaves.append(slot)
        elif isinstance(value, tuple):
            self.shape.append((kind, len(value)))
            for index, item in enumerate(value):
                at = (*slot.steps, index)
                self._enter(item, Slot(slot.container, slot.key, joined(slot.path, index), slot.owner, at))
        elif id(value) in self._numbers:
            self.shape.append(self._numbers[id(value)])
        else:
            self._numbers[id(value)] = len(self.seen)
            self.seen.append(value)
            if is_module(value):
                refuse_module(value, slot.path)
                self.modules[id(value)] = slot.path
            for container, keys in containers_of(value, self._holding):
                self.containers[id(container)] = container, slot.path
                if keys:
                    self._open(value, container, keys, slot.path)
                else:
                    self.shape.append((kind, ()))

    def _open(self, value: Any, container: Container, keys: list[Any], path: str) -> None:
        named = _STRINGS.issuperset(map(type, keys))
        self.shape.append((type(value), tuple(keys) if named else len(keys)))
        if not named and any(isinstance(key, torch.Tensor) for key in keys):
            self.keyed_by_tensor.append(container)
        prefix = f"{path}." if path else ""
        for index, key in enumerate(keys):
            step = key if named or isinstance(key, (str, int)) else index
            self._enter(container[key], Slot(container, key, f"{prefix}{step}", value))

    @contextlib.contextmanager
    def substituted(self, stand_ins: Mapping[int, Any]) -> Iterator[None]:
        """Put other tensors, named by the identities of these, in their places; in the end all is as it was."""
        entries = [(slot.container, slot.key, slot.container[slot.key]) for slot in self.tensors]
        keyed_by_tensor = [(container, copy_of(container)) for container in self.keyed_by_tensor]
        try:
            for slot in self.tensors:
                slot.set(stand_ins[id(slot.get())])
            for container, content in keyed_by_tensor:
                assign(container, {stand_ins.get(id(key), key): container[key] for key in content})
            self._before = [copy_of(container) for container, _ in self.containers.values()]
            yield
        finally:
            for _, container, _, content in self.changed:
                assign(container, content)
            for container, content in keyed_by_tensor:
                assign(container, content)
            for container, key, value in entries:
                container[key] = value
            self._before = []

    @property
    def changed(self) -> list[tuple[int, Container, str, Any]]:
        """The containers whose content the program has changed so far: number, container, path, content before."""
        pairs = zip(self.containers.values(), self._before, strict=False)
        return [
            (number, container, path, content)
            for number, ((container, path), content) in enumerate(pairs)
            if (container or content) and not unchanged(container, content)
        ]


def is_module(value: Any) -> bool:
    """Whether a value is a module, whose parameters, buffers and modules are state."""
    return isinstance(value, torch.nn.Module)


def joined(path: str, key: Any) -> str:
    """A path with one more step."""
    return f"{path}.{key}" if path else str(key)


def copy_of(container: Container) -> Any:
    """A copy of what a container holds."""
    if type(container) is dict:
        return container.copy()
    return dict(container.items()) if isinstance(container, dict) else list(container)


def unchanged(container: Container, content: Any) -> bool:
    """Whether a container holds the very objects of a copy that was made of it, in the same order."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(map(is_, container, content)) and all(map(is_, dict.values(container), content.values()))
    return all(map(is_, container, content))


def assign(container: Container, content: Any) -> None:
    """Give a container other content, in the order of that."""
    if isinstance(container, dict):
        dict.clear(container)
        for key, value in content.items():
            dict.__setitem__(container, key, value)
    else:
        container[:] = content


def containers_of(value: Any, holding: dict[int, bool]) -> Iterator[tuple[Container, list[Any]]]:
    """The containers that an object consists of, and which of their entries are state."""
    if is_module(value):
        for container in (parameters_of(value), buffers_of(value)):
            yield container, list(container)
        modules = modules_of(value)
        yield modules, [name for name, module in modules.items() if module is not None]
        content = value.__dict__
        own = [n for n, item in content.items() if n not in _OF_MODULES and type(item) not in _PLAIN]
        yield content, [name for name in own if holds_tensors(content[name], holding)]
    elif isinstance(value, (dict, list)):
        yield value, list(value) if isinstance(value, dict) else list(range(len(value)))
    elif hasattr(value, "__dict__"):
        yield value.__dict__, list(value.__dict__)


_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_STEPS = 3
_NOT_ENTERED = (*OPAQUE, torch.nn.Module)


def holds_tensors(value: Any, known: dict[int, bool], depth: int = _STEPS) -> bool:
    """Whether a tensor is found a few steps into a value that is no module. ``known``: of objects that live on."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if kind in TENSOR_TYPES or issubclass(kind, torch.Tensor):
        return True
    if depth == 0 or issubclass(kind, _NOT_ENTERED):
        return False
    if kind is tuple or kind is list or issubclass(kind, (tuple, list)):
        return not _PLAIN.issuperset(map(type, value)) and any(holds_tensors(item, known, depth - 1) for item in value)
    found = known.get(id(value)) if depth == _STEPS else None
    if found is None:
        items = value.values() if issubclass(kind, Mapping) else getattr(value, "__dict__", {}).values()
        found = any(holds_tensors(item, known, depth - 1) for item in list(items))
        if depth == _STEPS:  # a configuration that many modules share
            known[id(value)] = found
    return found
