"""functionalize: turn any PyTorch program into one without mutation, and without views if asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functionalize.api import functionalize as functionalize
    from functionalize.capturing import capture as capture
    from functionalize.errors import (
        DataDependentError,
        InputMismatchError,
        NotEquivalentError,
        NotFunctionalError,
        UnsupportedMutationError,
    )
    from functionalize.export.dynamo import dynamo_backend as dynamo_backend

__all__ = [
    "DataDependentError",
    "InputMismatchError",
    "NotEquivalentError",
    "NotFunctionalError",
    "UnsupportedMutationError",
    "capture",
    "dynamo_backend",
    "functionalize",
]

_HOME = dict.fromkeys(__all__, "functionalize.errors") | {
    "capture": "functionalize.capturing",
    "dynamo_backend": "functionalize.export.dynamo",
    "functionalize": "functionalize.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``python -m functionalize.codegen`` runs without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
