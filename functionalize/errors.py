"""The exceptions of this package. Invariant: each says what, where, why and what to try next."""

from __future__ import annotations

from functionalize._torch import user_frame


class NotFunctionalError(AssertionError):
    """A graph that should be free of mutations (and views) has some; the message lists the nodes."""


class NotEquivalentError(AssertionError):
    """A transformed function and the eager one disagree; the message says in what."""


class UnsupportedMutationError(RuntimeError):
    """A write that no functional program can express; the message says what, where, why and what to try."""

    def __init__(self, what: str, *, why: str, hint: str) -> None:
        super().__init__(f"{what}\n    at   {user_frame()}\n    why  {why}\n    try  {hint}")
