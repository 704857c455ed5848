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
from functools import cached_property
from operator import is_
from typing import Any

import torch

Holder = Any  # a dict or a list: what values sit in

# Never entered: they hold no state of a program's.
OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger),
    *(enum.Enum, torch.Generator, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(str, bytes, int, float, complex, type(None), range, torch.SymInt),
)

# By type, what isinstance would say: most values are one of these.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_PLAIN = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device, types.FunctionType})
_STRINGS = frozenset({str})


@dataclass(slots=True, eq=False)
class Spot:
    """A place where a value sits: an entry of a holder, and the steps into the tuples that it may hold."""

    holder: Holder
    key: Any
    path: str
    owner: Any = None  # the object whose entry it is
    steps: tuple[int, ...] = ()

    def get(self) -> Any:
        value = self.holder[self.key]
        for step in self.steps:
            value = value[step]
        return value

    def set(self, value: Any) -> None:
        self.holder[self.key] = _with(self.holder[self.key], self.steps, value)


def _with(whole: Any, steps: tuple[int, ...], value: Any) -> Any:
    """A nest of tuples with one leaf replaced."""
    if not steps:
        return value
    items = list(whole)
    items[steps[0]] = _with(items[steps[0]], steps[1:], value)
    return type(whole)(*items) if hasattr(whole, "_fields") else type(whole)(items)


@dataclass
class State:
    """What a walk over objects found, in order."""

    tensors: list[Spot] = field(default_factory=list)
    constants: list[Spot] = field(default_factory=list)  # values that are neither tensors nor entered
    leaves: list[Spot] = field(default_factory=list)  # both
    holders: dict[int, tuple[Holder, str]] = field(default_factory=dict)
    by_tensor: list[Holder] = field(default_factory=list)  # holders that have tensors for keys
    modules: dict[int, str] = field(default_factory=dict)  # paths
    shape: list[Any] = field(default_factory=list)  # what was met on the way: equal for objects built alike
    seen: list[Any] = field(default_factory=list)  # what was entered; held, so that no identity is used again
    _numbers: dict[int, int] = field(default_factory=dict)
    _holding: dict[int, bool] = field(default_factory=dict)  # of objects of modules: whether they hold tensors
    _lent: list[Any] = field(default_factory=list)  # what the holders held, stand-ins in place

    def walk(self, holder: Holder, key: Any, path: str, owner: Any = None) -> None:
        """Enter an entry of a holder."""
        self._enter(holder[key], Spot(holder, key, path, owner))

    def _enter(self, value: Any, spot: Spot) -> None:
        kind = type(value)
        if kind in _TENSORS or isinstance(value, torch.Tensor):
            self.shape.append(torch.Tensor)
            self.tensors.append(spot)
            self.leaves.append(spot)
        elif kind in _PLAIN or not (kind is dict or kind is list or is_module(value) or _is_entered(value)):
            self.shape.append(kind)
            self.constants.append(spot)
            self.leaves.append(spot)
        elif isinstance(value, tuple):
            self.shape.append((kind, len(value)))
            for place, item in enumerate(value):
                at = (*spot.steps, place)
                self._enter(item, Spot(spot.holder, spot.key, joined(spot.path, place), spot.owner, at))
        elif id(value) in self._numbers:
            self.shape.append(self._numbers[id(value)])
        else:
            self._numbers[id(value)] = len(self.seen)
            self.seen.append(value)
            if is_module(value):
                self.modules[id(value)] = spot.path
            for holder, keys in holders_of(value, self._holding):
                self.holders[id(holder)] = holder, spot.path
                if keys:
                    self._open(value, holder, keys, spot.path)
                else:
                    self.shape.append((kind, ()))

    def _open(self, value: Any, holder: Holder, keys: list[Any], path: str) -> None:
        if not _STRINGS.issuperset(map(type, keys)):
            self._open_by_place(value, holder, keys, path)
            return
        self.shape.append((type(value), tuple(keys)))
        prefix = f"{path}." if path else ""
        for key in keys:
            self._enter(holder[key], Spot(holder, key, prefix + key, value))

    def _open_by_place(self, value: Any, holder: Holder, keys: list[Any], path: str) -> None:
        """Enter what has no names, or keys of other kinds."""
        self.shape.append((type(value), len(keys)))
        if any(isinstance(key, torch.Tensor) for key in keys):
            self.by_tensor.append(holder)
        for place, key in enumerate(keys):
            self.walk(holder, key, joined(path, key if isinstance(key, (str, int)) else place), value)

    @contextlib.contextmanager
    def lent(self, stand_ins: Mapping[int, Any]) -> Iterator[None]:
        """Have other tensors, named by the identities of these, in their places; in the end all is as it was."""
        entries = [(spot.holder, spot.key, spot.holder[spot.key]) for spot in self.tensors]
        by_tensor = [(holder, held(holder)) for holder in self.by_tensor]
        try:
            for spot in self.tensors:
                spot.set(stand_ins[id(spot.get())])
            for holder, content in by_tensor:
                assign(holder, {stand_ins.get(id(key), key): holder[key] for key in content})
            self._lent = [held(holder) for holder, _ in self.holders.values()]
            yield
        finally:
            for _, holder, _, content in self.changed:
                assign(holder, content)
            for holder, content in by_tensor:
                assign(holder, content)
            for holder, key, value in entries:
                holder[key] = value

    @cached_property
    def changed(self) -> list[tuple[int, Holder, str, Any]]:
        """The holders that do not hold what they held when lent: number, holder, path, what that was."""
        return [
            (number, holder, path, content)
            for number, ((holder, path), content) in enumerate(zip(self.holders.values(), self._lent, strict=False))
            if (holder or content) and not unchanged(holder, content)
        ]


