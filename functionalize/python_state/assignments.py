"""Which attributes a program may give other values, by the names that its code has.

Invariant: nothing runs. Limits: methods are found by their names, whatever object they are called of; what is assigned
by ``setattr``, or as an entry of a dict, is not seen.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from dis import get_instructions, opmap
from typing import Any

_STORE_ATTR = opmap["STORE_ATTR"]
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})  # what they assign may stay


def assigned(codes: Iterable[types.CodeType], kinds: Iterable[type]) -> set[str]:
    """The attributes that code of a program assigns, and methods of some classes that it comes to by name.

    Those aside that only an object's construction assigns.
    """
    found, kinds = set[str](), list(kinds)
    todo = [code for code in codes if code.co_name not in CONSTRUCTORS]
    seen = set[str](CONSTRUCTORS)
    while todo:
        names, stored = _names(todo.pop())
        found |= stored
        todo += [code for name in names - seen for kind in kinds for code in _methods(kind, name)]
        seen |= names
    return found


def _methods(kind: type, name: str) -> Iterator[types.CodeType]:
    """The code of what classes have under a name: of methods, and of properties."""
    for one in kind.__mro__:
        value: Any = vars(one).get(name)
        for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
            inner = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
            if inspect.isfunction(inner):
                yield inner.__code__


@functools.lru_cache(maxsize=1 << 10)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names in code, and in code of functions in it; and those of attributes that it assigns."""
    names, stored = set(code.co_names), set[str]()
    if _STORE_ATTR in code.co_code[::2]:
        stored.update(one.argval for one in get_instructions(code) if one.opcode == _STORE_ATTR)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            names |= inner[0]
            stored |= inner[1]
    return frozenset(names), frozenset(stored)
