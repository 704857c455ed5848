"""Explains what cannot be deferred: errors of torch's fake tensors, and what to do instead.

Limits: torch's errors are recognized by their class or their text, as of 2.13 and 2.15.
"""

from __future__ import annotations

import re

import torch

from functionalize._torch.fakes import operator_without_fake
from functionalize.call_stack import decisive_line
from functionalize.errors import DeferredError
from functionalize.refusals.deferred import (
    DEFERRED_MEMORY_READ,
    NO_META_KERNEL,
)

_MEMORY = re.compile(  # what torch says of a tensor without memory, by the function that asks for it
    r"data is not allocated yet|Cannot access data pointer|Not available for 'meta' device|_share_\w+: only available"
    r"|aten\._pin_memory"
)


def explained(error: Exception) -> DeferredError | None:
    """The explanation of an error of fake tensors; None if the error is not recognized."""
    operator = operator_without_fake(error) or operator_without_fake(error.__cause__)
    if operator is not None:
        return NO_META_KERNEL.error(decisive_line(error), op=operator)
    if _MEMORY.search(str(error)):
        return DEFERRED_MEMORY_READ.error(decisive_line(error))
    return None


def not_callable(value: object) -> TypeError:
    """The error for a value that is not callable."""
    type_name = type(value).__name__
    is_made = isinstance(value, (torch.Tensor, torch.nn.Module))
    made = " that exists already: pass its class, followed by the arguments" if is_made else ""
    return TypeError(f"deferred_init takes a module's class or a function, and its arguments, not a {type_name}{made}")


def wrong_type(function: str, expected: str, value: object) -> TypeError:
    """The error for an argument that is not of the expected type."""
    return TypeError(f"{function} takes a {expected}, not a {type(value).__name__}")
