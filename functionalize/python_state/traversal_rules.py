"""Rules, by class, for which objects a walk enters, and which objects it reaches through references to them.

Takes classes and values. Contains the only table of plain types. Guarantees that no code of the program runs, only the
lookup of the object behind a weak reference or a view of a dict. Limits: objects of the standard library and of torch's
private modules are entered only if a row says so.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import gc
import inspect
import logging
import pathlib
import types
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from functionalize.python_state.containers import DESCRIPTORS, per_class
from functionalize.python_state.ownership import is_internal, name_of, root_of

# Plain values: they contain no other values, and are compared by value.
SCALARS = (bool, int, float, complex, str, bytes)
PLAIN_BASES: tuple[type, ...] = (
    *(*SCALARS, type(None), range, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
PLAIN = frozenset(PLAIN_BASES)


def is_constant(value: Any) -> bool:
    """Whether a value never changes and holds no object: it is plain, or a tuple of plain values."""
    cls = type(value)
    return cls in PLAIN or (cls is tuple and PLAIN.issuperset(map(type, value)))


# Never entered: they hold no state of a program.
OPAQUE: tuple[type, ...] = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger),
    *(*PLAIN_BASES, enum.Enum, torch.Generator, torch.SymInt, weakref.ProxyType, weakref.CallableProxyType),
)
_PATHS = frozenset({pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath})
# Classes of torch by name, as torch.distributed is not always loaded: they cache what was asked about them.
_VALUES_OF_TORCH = frozenset(
    {("torch.distributed.device_mesh", "DeviceMesh"), ("torch.distributed.tensor._dtensor_spec", "DTensorSpec")}
)
CONTAINERS = (dict, list, set, deque)
_VALUES_WITH_ATTRIBUTES = (*SCALARS, tuple)  # if a class of the program's own inherits from them

# Classes of the standard library that keep a program's objects in attributes; by name, as not all are loaded.
_PLAIN_OBJECTS = frozenset(
    {
        *(("types", "SimpleNamespace"), ("argparse", "Namespace"), ("threading", "Event")),
        *(("collections", name) for name in ("ChainMap", "UserDict", "UserList", "UserString")),
        *(("weakref", name) for name in ("WeakKeyDictionary", "WeakValueDictionary")),
        *(("_weakrefset", "WeakSet"), ("queue", "Queue"), ("configparser", "RawConfigParser")),
    }
)
_DICTS: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
_VIEWS_OF_DICTS = tuple(
    type(view) for example in _DICTS for view in (example.keys(), example.values(), example.items())
)


@per_class
def is_entered(cls: type) -> bool:
    """Whether objects of a class are entered: containers, modules, and others whose attributes a program may set."""
    if issubclass(cls, (*CONTAINERS, *DESCRIPTORS, torch.nn.Module, torch.optim.Optimizer, contextvars.ContextVar)):
        return True
    if has_shard_records(cls):
        return True
    if issubclass(cls, OPAQUE) or is_value(cls) or _is_foreign(cls):
        return False
    if not (cls.__dictoffset__ or any("__slots__" in base.__dict__ for base in cls.__mro__)):
        return False
    call = next((base.__dict__["__call__"] for base in cls.__mro__ if "__call__" in base.__dict__), None)
    return call is None or inspect.isfunction(call)


def is_value(cls: type) -> bool:
    """Whether objects of a class are compared by equality, and never change as far as a program can see."""
    return cls in _PATHS or name_of(cls) in _VALUES_OF_TORCH


def keeps_shards(cls: type) -> bool:
    """Whether objects of a class are the records that ``fully_shard`` keeps of a module, which a capture puts back."""
    return str(cls.__module__).startswith("torch.distributed.fsdp.")


def has_shard_records(cls: type) -> bool:
    """Whether objects of a class hold these records."""
    return any(keeps_shards(base) and base.__qualname__ == "FSDPState" for base in cls.__mro__)


def _is_plain(cls: type) -> bool:
    return not _PLAIN_OBJECTS.isdisjoint(map(name_of, cls.__mro__))


def _is_foreign(cls: type) -> bool:
    """Whether a class is of the standard library, of torch's internals, of this package, or of sympy.

    Expressions of sympy never change, except that they cache facts about themselves; an exported program holds some.
    """
    if any(root_of(base.__module__) == "sympy" for base in cls.__mro__):
        return True
    if _is_plain(cls) or root_of(cls.__module__) in ("builtins", "__main__"):
        return False
    return is_internal(cls.__module__) or keeps_shards(cls)


@per_class
def has_attributes(cls: type) -> bool:
    """Whether objects of a class are plain values with attributes."""
    return bool(cls.__dictoffset__) and issubclass(cls, _VALUES_WITH_ATTRIBUTES) and not issubclass(cls, enum.Enum)


def key_behind(key: Any) -> Any:
    """The key of a dict, or the object behind it if it is a weak reference."""
    return key() if isinstance(key, weakref.ReferenceType) else key


def keys_of(container: Iterable[Any]) -> tuple[Any, ...]:
    """The keys of a dict, in order, to be compared: with identities for tensors, as these compare elementwise."""
    keys = tuple(container)
    return keys if PLAIN.issuperset(map(type, keys)) else tuple(map(_compared, keys))


def _compared(key: Any) -> Any:
    if type(key) in (tuple, frozenset):
        return type(key)(map(_compared, key))
    return id(key) if isinstance(key_behind(key), torch.Tensor) else key


def behind(value: Any) -> Any:
    """The object behind a weak reference or proxy, or the dict behind a view of one; None for other objects."""
    if type(value) in weakref.ProxyTypes:  # first, as `isinstance` sees the class of the object behind a proxy
        return of_proxy(value)
    if isinstance(value, weakref.ReferenceType):
        target: Any = value()
        return getattr(target, "__self__", target) if isinstance(target, types.MethodType) else target
    if isinstance(value, _VIEWS_OF_DICTS):
        value = value.mapping
    if not isinstance(value, types.MappingProxyType) or "__module__" in value:  # the `__dict__` of a class
        return None
    return gc.get_referents(value)[0]


def of_proxy(value: Any) -> Any:
    """The object behind a weak proxy, None if it is gone; other values are returned as they are."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__sizeof__.__self__  # every object has this method, which knows its object
    except ReferenceError:
        return None
