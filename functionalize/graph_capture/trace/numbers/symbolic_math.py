"""Functions of ``math`` return symbols for data-dependent numbers, as operators do; so do ``min`` and ``max``.

Invariant: for numbers outside the trace they do what they did, in every thread. Limits: functions of floats that return
floats or bools, called by the name of their module; others ask for the value of a symbol.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from functionalize._torch.symbols.traced_symbols import compared, opaque_float
from functionalize._torch.tensors import SYMBOLS
from functionalize.patches import Patch
from functionalize.transform.functions.numbers import Conversions

_EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "sqrt", "cbrt")
_CIRCULAR = ("acos", "asin", "atan", "atan2", "cos", "sin", "tan", "degrees", "radians")
_HYPERBOLIC = ("acosh", "asinh", "atanh", "cosh", "sinh", "tanh")
_OTHERS = ("copysign", "erf", "erfc", "fabs", "fmod", "gamma", "hypot", "lgamma", "remainder")
_OF_FLOATS = [name for name in (*_EXPONENTIALS, *_CIRCULAR, *_HYPERBOLIC, *_OTHERS) if hasattr(math, name)]
_ASKING = ("isnan", "isinf", "isfinite", "isclose")


def rows_for_math(tracer: Any) -> Iterator[Patch]:
    """Have functions of ``math`` return symbols for symbols: they would ask for the value."""
    for name in _OF_FLOATS:
        yield Patch(math, name, partial(_symbolic, tracer, opaque_float))
    for name in _ASKING:
        yield Patch(math, name, partial(_symbolic, tracer, compared))
    yield Patch(builtins, "min", partial(_choosing, tracer, torch.sym_min))
    yield Patch(builtins, "max", partial(_choosing, tracer, torch.sym_max))


def _symbolic(tracer: Any, symbol_of: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        symbolic = not options and any(isinstance(arg, SYMBOLS) for arg in args)
        return Conversions.of_bool(symbol_of(tracer, function, args)) if symbolic else function(*args, **options)

    return called


def _choosing(tracer: Any, of_whole: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``min`` or ``max``, which compares its arguments: for data-dependent numbers it returns a symbol."""

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
        return function(*args)  # the class of the number depends on tensor values

    return called


def _is_of_data(number: Any) -> bool:
    """Whether a number is data-dependent: a comparison of sizes alone is a condition on these."""
    return isinstance(number, torch.SymFloat) or (isinstance(number, torch.SymInt) and number.node.hint is None)
