"""The methods of a class that a program may run, found by the names in its code.

Takes a class and names. Gives methods, and the attributes of classes that decide which methods these are. Guarantees
that nothing runs. Limits: for classes of libraries, only the ``forward`` of modules is known.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence, Set
from operator import attrgetter
from typing import Any

import torch

from functionalize.python_state.code_names import CONSTRUCTORS, callables_behind, functions_among
from functionalize.python_state.ownership import is_own, root_of

_NOT_OWN = ("torch", "builtins")
_OF_OBJECTS = CONSTRUCTORS | {"__repr__", "__dir__"}  # what Python does not call for an operator or an attribute
_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
_IMMUTABLE = 1 << 8  # the flag of classes whose attributes nobody can set: no call has to check them
Method = tuple[str, Any]  # a name, and the entry of a class


class Methods:
    """The methods and properties of one class that a program may run, as their names become known.

    For modules, these are ``forward``, those that Python calls for operators and attributes, the methods that are
    named, and the methods that these name in turn; for other objects, all methods.
    """

    def __init__(self, cls: type) -> None:
        self.kind = cls
        self._entries: dict[str, list[tuple[type, Any]]] = {}  # methods that no name has led to, each with its class
        self._of_library: dict[str, Any] = {}  # what bases in libraries have, which a class of the program may replace
        self._is_module = issubclass(cls, torch.nn.Module)
        self.guarded: dict[type, list[str]] = {}  # by class: the attributes by which a call checks its methods
        can_change = not cls.__flags__ & _IMMUTABLE
        for base in cls.__mro__:
            if root_of(base.__module__) not in _NOT_OWN:
                for name, entry in vars(base).items():
                    if functions_in(entry) or type(entry) is staticmethod:  # which may hold a function in C
                        self._entries.setdefault(name, []).append((base, entry))
                    elif type(entry) in _IN_C and can_change:
                        self._of_library.setdefault(name, entry)
            elif base is not object and can_change:
                self._of_library = vars(base) | self._of_library
        self._implicit = {"forward", *filter(_is_implicit, (*self._of_library, *self._entries))}

    def further(self, names: Set[str], computed: bool = False) -> list[Method]:
        """The methods that these names lead to, without those that an earlier name led to.

        ``computed``: whether code computes names: these may be of any method that is not of a library.
        """
        methods = list[Method]()
        reached = names | self._implicit if self._is_module else {*self._of_library, *self._entries}
        if computed:
            reached |= {
                name for name, entries in self._entries.items() if any(is_own(base.__module__) for base, _ in entries)
            }
        for name in [name for name in self._of_library if name in reached]:
            entry = self._of_library.pop(name)
            if inspect.isroutine(entry):
                owners = [owner for owner, _ in self._entries.get(name, ())]
                self._guard(self._behind(owners), self.kind, name, entry)
        if not self._entries:
            return methods
        todo = [name for name in reversed(self._entries) if name in reached]
        while todo:
            name = todo.pop()
            entries = self._entries.pop(name, ())
            methods += ((name, entry) for _, entry in entries)
            owners = [owner for owner, _ in entries]
            for index, (owner, entry) in enumerate(entries):
                self._guard(self._behind(owners[:index]), owner, name, entry)
            if self._is_module and self._entries:
                functions = [function for _, entry in entries for function in functions_in(entry)]
                layers = [layer for function in functions for layer in functions_among(callables_behind(function))]
                codes = [layer.__code__ for layer in layers]
                todo += [other for code in codes for other in code.co_names if other in self._entries]
        return methods

    def _behind(self, owners: Sequence[type]) -> type:
        """The class where the search for a method begins: this one, or what `super()` means in the last owner."""
        bases = self.kind.__mro__
        return bases[bases.index(owners[-1]) + 1] if owners else self.kind

    def _guard(self, begin: type, owner: type, name: str, method: Any) -> None:
        """Have calls check that a name still means a method, in the class where the search begins or in its owner."""
        for cls in (begin, owner):
            is_of_torch = cls is not self.kind and root_of(cls.__module__) in _NOT_OWN
            guarded = "" if is_of_torch else _guarded(cls, name, method)
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


def _is_implicit(name: str) -> bool:
    """Whether Python calls a method of this name for an operator or an attribute."""
    return name.startswith("__") and name.endswith("__") and name not in _OF_OBJECTS


def _guarded(cls: type, name: str, method: Any) -> str:
    """The attribute by which a call checks that a name means a method; empty if another method comes before it."""
    if isinstance(method, classmethod):
        name, method = f"{name}.__func__", method.__func__
    try:
        current = attrgetter(name)(cls)
    except AttributeError:
        return ""
    return name if current is (method.__func__ if isinstance(method, staticmethod) else method) else ""
