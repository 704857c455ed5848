"""Functions of NumPy return symbols for data-dependent numbers, as those of ``math`` do.

NumPy would hold a symbol as an object, and call methods that Python's numbers lack (``exp``), or that return numbers of
another class than NumPy's (``floor``).

Invariant: the number is NumPy's, of each call; its class is Python's. Limits: functions of plain numbers alone, that
return a float, a bool or a whole number; in arrays and lists, symbols stay objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._torch.symbols.traced_symbols import compared, opaque_float, opaque_integer
from functionalize.patches import Patch

_SYMBOLIC: dict[Any, Callable[..., Any]] = {float: opaque_float, bool: compared, int: opaque_integer}
_SAMPLES: dict[Any, Any] = {torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}
_PLAIN = (float, int, bool, type(None))
_AS_IN_PYTHON = ("add", "subtract", "multiply", "negative", "positive", "absolute")  # a symbol's own methods do these


def numpy_number(name: str, options: tuple[tuple[str, Any], ...], *numbers: Any) -> Any:
    """A number that NumPy computes of numbers, as a node of a graph calls it; ``name``: of the function."""
    return getattr(sys.modules["numpy"], name)(*numbers, **dict(options)).item()


def rows_for_numpy(tracer: Any) -> Iterator[Patch]:
    """Have NumPy hand over calls of its functions that have a symbol as an argument."""

    def call_ufunc(symbol: Any, ufunc: Any, method: str, *args: Any, **options: Any) -> Any:
        is_symbolic = method == "__call__" and ufunc.__name__ not in _AS_IN_PYTHON
        number = _number(tracer, ufunc, args, options) if is_symbolic else None
        return getattr(ufunc, method)(*map(_as_object, args), **options) if number is None else number

    def call_function(symbol: Any, function: Any, types: Any, args: Any, options: Any) -> Any:
        number = _number(tracer, function, args, options)
        if number is not None:
            return number
        return function(*map(_as_object, args), **{name: _as_object(option) for name, option in options.items()})

    for cls in _SAMPLES:
        yield Patch.by(call_ufunc, cls, "__array_ufunc__")
        yield Patch.by(call_function, cls, "__array_function__")


def _as_object(arg: Any) -> Any:
    """A symbol as an array of objects, which NumPy would make of it."""
    return sys.modules["numpy"].array(arg, dtype=object) if type(arg) in _SAMPLES else arg


def _number(tracer: Any, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The symbol for the result of a function of numbers; None for other calls."""
    numpy: Any = sys.modules["numpy"]
    name = function.__name__
    args = tuple(arg.item() if isinstance(arg, numpy.generic) else arg for arg in args)
    is_plain = all(type(arg) in _SAMPLES or type(arg) in _PLAIN for arg in args)
    if not is_plain or any(type(option) not in _PLAIN for option in options.values()):
        return None
    if not hasattr(numpy, name) or getattr(numpy, name) is not function:
        return None
    with numpy.errstate(all="ignore"):
        sample = function(*(_SAMPLES.get(type(arg), arg) for arg in args), **options)
    if not isinstance(sample, numpy.generic) or type(sample.item()) not in _SYMBOLIC:
        return None
    return _SYMBOLIC[type(sample.item())](tracer, numpy_number, (name, tuple(options.items()), *args))
