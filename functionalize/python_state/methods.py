"""The methods of a class that a program may run, found by the names in its code.

Takes a class and names. Gives methods, and the attributes of classes that decide which methods these are. Guarantees
that nothing runs. Limits: of classes of libraries only ``forward`` of modules is known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from functionalize.python_state.code_names import layers
from functionalize.python_state.ownership import is_installed, root_of

_NOT_OWN = ("torch", "builtins")
Method = tuple[str, Any]  # a name, and the entry of a class


class Methods:
    """The methods and properties of one class that its objects run, as they become known.

    Of a module those that are named, and what these come to, beginning with ``forward``; of other objects all. Of
    classes of a library, whose objects keep what they know to themselves, only ``forward``.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self._entries: dict[str, list[tuple[type, Any]]] = {}  # that no name has led to, and whose they are
        self._is_module = issubclass(kind, torch.nn.Module)
        self.guarded: dict[type, list[str]] = {}  # what of it and of its bases tells that these are the methods
        if is_installed(kind):
            forward = getattr(kind, "forward", None) if self._is_module else None
            self._entries = {"forward": [(kind, forward)]} if inspect.isfunction(forward) else {}
            return
        for base in kind.__mro__:
            if root_of(base.__module__) not in _NOT_OWN:
                for name, entry in vars(base).items():
                    if functions_in(entry):
                        self._entries.setdefault(name, []).append((base, entry))

    def further(self, names: Iterable[str]) -> list[Method]:
        """The methods that these names lead to, and that no name has led to before."""
        methods = list[Method]()
        wanted = (*names, "forward") if self._is_module else reversed(self._entries)
        todo = [name for name in wanted if name in self._entries]
        while todo:
            name = todo.pop()
            entries = self._entries.pop(name, ())
            methods += ((name, entry) for _, entry in entries)
            for owner, entry in entries:
                self._guard(owner, name, entry)
            if self._is_module:
                functions = (function for _, entry in entries for function in functions_in(entry))
                codes = (layer.__code__ for function in functions for layer in layers(function))
                todo += [other for code in codes for other in code.co_names if other in self._entries]
        return methods

    def _guard(self, owner: type, name: str, method: Any) -> None:
        """Have calls be asked whether a name still means a method: of the class, or of a base behind `super()`."""
        for kind in (self.kind, owner):
            guarded = _guarded(kind, name, method)
            if guarded:
                names = self.guarded.setdefault(kind, [])
                names += [guarded] if guarded not in names else []
                return


def functions_in(method: Any) -> list[Any]:
    """The functions that an entry of a class is made of."""
    if inspect.isfunction(method):
        return [method]
    if isinstance(method, (staticmethod, classmethod)):
        return functions_in(method.__func__)
    if isinstance(method, property):
        return [accessor for accessor in (method.fget, method.fset, method.fdel) if inspect.isfunction(accessor)]
    if isinstance(method, (functools.cached_property, functools.partialmethod)):
        return functions_in(method.func)
    return []


def _guarded(kind: type, name: str, method: Any) -> str:
    """What of a class tells that a name still means a method; nothing where another one of that name comes before."""
    if isinstance(method, classmethod):
        name, method = f"{name}.__func__", method.__func__
    try:
        current = functools.reduce(getattr, name.split("."), kind)
    except AttributeError:
        return ""
    return name if current is (method.__func__ if isinstance(method, staticmethod) else method) else ""
