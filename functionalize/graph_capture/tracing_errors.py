"""Errors that torch raises since tensors are fake while a program is captured, in words that say what to do.

Limits: known by their text, written against torch 2.13 and 2.15; another one goes on to the caller as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from functionalize.call_stack import decisive_line
from functionalize.errors import UnsupportedProgramError


class _Known(NamedTuple):
    """What an error says, and what is meant: what the program does, why that cannot be captured, what to try."""

    text: str
    what: str
    why: str
    hint: str


_OPERATOR = "have an operator of your own do it (torch.library.custom_op), which a capture takes as a whole"
_KNOWN = (
    _Known(
        "Cannot access data pointer of Tensor",
        "the program asks where in memory a tensor lies",
        "a captured program runs on other tensors at each call",
        f"leave data_ptr() out of what is captured, or {_OPERATOR}",
    ),
    _Known(
        ".numpy() is not supported for tensor subclasses",
        "the program makes a NumPy array of a tensor",
        "NumPy looks at the values, and there are none while a program is captured",
        f"compute with torch, or {_OPERATOR}",
    ),
    _Known(
        "Tried to backward() through example input",
        "the program runs a backward through how its inputs were computed",
        "a captured program begins with its inputs: what lies before them is none of its graph",
        "call backward() outside of what is captured, or pass leaves and compute the inputs of them inside",
    ),
)


def explained(error: Exception) -> UnsupportedProgramError | None:
    """The same error in other words, if it is one of those."""
    for known in _KNOWN:
        if isinstance(error, RuntimeError) and known.text in str(error):
            return UnsupportedProgramError(known.what, why=known.why, hint=known.hint, at=decisive_line(error))
    return None
