"""The methods of a class that a program may run, found by the names in its code.

Takes a class and names. Gives methods, and the attributes of classes that decide which methods these are. Guarantees
that nothing runs. Limits: for classes of libraries, only the ``forward`` of modules is known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Set
from operator import attrgetter
from typing import Any

import torch

from functionalize.python_state.code_names import callables_behind, functions_among
from functionalize.python_state.ownership import root_of

_NOT_OWN = ("torch", "builtins")
_CALLED = frozenset({"forward", "__call__"})  # of a module, whatever code names
_IMMUTABLE = 1 << 8  # the flag of classes whose attributes nobody can set: no call has to check them
Method = tuple[str, Any]  # a name, and the entry of a class


class Methods:
    """The methods and properties of one class that a program may run, as their names become known.

    For modules, these are ``forward``, ``__call__``, the methods that are named, and the methods that these name in
    turn; for other objects, all methods.
    """

    def __init__(self, cls: type) -> None:
        self.kind = cls
        self._entries: dict[str, list[tuple[type, Any]]] = {}  # methods that no name has led to, each with its class
        self._of_library: dict[str, Any] = {}  # what bases in libraries have, which a class of the program may replace
        self._is_module = issubclass(cls, torch.nn.Module)
        self.guarded: dict[type, list[str]] = {}  # by class: the attributes by which a call checks its methods
        for base in cls.__mro__:
            if root_of(base.__module__) not in _NOT_OWN:
                for name, entry in vars(base).items():
                    if functions_in(entry) or type(entry) is staticmethod:  # which may hold a function in C
                        self._entries.setdefault(name, []).append((base, entry))
            elif base is not object and not cls.__flags__ & _IMMUTABLE:
                self._of_library = vars(base) | self._of_library

    def further(self, names: Set[str]) -> list[Method]:
        """The methods that these names lead to, without those that an earlier name led to."""
        methods = list[Method]()
        reached = names | _CALLED if self._is_module else {*self._of_library, *self._entries}
        for name in [name for name in self._of_library if name in reached]:
            entry = self._of_library.pop(name)
            if inspect.isroutine(entry):
                self._guard(self.kind, name, entry)
        if not self._entries:
            return methods
        todo = [name for name in reversed(self._entries) if name in reached]
        while todo:
            name = todo.pop()
            entries = self._entries.pop(name, ())
            methods += ((name, entry) for _, entry in entries)
            for owner, entry in entries:
                self._guard(owner, name, entry)
            if self._is_module and self._entries:
                functions = [function for _, entry in entries for function in functions_in(entry)]
                layers = [layer for function in functions for layer in functions_among(callables_behind(function))]
                codes = [layer.__code__ for layer in layers]
                todo += [other for code in codes for other in code.co_names if other in self._entries]
        return methods

    def _guard(self, owner: type, name: str, method: Any) -> None:
        """Have calls check that a name still means a method: in the class, or in a base behind `super()`."""
        for cls in (self.kind, owner):
            guarded = _guarded(cls, name, method)
            if guarded:
                names = self.guarded.setdefault(cls, [])
                names += [guarded] if guarded not in names else []
                return


def forward_of(cls: type) -> Any:
    """The only method that is known of a library's class, whose objects keep their state to themselves; or None."""
    forward = getattr(cls, "forward", None) if issubclass(cls, torch.nn.Module) else None
    return forward if inspect.isfunction(forward) else None


def functions_in(method: Any) -> list[Any]:
    """The functions that run for an entry of a class."""
    if inspect.isfunction(method):
        return [method]
    if isinstance(method, (staticmethod, classmethod)):
        return functions_in(method.__func__)
    if isinstance(method, property):
        return [accessor for accessor in (method.fget, method.fset, method.fdel) if inspect.isfunction(accessor)]
    if isinstance(method, (functools.cached_property, functools.partialmethod)):
        return functions_in(method.func)
    return []


def _guarded(cls: type, name: str, method: Any) -> str:
    """The attribute by which a call checks that a name means a method; empty if another method comes before it."""
    if isinstance(method, classmethod):
        name, method = f"{name}.__func__", method.__func__
    try:
        current = attrgetter(name)(cls)
    except AttributeError:
        return ""
    return name if current is (method.__func__ if isinstance(method, staticmethod) else method) else ""
