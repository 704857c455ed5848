"""Functions of ``math`` on data-dependent numbers give symbols, as operators do; so do ``min`` and ``max``.

Invariant: for numbers outside the trace they do what they did, in every thread. Limits: functions of floats
that give floats or bools, by the name of their module; others ask for the value of a symbol.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._torch.symbols.traced_symbols import compared, opaque_float
from functionalize._torch.tensors import SYMBOLS
from functionalize.graph_capture.trace.numbers.symbolic_comparisons import bools_as_numbers

_EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "sqrt", "cbrt")
_CIRCULAR = ("acos", "asin", "atan", "atan2", "cos", "sin", "tan", "degrees", "radians")
_HYPERBOLIC = ("acosh", "asinh", "atanh", "cosh", "sinh", "tanh")
_OTHERS = ("copysign", "erf", "erfc", "fabs", "fmod", "gamma", "hypot", "lgamma", "remainder")
_OF_FLOATS = [name for name in (*_EXPONENTIALS, *_CIRCULAR, *_HYPERBOLIC, *_OTHERS) if hasattr(math, name)]
_ASKING = ("isnan", "isinf", "isfinite", "isclose")
_CHOOSING: tuple[Callable[..., Any], ...] = (min, max)


@contextlib.contextmanager
def math_of_symbols(tracer: Any) -> Iterator[None]:
    """Have functions of ``math`` that get symbols give symbols: by themselves they ask for the value."""
    before = {name: getattr(math, name) for name in (*_OF_FLOATS, *_ASKING)}
    for name, function in before.items():
        setattr(math, name, _symbolic(function, tracer, compared if name in _ASKING else opaque_float))
    for function in _CHOOSING:
        setattr(builtins, function.__name__, _choosing(function, tracer))
    try:
        with _methods_of_symbols(tracer), bools_as_numbers(tracer):
            yield
    finally:
        for function in _CHOOSING:
            setattr(builtins, function.__name__, function)
        for name, function in before.items():
            setattr(math, name, function)


@contextlib.contextmanager
def _methods_of_symbols(tracer: Any) -> Iterator[None]:
    """The same of methods that torch's symbols have."""
    before = {(kind, name): vars(kind)[name] for kind, name in _METHODS}
    missing = [(kind, name) for kind, names in _MISSING.items() for name in names if not hasattr(kind, name)]
    for (kind, name), make in _METHODS.items():
        setattr(kind, name, make(before[kind, name], tracer))
    for kind, name in missing:
        setattr(kind, name, _MISSING[kind][name])
    try:
        yield
    finally:
        for (kind, name), method in before.items():
            setattr(kind, name, method)
        for kind, name in missing:
            delattr(kind, name)


def rest(number: float) -> float:
    """What a float has beside a whole number; not a number for those that are not finite."""
    return number % 1


def _symbolic(function: Callable[..., Any], tracer: Any, symbol_of: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        symbolic = not options and any(isinstance(arg, SYMBOLS) for arg in args)
        return symbol_of(tracer, function, args) if symbolic else function(*args, **options)

    return called


def _whole(method: Any, tracer: Any) -> Any:
    """Whether a number is whole: torch's own method is no target of a node that can be printed."""
    return lambda number: opaque_float(tracer, rest, (number,)) == 0


def _divided(method: Any, tracer: Any) -> Any:
    """A division without a rest: torch rounds that of floats down, which may be another number than Python's."""
    swapped = method.__name__ == "__rfloordiv__"

    def called(number: Any, other: Any) -> Any:
        pair = (other, number) if swapped else (number, other)
        if not any(isinstance(one, (float, torch.SymFloat)) for one in pair):
            return method(number, other)
        return opaque_float(tracer, operator.floordiv, pair)

    return called


def _raised(method: Any, tracer: Any) -> Any:
    """A power: torch takes for granted that a number is not negative, also where the exponent is whole."""

    def called(number: Any, other: Any) -> Any:
        return opaque_float(tracer, operator.pow, (number, other)) if type(other) is int else method(number, other)

    return called


def _itself(method: Any, tracer: Any) -> Any:
    """A whole number, made whole: a graph would give it to a function of floats."""
    return lambda number: number


_METHODS: dict[tuple[Any, str], Callable[[Any, Any], Any]] = {
    (torch.SymFloat, "is_integer"): _whole,
    (torch.SymFloat, "__pow__"): _raised,
    **{(torch.SymInt, name): _itself for name in ("__floor__", "__ceil__", "__trunc__") if name in vars(torch.SymInt)},
    **{(kind, name): _divided for kind in (torch.SymInt, torch.SymFloat) for name in ("__floordiv__", "__rfloordiv__")},
}


_OF_NUMBERS: dict[str, Any] = {  # what numbers have
    "__deepcopy__": lambda number, memo: number,
    "__divmod__": lambda number, other: (number // other, number % other),
    "__rdivmod__": lambda number, other: (other // number, other % number),
    "real": property(lambda number: number),
}
_OF_WHOLE_NUMBERS: dict[str, Any] = {
    "__invert__": lambda number: -number - 1,
    "imag": property(lambda number: 0),
    "numerator": property(lambda number: number),
    "denominator": property(lambda number: 1),
}
_MISSING: dict[Any, dict[str, Any]] = {
    torch.SymInt: _OF_NUMBERS | _OF_WHOLE_NUMBERS,
    torch.SymFloat: _OF_NUMBERS | {"imag": property(lambda number: 0.0)},
    torch.SymBool: {"__deepcopy__": _OF_NUMBERS["__deepcopy__"]},
}


def _choosing(function: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    """``min`` or ``max``, which compares its arguments: of data-dependent numbers it gives one without asking."""
    of_whole = torch.sym_min if function is min else torch.sym_max

    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], (types.GeneratorType, map)):
            args = (list(args[0]),)
        numbers = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or len(numbers) < 2 or not any(map(_is_of_data, numbers)):  # a graph would give one as a container
            return function(*args, **kwargs)
        if all(isinstance(number, (float, torch.SymFloat)) for number in numbers):
            return opaque_float(tracer, function, tuple(numbers))
        if all(type(number) in (int, torch.SymInt) for number in numbers):
            return functools.reduce(of_whole, numbers)
        return function(*args)  # which class the number has is for the data to say

    return called


def _is_of_data(number: Any) -> bool:
    """Whether a number is data-dependent: what is compared of sizes alone is a condition on these."""
    return isinstance(number, torch.SymFloat) or (isinstance(number, torch.SymInt) and number.node.hint is None)
