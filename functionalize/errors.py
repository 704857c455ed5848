"""The exceptions of this package. Invariant: each says what, where, why and what to try next."""

from __future__ import annotations


class NotFunctionalError(AssertionError):
    """A graph that should be free of mutations (and views) has some; the message lists the nodes."""


class NotEquivalentError(AssertionError):
    """A transformed function and the eager one disagree; the message says in what."""
