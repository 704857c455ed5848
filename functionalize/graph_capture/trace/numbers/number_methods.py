"""The methods of data-dependent numbers: one table, which makes them behave like Python's numbers.

Arithmetic returns a symbol and decides nothing, also that of bools, which are zero or one. Where Python needs the
number (an index of a list), where a bool divides or is an exponent, and in operations with types other than numbers,
the program branches on it. A program that writes a number down, or looks it up in a dict, asks for its value. Code of a
program takes a symbol for an instance of `int`, `float` or `bool`.

Invariant: torch's own functions get what torch's methods return: text in its errors and logs, and bools that are not
numbers. Limits: bools of sizes are guards, as everywhere. Libraries that cache by sizes get no hashes of them: they
try, and do without.
"""

from __future__ import annotations

import abc
import math
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from functionalize._torch.subclasses.sharding import PLANS_IN
from functionalize._torch.symbols.traced_symbols import opaque_float, whole_number_of
from functionalize._torch.tensors import SYMBOLS
from functionalize.call_stack import is_of_program
from functionalize.graph_capture.trace.numbers.texts import Texts
from functionalize.patches import Patch
from functionalize.python_state.ownership import is_library_file
from functionalize.transform.functions.numbers import Conversions, formatted

CLASSES: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_ADDING: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in ("add", "sub", "mul")}
_BY_DIVISORS: dict[str, Callable[..., Any]] = {  # depending on the second number, they raise or return another class
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
# Where operators of tensor subclasses are called, in C++ or from Python, and hash their arguments.
_PLANNING = ("functionalize.transform.", "functionalize.graph_capture.backward.", PLANS_IN)
_ABC = abc.ABCMeta.__instancecheck__.__code__  # asks for the caller of `isinstance`


@dataclass(frozen=True, eq=False)
class Hashed:
    """The symbols whose hashes were asked for."""

    looked_up: list[Any] = field(default_factory=list)  # by the program, in dicts
    planned: list[Any] = field(default_factory=list)  # by a tensor subclass, to find how it runs an operator


def rows_for_methods(tracer: Any, environment: Any, texts: Texts, hashed: Hashed) -> Iterator[Patch]:
    """All rows; later rows of a method call the earlier ones.

    ``texts``: gets numbers that decide nothing by being written.
    """
    yield from _rows_for_floats_and_integers(tracer)
    yield from _rows_for_missing_methods()
    yield from _rows_for_bools(tracer)
    values = _Values(environment, texts, hashed)
    for cls, of_value in CLASSES.items():
        for name in ("__repr__", "__format__", "__hash__"):  # `str` calls the first
            yield Patch(cls, name, partial(values.method, name, of_value))
        yield Patch(cls, "__eq__", partial(values.comparison, of_value))
        yield Patch.by(property(partial(_class_of, of_value)), cls, "__class__", shared=True)
    if Conversions.decide_bools:
        yield from _rows_for_conditions()


def _rows_for_conditions() -> Iterator[Patch]:
    """Have the program's comparisons of data-dependent numbers give plain bools, which options of operators must be."""
    for cls in (torch.SymInt, torch.SymFloat):
        for name in ("__eq__", "__ne__", *(f"__{name}__" for name in _COMPARING)):
            yield Patch(cls, name, _decided)


def _decided(method: Any) -> Any:
    def compared(number: Any, other: Any) -> Any:
        answer = method(number, other)
        by_data = isinstance(answer, torch.SymBool) and answer.node.hint is None  # a size has a hint
        return bool(answer) if by_data and is_of_program(sys._getframe(1).f_code) else answer

    return compared


def _class_of(of_value: type, number: Any) -> type:
    """The class of a symbol for ``isinstance``, besides its own: that of its value, if a program asks."""
    frame: Any = sys._getframe(1)
    if frame.f_code is _ABC:
        frame = frame.f_back
    return of_value if is_of_program(frame.f_code) else type(number)


def rest(number: float) -> float:
    """The remainder of a float after division by 1; NaN for floats that are not finite."""
    return number % 1


def _rows_for_floats_and_integers(tracer: Any) -> Iterator[Patch]:
    """Methods of torch's that ask for the value, or return something else than Python's."""
    integer: Any = torch.SymInt

    def is_integer(number: Any) -> Any:
        return Conversions.of_bool(opaque_float(tracer, rest, (number,)) == 0)

    yield Patch.by(is_integer, torch.SymFloat, "is_integer")
    yield Patch(torch.SymFloat, "__pow__", partial(_power, tracer))
    for name in ("__floor__", "__ceil__", "__trunc__"):
        if name in vars(integer):
            yield Patch.by(lambda number: number, integer, name)
    for cls in (torch.SymInt, torch.SymFloat):
        for name in ("__floordiv__", "__rfloordiv__"):
            yield Patch(cls, name, partial(_floor_division, tracer, name == "__rfloordiv__"))


def _power(tracer: Any, method: Any) -> Any:
    """A power: torch assumes that a number is not negative, also where the exponent is whole."""

    def called(number: Any, other: Any) -> Any:
        return opaque_float(tracer, operator.pow, (number, other)) if type(other) is int else method(number, other)

    return called


def _floor_division(tracer: Any, swapped: bool, method: Any) -> Any:
    """A floor division: torch rounds the quotient of floats down, which may differ from Python's result."""

    def called(number: Any, other: Any) -> Any:
        pair = (other, number) if swapped else (number, other)
        if not any(isinstance(operand, (float, torch.SymFloat)) for operand in pair):
            return method(number, other)
        return opaque_float(tracer, operator.floordiv, pair)

    return called


_OF_NUMBERS: dict[str, Any] = {  # of all numbers
    "__deepcopy__": lambda number, memo: number,
    "__divmod__": lambda number, other: (number // other, number % other),
    "__rdivmod__": lambda number, other: (other // number, other % number),
    "real": property(lambda number: number),
    "item": lambda number: number,  # of what NumPy computes
}
_OF_INTEGERS: dict[str, Any] = {
    "__invert__": lambda number: -number - 1,
    "imag": property(lambda number: 0),
    "numerator": property(lambda number: number),
    "denominator": property(lambda number: 1),
}
_MISSING: dict[Any, dict[str, Any]] = {
    torch.SymInt: _OF_NUMBERS | _OF_INTEGERS,
    torch.SymFloat: _OF_NUMBERS | {"imag": property(lambda number: 0.0)},
    torch.SymBool: {"__deepcopy__": _OF_NUMBERS["__deepcopy__"]},
}


def _rows_for_missing_methods() -> Iterator[Patch]:
    """Methods of Python's numbers that torch's do not have."""
    for cls, methods in _MISSING.items():
        for name, method in methods.items():
            if not hasattr(cls, name):
                yield Patch.by(method, cls, name)


def _rows_for_bools(tracer: Any) -> Iterator[Patch]:
    """Methods of bools, and those of numbers that may meet a bool: torch has this arithmetic only in part."""
    number_of = partial(_number_of, tracer)
    for name, method in _methods_of_bools(number_of).items():
        yield Patch.by(method, torch.SymBool, name)
    classes: tuple[Any, ...] = (torch.SymInt, torch.SymFloat)
    for cls in classes:
        for name in [name for name in _names(_ADDING, _BY_DIVISORS, _OF_BITS, _COMPARING) if hasattr(cls, name)]:
            other = _value_of if name.strip("_") in _BY_DIVISORS else number_of
            yield Patch(cls, name, partial(_beside_bools, other))


def _number_of(tracer: Any, value: Any) -> Any:
    """A bool as a number, without a branch on its value."""
    if type(value) is bool:
        return int(value)
    if not isinstance(value, torch.SymBool):
        return value
    has_value = value.node.hint is not None or not value.node.expr.free_symbols
    return int(bool(value)) if has_value else whole_number_of(tracer, value)


def _names(*tables: dict[str, Any]) -> list[str]:
    return [f"__{side}{name}__" for table in tables for name in table for side in ("", "r")]


def _methods_of_bools(number_of: Callable[[Any], Any]) -> dict[str, Any]:
    cls: Any = torch.SymBool
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
        of_bools = getattr(cls, f"__{name}__", _differ)
        methods[f"__{name}__"] = _binary(operation, number_of, of_bools)
        methods[f"__r{name}__"] = _binary(_swapped(operation), number_of, of_bools)
    for name, operation in _UNARY.items():
        methods[f"__{name}__"] = _unary(operation, number_of)
    for name in _OF_WHOLE_NUMBERS:
        methods[name] = _unary(operator.methodcaller(name), number_of)
    return methods


def _value_of(value: Any) -> Any:
    """A bool as the number of one call, which is a branch on its value."""
    return int(bool(value)) if isinstance(value, (bool, torch.SymBool)) else value


def _index(boolean: torch.SymBool) -> int:
    if not is_of_program(sys._getframe(1).f_code):
        raise TypeError("'SymBool' object cannot be interpreted as an integer")
    return int(bool(boolean))


def _swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda left, right: operation(right, left)


def _unary(operation: Callable[..., Any], number_of: Callable[[Any], Any]) -> Any:
    return lambda boolean, *options: operation(number_of(boolean), *options)


def _binary(
    operation: Callable[..., Any], number_of: Callable[[Any], Any], of_bools: Callable[..., Any] | None = None
) -> Any:
    """An operation of a bool and something else; ``of_bools``: the operation of two bools, if it returns a bool."""

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
    """The exclusive or of two bools."""
    return (boolean | other) & torch.sym_not(boolean & other)


def _beside_bools(number_of: Callable[[Any], Any], method: Any) -> Any:
    return lambda number, other: method(number, number_of(other))


class _Values:
    """Methods that ask for the value of a number: for text, and for keys of dicts."""

    def __init__(self, environment: Any, texts: Texts, hashed: Hashed) -> None:
        self._environment, self._texts, self._hashed = environment, texts, hashed

    def _is_traced(self, symbol: Any) -> bool:
        return self._environment is not None and getattr(symbol.node, "shape_env", None) is self._environment

    def comparison(self, of_value: type, method: Callable[..., Any]) -> Any:
        """``__eq__``: torch compares conditions with conditions, and numbers with numbers only."""
        by_value = self.method("__eq__", of_value, method)

        def equal(symbol: Any, *args: Any) -> Any:
            return method(symbol, *(int(bool(arg)) if isinstance(arg, (bool, torch.SymBool)) else arg for arg in args))

        return by_value if of_value is bool else equal

    def method(self, name: str, of_value: type, method: Callable[..., Any]) -> Any:
        """A method that is the value's where a program calls it, and torch's elsewhere."""

        def by_value(symbol: Any, *args: Any) -> Any:
            traced, frame = self._is_traced(symbol), sys._getframe(1)
            code = frame.f_code
            if traced and name == "__hash__" and frame.f_globals.get("__name__", "").startswith(_PLANNING):
                self._hashed.planned.append(symbol)
                return id(symbol)
            is_key = traced and name == "__hash__" and any(key is symbol for key in self._hashed.looked_up)
            if not is_key and not (traced and (is_of_program(code) or code is formatted.__code__)):
                return method(symbol, *args)
            if name == "__hash__" and not is_key:
                asks = not is_library_file(code.co_filename) and symbol.node.hint is None
                if isinstance(symbol, torch.SymInt) and not asks and self._is_size(symbol):
                    return method(symbol)
                self._hashed.looked_up.append(symbol)
            mark = None if name == "__hash__" else self._texts.written(symbol, operator.methodcaller(name, *args))
            if mark is not None:
                return mark
            values = (bool(arg) if isinstance(arg, torch.SymBool) else arg for arg in args)
            return getattr(of_value(symbol), name)(*values)

        return by_value

    def _is_size(self, symbol: torch.SymInt) -> bool:
        """Whether a number is computed from sizes."""
        symbols = symbol.node.expr.free_symbols
        return bool(symbols) and (symbol.node.hint is not None or not self._environment.size_like.isdisjoint(symbols))


def have_plain_keys(containers: Iterable[Any]) -> None:
    """Replace symbols in the keys of dicts by their values."""
    for container in containers:
        if isinstance(container, dict) and any(map(_has_symbol, container)):
            cls: Any = OrderedDict if isinstance(container, OrderedDict) else dict
            items = list(cls.items(container))
            cls.clear(container)
            for key, value in items:
                cls.__setitem__(container, _plain(key), value)


def _has_symbol(key: Any) -> bool:
    return type(key) in CLASSES or (isinstance(key, (tuple, frozenset)) and any(map(_has_symbol, key)))


def _plain(key: Any) -> Any:
    if type(key) in CLASSES:
        return CLASSES[type(key)](key)
    if isinstance(key, (tuple, frozenset)):
        make: Any = getattr(type(key), "_make", type(key))  # of a named tuple
        return make(map(_plain, key))
    return key
