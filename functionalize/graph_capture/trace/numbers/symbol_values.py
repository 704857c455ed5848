"""Data-dependent numbers, as text and as keys: a program that writes one down, or looks it up, asks for its value.

Invariant: text that torch makes of symbols, in errors and logs of its own, is as it was; so is that of other traces.
Limits: who makes the text, or looks up, is code of the program, or of a library that it calls. Sizes have no hashes for
libraries, which keep what they found for some sizes: they ask, and do without.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from functionalize.call_stack import is_of_program
from functionalize.graph_capture.trace.numbers.texts import Texts
from functionalize.python_state.ownership import is_library_file
from functionalize.transform.functions.numbers import formatted

_VALUES: dict[Any, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_METHODS = [
    *((kind, name) for kind in _VALUES for name in ("__repr__", "__format__", "__hash__")),  # `str` comes to the first
    *((kind, "__eq__") for kind in _VALUES),  # torch has it of conditions with conditions, numbers with numbers alone
]


@contextlib.contextmanager
def values_of_symbols(environment: Any, texts: Texts) -> Iterator[list[Any]]:
    """Have symbols of an environment be written and looked up as their values, each a decision then, or a refusal.

    ``texts``: text that decides nothing.

    Yields:
        Those that were looked up.
    """
    before, looked_up = [(kind, name, getattr(kind, name)) for kind, name in _METHODS], list[Any]()
    for kind, name, method in before:
        setattr(kind, name, _by_value(method, name, _VALUES[kind], environment, looked_up, texts))
    try:
        yield looked_up
    finally:
        for kind, name, method in before:
            if name in vars(object) and method is getattr(object, name):
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _by_value(
    method: Callable[..., Any],
    name: str,
    value_of: Callable[[Any], Any],
    environment: Any,
    looked_up: list[Any],
    texts: Texts,
) -> Any:
    def by_value(symbol: Any, *args: Any) -> Any:
        ours = getattr(symbol.node, "shape_env", None) is environment and environment is not None
        if name == "__eq__" and not isinstance(symbol, torch.SymBool):
            return method(symbol, *(int(bool(one)) if isinstance(one, (bool, torch.SymBool)) else one for one in args))
        known = ours and name == "__hash__" and any(one is symbol for one in looked_up)
        code = sys._getframe(1).f_code
        if not known and not (ours and (is_of_program(code) or code is formatted.__code__)):
            return method(symbol, *args)
        if name == "__hash__" and not known:
            asks = not is_library_file(code.co_filename) and symbol.node.hint is None
            if isinstance(symbol, torch.SymInt) and not asks and _is_size(symbol, environment):
                return method(symbol)
            looked_up.append(symbol)
        mark = None if name == "__hash__" else texts.written(symbol, operator.methodcaller(name, *args))
        if mark is not None:
            return mark
        return getattr(value_of(symbol), name)(*(bool(one) if isinstance(one, torch.SymBool) else one for one in args))

    return by_value


def _is_size(symbol: torch.SymInt, environment: Any) -> bool:
    """Whether a number is computed from sizes."""
    found = symbol.node.expr.free_symbols
    return bool(found) and (symbol.node.hint is not None or not environment.size_like.isdisjoint(found))


def have_plain_keys(containers: Iterable[Any]) -> None:
    """Have dicts be keyed by the values of numbers that were looked up."""
    for container in containers:
        if isinstance(container, dict) and any(map(_has_symbol, container)):
            kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
            items = list(kind.items(container))
            kind.clear(container)
            for key, value in items:
                kind.__setitem__(container, _plain(key), value)


def _has_symbol(key: Any) -> bool:
    return type(key) in _VALUES or (isinstance(key, (tuple, frozenset)) and any(map(_has_symbol, key)))


def _plain(key: Any) -> Any:
    if type(key) in _VALUES:
        return _VALUES[type(key)](key)
    if isinstance(key, (tuple, frozenset)):
        make: Any = getattr(type(key), "_make", type(key))  # of a named tuple
        return make(map(_plain, key))
    return key
