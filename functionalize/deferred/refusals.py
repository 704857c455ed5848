"""What cannot be deferred, in words: errors of torch's fake tensors, and what to do then.

Limits: errors of torch's are known by their class or their text, written against 2.13 and 2.15.
"""

from __future__ import annotations

import re

import torch

from functionalize._torch.fakes import operator_without_fake
from functionalize.call_stack import decisive_line
from functionalize.errors import DeferredError

_MEMORY = re.compile(  # what torch says of a tensor without memory, by the function that asks for it
    r"data is not allocated yet|Cannot access data pointer|Not available for 'meta' device|_share_\w+: only available"
    r"|aten\._pin_memory"
)


def explained(error: Exception) -> DeferredError | None:
    """An error of fake tensors in other words, where it is one of those that are known."""
    operator = operator_without_fake(error) or operator_without_fake(error.__cause__)
    if operator is not None:
        return DeferredError(
            f"{operator} on deferred tensors",
            why="the operator has no meta kernel: nobody says what its results look like without computing them",
            hint="register one (torch.library.register_fake), or call the operator outside of deferred_init and pass "
            "what it gives",
            at=decisive_line(error),
        )
    if _MEMORY.search(str(error)):
        return DeferredError(
            "the construction asks for the memory of a deferred tensor",
            why="it has none yet, and what is asked behind the dispatcher cannot be answered otherwise",
            hint="ask for data by tolist(), item() or numpy(), which compute them; for memory once it is materialized",
            at=decisive_line(error),
        )
    return None


def recorded_now() -> DeferredError:
    """For a construction that makes its own tensors real while it is recorded."""
    return DeferredError(
        "a tensor is to be materialized by the construction that makes it",
        why="what the construction does to it from here on would be lost",
        hint="materialize once deferred_init has returned; to look at data, tolist(), item() and numpy() compute them",
    )


def address_asked() -> DeferredError:
    """For a program that asks where a deferred tensor lies."""
    return DeferredError(
        "the construction asks for the address of a tensor (data_ptr)",
        why="it has no memory yet",
        hint="ask once it is materialized; whether two tensors share memory tells untyped_storage()._cdata",
    )


def inside_of_trace() -> DeferredError:
    """For a construction that is deferred while a graph is traced."""
    return DeferredError(
        "deferred_init, or an operation on a deferred tensor, inside of what is traced",
        why="the trace records what runs already, and tensors of its own stand in the places of others",
        hint="construct outside, and trace what runs the module",
    )


def not_callable(value: object) -> TypeError:
    """For what is no function."""
    kind = type(value).__name__
    made = " that is made already: pass its class, and the arguments after it" if _is_made(value) else ""
    return TypeError(f"deferred_init takes a module's class or a function, and its arguments, not a {kind}{made}")


def _is_made(value: object) -> bool:
    return isinstance(value, (torch.Tensor, torch.nn.Module))


def no_tensor(function: str, expected: str, value: object) -> TypeError:
    """For an argument that is nothing that could be deferred."""
    return TypeError(f"{function} takes a {expected}, not a {type(value).__name__}")
