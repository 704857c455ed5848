"""Functions of ``math`` on numbers that the data tell: they give symbols, as Python's operators do.

Invariant: for numbers that are none of a trace's they do what they did, in every thread. Limits: functions of floats
that give floats, by the name of their module; others ask for the value of a symbol.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._torch.tracing import SYMBOLS, opaque_float

_EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "sqrt", "cbrt")
_CIRCULAR = ("acos", "asin", "atan", "atan2", "cos", "sin", "tan", "degrees", "radians")
_HYPERBOLIC = ("acosh", "asinh", "atanh", "cosh", "sinh", "tanh")
_OTHERS = ("copysign", "erf", "erfc", "fabs", "fmod", "gamma", "hypot", "lgamma", "remainder")
_OF_FLOATS = [name for name in (*_EXPONENTIALS, *_CIRCULAR, *_HYPERBOLIC, *_OTHERS) if hasattr(math, name)]


@contextlib.contextmanager
def math_of_symbols(tracer: Any) -> Iterator[None]:
    """Have functions of ``math`` that get symbols give symbols: by themselves they ask for the value."""
    before = {name: getattr(math, name) for name in _OF_FLOATS}
    method: Any = torch.SymFloat.is_integer
    for name, function in before.items():
        setattr(math, name, _symbolic(function, tracer))
    # Torch's own method is no target of a node that can be printed.
    torch.SymFloat.is_integer = lambda x: opaque_float(tracer, rest, (x,)) == 0  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(math, name, function)
        torch.SymFloat.is_integer = method  # type: ignore[method-assign]


def rest(number: float) -> float:
    """What a float has beside a whole number; not a number for those that are not finite."""
    return number % 1


def _symbolic(function: Callable[..., float], tracer: Any) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        symbolic = any(isinstance(arg, SYMBOLS) for arg in args)
        return opaque_float(tracer, function, args) if symbolic else function(*args)

    return called
