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
            why="the operator has no meta kernel, so the shapes and dtypes of its results are unknown until it runs",
            hint="register one with torch.library.register_fake, or call the operator outside deferred_init and "
            "pass its result",
            at=decisive_line(error),
        )
    if _MEMORY.search(str(error)):
        return DeferredError(
            "the construction reads the memory of a deferred tensor",
            why=(
                "a deferred tensor has no memory yet, and the read does not go through the dispatcher, where it "
                "would be computed"
            ),
            hint=(
                "read values with tolist(), item() or numpy(), which compute them; read memory after the tensor is "
                "materialized"
            ),
            at=decisive_line(error),
        )
    return None


def recorded_now() -> DeferredError:
    """For a construction that makes its own tensors real while it is recorded."""
    return DeferredError(
        "a tensor is materialized inside the construction that makes it",
        why="what the construction does to it afterwards would be lost",
        hint="materialize after deferred_init has returned; to read values, use tolist(), item() or numpy()",
    )


def address_asked() -> DeferredError:
    """For a program that asks where a deferred tensor lies."""
    return DeferredError(
        "the construction reads the address of a deferred tensor (data_ptr)",
        why="a deferred tensor has no memory yet",
        hint=(
            "read it after the tensor is materialized; to learn whether two tensors share memory, compare "
            "untyped_storage()._cdata"
        ),
    )


def inside_of_trace() -> DeferredError:
    """For a construction that is deferred while a graph is traced."""
    return DeferredError(
        "deferred_init, or an operation on a deferred tensor, inside a traced function",
        why="the tracer records the operators itself, and replaces tensors by its own",
        hint="construct the module outside, and trace the function that runs it",
    )


def not_callable(value: object) -> TypeError:
    """For what is no function."""
    kind = type(value).__name__
    made = " that exists already: pass its class, followed by the arguments" if _is_made(value) else ""
    return TypeError(f"deferred_init takes a module's class or a function, and its arguments, not a {kind}{made}")


def _is_made(value: object) -> bool:
    return isinstance(value, (torch.Tensor, torch.nn.Module))


def no_tensor(function: str, expected: str, value: object) -> TypeError:
    """For an argument that is nothing that could be deferred."""
    return TypeError(f"{function} takes a {expected}, not a {type(value).__name__}")
