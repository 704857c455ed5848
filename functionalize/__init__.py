"""functionalize: turn any PyTorch program into one without mutation, and without views if asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functionalize.backends.dynamo import dynamo_backend as dynamo_backend
    from functionalize.backends.exported_program import from_exported_program as from_exported_program
    from functionalize.backends.jax.jaxify import jaxify as jaxify
    from functionalize.deferred.api import (
        deferred_init,
        is_deferred,
        materialize_module,
        materialize_tensor,
    )
    from functionalize.deferred.fakes import fake_mode, is_fake, meta_like
    from functionalize.errors import (
        DataDependentError,
        DecisionsAssertedWarning,
        DeferredError,
        InputMismatchError,
        NotCapturedWarning,
        NotDeferredError,
        NotEquivalentError,
        NotFunctionalError,
        TrainingModeWarning,
        UnsupportedExportError,
        UnsupportedMutationError,
        UnsupportedProgramError,
    )
    from functionalize.graph_capture.capture import capture as capture
    from functionalize.transform.api import functionalize as functionalize

__all__ = [
    "DataDependentError",
    "DecisionsAssertedWarning",
    "DeferredError",
    "InputMismatchError",
    "NotCapturedWarning",
    "NotDeferredError",
    "NotEquivalentError",
    "NotFunctionalError",
    "TrainingModeWarning",
    "UnsupportedExportError",
    "UnsupportedMutationError",
    "UnsupportedProgramError",
    "capture",
    "deferred_init",
    "dynamo_backend",
    "fake_mode",
    "from_exported_program",
    "functionalize",
    "is_deferred",
    "is_fake",
    "jaxify",
    "materialize_module",
    "materialize_tensor",
    "meta_like",
]

_DEFERRED = ("deferred_init", "is_deferred", "materialize_tensor", "materialize_module")
_FAKES = ("fake_mode", "is_fake", "meta_like")
_HOME = dict.fromkeys(__all__, "functionalize.errors") | {
    **dict.fromkeys(_DEFERRED, "functionalize.deferred.api"),
    **dict.fromkeys(_FAKES, "functionalize.deferred.fakes"),
    "capture": "functionalize.graph_capture.capture",
    "dynamo_backend": "functionalize.backends.dynamo",
    "from_exported_program": "functionalize.backends.exported_program",
    "functionalize": "functionalize.transform.api",
    "jaxify": "functionalize.backends.jax.jaxify",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``python -m functionalize.codegen`` runs without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
