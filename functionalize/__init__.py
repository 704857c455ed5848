"""functionalize: turn any PyTorch program into one without mutation, and without views if asked for."""

from functionalize.api import functionalize
from functionalize.errors import NotEquivalentError, NotFunctionalError, UnsupportedMutationError

__all__ = ["NotEquivalentError", "NotFunctionalError", "UnsupportedMutationError", "functionalize"]
