"""Comparisons of data-dependent numbers, as numbers: in arithmetic a bool is zero or one, as Python's are.

Invariant: arithmetic on a data-dependent bool gives a symbol and is no branch on its value. Where Python needs its
number (an index of a list, ``float``), where it divides or is an exponent, and beside other types than numbers, the
program branches on it. Limits: bools of sizes are guards, as everywhere. Torch's own functions get no number for a
bool: some do another thing then.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._torch.symbols.traced_symbols import whole_number_of
from functionalize._torch.tensors import SYMBOLS
from functionalize.call_stack import is_of_program

_ADDING: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in ("add", "sub", "mul")}
_BY_DIVISORS: dict[str, Callable[..., Any]] = {  # by what their second number is, they raise or give another kind
    **{name: getattr(operator, name) for name in ("truediv", "floordiv", "mod", "pow", "lshift", "rshift")},
    "divmod": divmod,
}
_COMPARING: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
_OF_BITS: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_UNARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert")},
    **{name: getattr(math, name) for name in ("trunc", "floor", "ceil")},
    "round": round,
}
_OF_WHOLE_NUMBERS = ("conjugate", "bit_length", "as_integer_ratio")
_NUMBERS = (int, float, *SYMBOLS)


@contextlib.contextmanager
def bools_as_numbers(tracer: Any) -> Iterator[None]:
    """Have data-dependent bools be numbers where Python's are."""

    def number_of(value: Any) -> Any:
        if type(value) is bool:
            return int(value)
        if not isinstance(value, torch.SymBool):
            return value
        known = value.node.hint is not None or not value.node.expr.free_symbols
        return int(bool(value)) if known else whole_number_of(tracer, value)

    methods: dict[tuple[Any, str], Any]
    methods = {(torch.SymBool, name): method for name, method in _methods_of_bools(number_of).items()}
    kinds: tuple[Any, ...] = (torch.SymInt, torch.SymFloat)
    for kind in kinds:
        for name in [name for name in _names(_ADDING, _BY_DIVISORS, _OF_BITS, _COMPARING) if hasattr(kind, name)]:
            other = _value_of if name.strip("_") in _BY_DIVISORS else number_of
            methods[kind, name] = _beside_bools(getattr(kind, name), other)
    before = {(kind, name): vars(kind).get(name) for kind, name in methods}
    for (kind, name), method in methods.items():
        setattr(kind, name, method)
    try:
        yield
    finally:
        for (kind, name), method in before.items():
            if method is None:
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _names(*tables: dict[str, Any]) -> list[str]:
    return [f"__{side}{name}__" for table in tables for name in table for side in ("", "r")]


def _methods_of_bools(number_of: Callable[[Any], Any]) -> dict[str, Any]:
    kind: Any = torch.SymBool
    methods: dict[str, Any] = {
        "__index__": _index,
        "real": property(number_of),
        "imag": property(lambda boolean: 0),
        "numerator": property(number_of),
        "denominator": property(lambda boolean: 1),
    }
    for name, operation in (*_ADDING.items(), *_BY_DIVISORS.items(), *_COMPARING.items()):
        methods[f"__{name}__"] = _binary(operation, number_of)
    for name, operation in (*_ADDING.items(), *_BY_DIVISORS.items()):
        methods[f"__r{name}__"] = _binary(_swapped(operation), _value_of if name in _BY_DIVISORS else number_of)
    for name, operation in _OF_BITS.items():
        of_bools = getattr(kind, f"__{name}__", _differ)
        methods[f"__{name}__"] = _binary(operation, number_of, of_bools)
        methods[f"__r{name}__"] = _binary(_swapped(operation), number_of, of_bools)
    for name, operation in _UNARY.items():
        methods[f"__{name}__"] = _unary(operation, number_of)
    for name in _OF_WHOLE_NUMBERS:
        methods[name] = _unary(operator.methodcaller(name), number_of)
    return methods


def _value_of(value: Any) -> Any:
    """A bool as the number that it is in a call, which is a branch on its value."""
    return int(bool(value)) if isinstance(value, (bool, torch.SymBool)) else value


def _index(boolean: torch.SymBool) -> int:
    if not is_of_program(sys._getframe(1).f_code):
        raise TypeError("'SymBool' object cannot be interpreted as an integer")
    return int(bool(boolean))


def _swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda one, other: operation(other, one)


def _unary(operation: Callable[..., Any], number_of: Callable[[Any], Any]) -> Any:
    return lambda boolean, *options: operation(number_of(boolean), *options)


def _binary(
    operation: Callable[..., Any], number_of: Callable[[Any], Any], of_bools: Callable[..., Any] | None = None
) -> Any:
    """An operation of a bool and something else; ``of_bools``: that of two bools, where it gives one."""

    def called(boolean: torch.SymBool, other: Any, *modulus: Any) -> Any:
        if modulus:
            return pow(_value_of(boolean), other, *modulus)
        if isinstance(other, torch.Tensor):
            return NotImplemented
        if of_bools is not None and isinstance(other, (bool, torch.SymBool)):
            return of_bools(boolean, other)
        if not isinstance(other, _NUMBERS):
            return operation(bool(boolean), other)
        return operation(number_of(boolean), number_of(other))

    return called


def _differ(boolean: Any, other: Any) -> Any:
    """Whether one of two bools holds, and not both."""
    return (boolean | other) & torch.sym_not(boolean & other)


def _beside_bools(method: Any, number_of: Callable[[Any], Any]) -> Any:
    """An operation of a number, beside a bool: torch has no such arithmetic of all of them."""
    return lambda number, other: method(number, number_of(other))
