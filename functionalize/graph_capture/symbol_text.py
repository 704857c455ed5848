"""Numbers that the data tell, as text: a program that writes one down asks for its value.

Invariant: text that torch makes of symbols, in errors and logs of its own, is as it was; so is that of other traces.
Limits: what makes the text is code of the program, or of a library that it calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize.call_stack import is_of_program

_VALUES: dict[Any, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_METHODS = ("__repr__", "__format__")  # `str` comes to the first


@contextlib.contextmanager
def text_of_symbols(environment: Any) -> Iterator[None]:
    """Have symbols of an environment be written as their values, each of which is a decision then, or a refusal."""
    before = [(kind, name, getattr(kind, name)) for kind in _VALUES for name in _METHODS]
    for kind, name, method in before:
        setattr(kind, name, _written(method, name, _VALUES[kind], environment))
    try:
        yield
    finally:
        for kind, name, method in before:
            if name in vars(object) and method is getattr(object, name):
                delattr(kind, name)
            else:
                setattr(kind, name, method)


def _written(method: Callable[..., str], name: str, value_of: Callable[[Any], Any], environment: Any) -> Any:
    def written(symbol: Any, *args: Any) -> str:
        ours = getattr(symbol.node, "shape_env", None) is environment and environment is not None
        if ours and is_of_program(sys._getframe(1).f_code):
            text: str = getattr(value_of(symbol), name)(*args)
            return text
        return method(symbol, *args)

    return written
