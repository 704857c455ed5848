"""Random numbers of Python and NumPy that a program draws and does not read: layers that drop out in training.

While a program runs, functions that draw return a substitute for their number, which records whether anything reads it.
Numbers that nothing has read decide nothing: a call draws as many, so that the generators advance as in eager.

Invariant: a number that is read, or kept, is refused as before. Limits: single numbers, by functions that the
program finds in the modules `random` and `numpy.random`; in the thread that captures.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from functionalize.errors import text_of
from functionalize.patches import Patch

_FUNCTIONS = {
    "random": ("random", "uniform", "randint", "randrange", "gauss"),
    "numpy.random": ("random", "random_sample", "rand", "uniform", "normal", "randn", "randint"),
}
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
_METHODS = (
    *("lt", "le", "gt", "ge", "eq", "ne", "hash", "bool", "int", "float", "complex", "index", "neg", "pos", "abs"),
    *("round", "trunc", "floor", "ceil", "str", "repr", "format", "array", "reduce_ex"),
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
)


class _Unread:
    """Replaces a number, and records that it is read."""

    __slots__ = ("__weakref__", "_note", "_number")

    def __init__(self, number: Any, note: Callable[[], None]) -> None:
        self._number, self._note = number, note

    @property  # type: ignore[misc]  # Python asks the class of an object where its type says no
    def __class__(self) -> Any:
        self._note()
        return type(self._number)

    def __getattr__(self, name: str) -> Any:
        self._note()
        return getattr(self._number, name)


def _reading(name: str) -> Any:
    def method(self: _Unread, *args: Any) -> Any:
        return _Unread.__getattr__(self, name)(*args)

    return method


for _name in _METHODS:
    setattr(_Unread, f"__{_name}__", _reading(f"__{_name}__"))


class UnreadDraws:
    """The numbers that a program draws while it runs."""

    def __init__(self) -> None:
        self.calls: tuple[Callable[[], Any], ...] = ()  # to draw them again
        self._substitutes, self._is_read = list[weakref.ref[_Unread]](), False

    def rows(self) -> Iterator[Patch]:
        """Have functions that draw return substitutes."""
        for module, names in _FUNCTIONS.items():
            for name in names if module in sys.modules else ():
                yield Patch(sys.modules[module], name, partial(partial, self._drawn))

    def _drawn(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = function(*args, **kwargs)
        plain = all(type(arg) in (int, float) for arg in (*args, *kwargs.values()))
        if not plain or not isinstance(number, (int, float)):
            return number
        self.calls = (*self.calls, partial(function, *args, **kwargs))
        substitute = _Unread(number, self._note)
        self._substitutes.append(weakref.ref(substitute))
        return substitute

    def _note(self) -> None:
        self._is_read = True

    def note_error(self, error: Exception) -> bool:
        """Whether an error comes from a function that reads a substitute where it needs a number."""
        named = _Unread.__name__ in text_of(error)
        self._is_read |= named
        return named or (self._is_read and isinstance(error, TypeError))

    def decide_nothing(self) -> bool:
        """Whether the program, which is over, has neither read a number nor keeps one."""
        if any(substitute() is not None for substitute in self._substitutes):
            gc.collect()
        return not self._is_read and all(substitute() is None for substitute in self._substitutes)

    def again(self) -> None:
        """Draw as many numbers as the program has drawn."""
        for call in self.calls:
            call()