def _is_entered(value: Any) -> bool:
    """Whether a value that is no module may hold state."""
    return not isinstance(value, OPAQUE) and not callable(value)


def is_module(value: Any) -> bool:
    """Whether a value is a module, whose parameters, buffers and modules are state."""
    return isinstance(value, torch.nn.Module)


def joined(path: str, key: Any) -> str:
    """A path with one more step."""
    return f"{path}.{key}" if path else str(key)


def held(holder: Holder) -> Any:
    """A copy of what a holder holds."""
    if type(holder) is dict:
        return holder.copy()
    return dict(holder.items()) if isinstance(holder, dict) else list(holder)


def unchanged(holder: Holder, content: Any) -> bool:
    """Whether a holder holds the very objects of a copy that was made of it, in the same order."""
    if len(holder) != len(content):
        return False
    if isinstance(holder, dict):
        return all(map(is_, holder, content)) and all(map(is_, dict.values(holder), content.values()))
    return all(map(is_, holder, content))


def assign(holder: Holder, content: Any) -> None:
    """Give a holder other content, in the order of that."""
    if isinstance(holder, dict):
        dict.clear(holder)
        for key, value in content.items():
            dict.__setitem__(holder, key, value)
    else:
        holder[:] = content


def holders_of(value: Any, holding: dict[int, bool]) -> Iterator[tuple[Holder, list[Any]]]:
    """The holders that an object consists of, and which of their entries are state."""
    if is_module(value):
        yield value._parameters, list(value._parameters)
        yield value._buffers, list(value._buffers)
        yield value._modules, [name for name, module in value._modules.items() if module is not None]
        content = value.__dict__
        own = [n for n, item in content.items() if type(item) not in _PLAIN and n not in _OF_MODULES]
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
    if kind in _TENSORS or isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, _NOT_ENTERED):
        return False
    if kind is tuple or kind is list or isinstance(value, (tuple, list)):
        return not _PLAIN.issuperset(map(type, value)) and any(holds_tensors(item, known, depth - 1) for item in value)
    found = known.get(id(value)) if depth == _STEPS else None
    if found is None:
        items = value.values() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).values()
        found = any(holds_tensors(item, known, depth - 1) for item in list(items))
        if depth == _STEPS:  # a configuration that many modules share
            known[id(value)] = found
    return found
