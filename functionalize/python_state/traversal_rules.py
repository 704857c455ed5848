"""Which objects a walk enters, and what it finds behind those that it does not enter: rules by class.

Takes classes and values. Holds the one table of plain types. Guarantees that nothing runs but what a weak reference and
a view of a dict do to say what they show. Limits: objects of the standard library and of torch's private modules are
entered only if a row says so.
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
from functionalize.python_state.ownership import is_internal, root_of

# Plain values: they hold nothing, and are compared by what they are.
SCALARS = (bool, int, float, complex, str, bytes)
PLAIN_BASES: tuple[type, ...] = (
    *(*SCALARS, type(None), range, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
PLAIN = frozenset(PLAIN_BASES)
# Never entered: they hold no state of a program's.
OPAQUE: tuple[type, ...] = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, logging.Logger),
    *(*PLAIN_BASES, enum.Enum, torch.Generator, torch.SymInt, weakref.ProxyType, weakref.CallableProxyType),
)
PATHS = frozenset({pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath})  # values
CONTAINERS = (dict, list, set, deque)
_VALUES_WITH_ATTRIBUTES = (*SCALARS, tuple)  # if a class of the program's own inherits from them

# Classes of the standard library that keep what a program gives them in attributes; not all are loaded.
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
def is_entered(kind: type) -> bool:
    """Whether objects of a class are entered: containers, modules, and what may have attributes of a program's own."""
    if issubclass(kind, (*CONTAINERS, *DESCRIPTORS, torch.nn.Module, torch.optim.Optimizer, contextvars.ContextVar)):
        return True
    if issubclass(kind, OPAQUE) or kind in PATHS or _is_foreign(kind):
        return False
    if not (kind.__dictoffset__ or any("__slots__" in base.__dict__ for base in kind.__mro__)):
        return False
    call = next((base.__dict__["__call__"] for base in kind.__mro__ if "__call__" in base.__dict__), None)
    return call is None or inspect.isfunction(call)


def _is_plain(kind: type) -> bool:
    return any((base.__module__, base.__qualname__) in _PLAIN_OBJECTS for base in kind.__mro__)


def _is_foreign(kind: type) -> bool:
    """Whether a class is base of the standard library's, of torch's own insides, or of ours; or an expression's.

    Expressions of sympy never change, and note what they find of themselves: an exported program holds some.
    """
    if any(base.__module__.startswith("sympy.") for base in kind.__mro__):
        return True
    if _is_plain(kind) or root_of(kind.__module__) in ("builtins", "__main__"):
        return False
    return is_internal(kind.__module__)


@per_class
def has_attributes(kind: type) -> bool:
    """Whether objects of a class are plain values, and have attributes besides."""
    return bool(kind.__dictoffset__) and issubclass(kind, _VALUES_WITH_ATTRIBUTES) and not issubclass(kind, enum.Enum)


def key_behind(key: Any) -> Any:
    """What a key of a dict stands for: what it shows where it is a weak reference, and itself otherwise."""
    return key() if isinstance(key, weakref.ReferenceType) else key


def keys_of(container: Iterable[Any]) -> tuple[Any, ...]:
    """The keys of a dict, in order, to be compared: instead of tensors, which compare elements, their identity."""
    return tuple(map(_compared, container))


def _compared(key: Any) -> Any:
    if type(key) in (tuple, frozenset):
        return type(key)(map(_compared, key))
    return id(key) if isinstance(key_behind(key), torch.Tensor) else key


def behind(value: Any) -> Any:
    """What an object shows that sits elsewhere: a weak reference or proxy, a view of a dict; None of others."""
    if type(value) in weakref.ProxyTypes:  # asked first: of its class a proxy says what the object behind it says
        return of_proxy(value)
    if isinstance(value, weakref.ReferenceType):
        target: Any = value()
        return getattr(target, "__self__", target) if isinstance(target, types.MethodType) else target
    if isinstance(value, _VIEWS_OF_DICTS):
        value = value.mapping
    if not isinstance(value, types.MappingProxyType) or "__module__" in value:  # the attributes of a class
        return None
    return gc.get_referents(value)[0]


def of_proxy(value: Any) -> Any:
    """The object of a weak proxy, None where it is gone; what is no proxy is itself."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__sizeof__.__self__  # a method of any object, which knows what it is bound to
    except ReferenceError:
        return None
