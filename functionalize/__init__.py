"""functionalize: turn any PyTorch program into one without mutation, and without views if asked for.

Functions:
    functionalize           transform a function: no intermediate tensor is mutated
    capture                 record a module or a function as a graph without mutation
    dynamo_backend          a backend for torch.compile that gives a compiler such graphs
    from_exported_program   a captured program from a torch.export.ExportedProgram
    jaxify                  a torch function or module as a function of JAX arrays
    deferred_init           construct a module on fake tensors, and record how to compute them
    is_deferred             whether a tensor or a module is deferred
    materialize_tensor      compute a deferred tensor, or the shard of it that a rank holds
    materialize_module      compute the parameters and buffers of a deferred module, in place
    fake_mode               a context in which every tensor that is made is fake
    is_fake                 whether a tensor is fake
    meta_like               a tensor on device meta like a fake one

Classes:
    CapturedProgram             what capture returns: call it, read its graph, export it
    Guard                       a condition that a call must meet (program.guards)
    Mutation                    a write to an input or to state (program.mutations)
    Variant                     a graph for calls that take the same branches (program.variants)

Errors and warnings:
    DataDependentError          the program depends on tensor values in a way that a graph cannot hold
    DeferredError               a construction cannot be deferred or materialized
    InputMismatchError          a program is called with inputs that it was not captured for
    NotDeferredError            a fake tensor was not made by deferred_init
    NotEquivalentError          a program and its original give different results
    NotFunctionalError          a graph that should have no mutation has one
    UnsupportedExportError      a backend cannot represent the program
    UnsupportedMutationError    the program has a write that no functional program can express
    UnsupportedProgramError     the program cannot be captured
    DecisionsAssertedWarning    an export asserts the outcomes of branches on tensor values
    NotCapturedWarning          a call ran the original, as it could not be captured
    TrainingModeWarning         a module is exported in training mode
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functionalize.backends.dynamo import dynamo_backend as dynamo_backend
    from functionalize.backends.export.exported_program import from_exported_program as from_exported_program
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
    from functionalize.runtime.calls.program import CapturedProgram as CapturedProgram
    from functionalize.runtime.calls.program import Mutation as Mutation
    from functionalize.runtime.calls.variants import Variant as Variant
    from functionalize.runtime.guards.guard import Guard as Guard
    from functionalize.transform.api import functionalize as functionalize

__all__ = [
    "CapturedProgram",
    "DataDependentError",
    "DecisionsAssertedWarning",
    "DeferredError",
    "Guard",
    "InputMismatchError",
    "Mutation",
    "NotCapturedWarning",
    "NotDeferredError",
    "NotEquivalentError",
    "NotFunctionalError",
    "TrainingModeWarning",
    "UnsupportedExportError",
    "UnsupportedMutationError",
    "UnsupportedProgramError",
    "Variant",
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

if importlib.util.find_spec("jax") is None:  # so that `help` and `import *` can import all of them
    __all__.remove("jaxify")

_DEFERRED = ("deferred_init", "is_deferred", "materialize_tensor", "materialize_module")
_FAKES = ("fake_mode", "is_fake", "meta_like")
_HOME = dict.fromkeys(__all__, "functionalize.errors") | {
    **dict.fromkeys(_DEFERRED, "functionalize.deferred.api"),
    **dict.fromkeys(_FAKES, "functionalize.deferred.fakes"),
    "CapturedProgram": "functionalize.runtime.calls.program",
    "Guard": "functionalize.runtime.guards.guard",
    "Mutation": "functionalize.runtime.calls.program",
    "Variant": "functionalize.runtime.calls.variants",
    "capture": "functionalize.graph_capture.capture",
    "dynamo_backend": "functionalize.backends.dynamo",
    "from_exported_program": "functionalize.backends.export.exported_program",
    "functionalize": "functionalize.transform.api",
    "jaxify": "functionalize.backends.jax.jaxify",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``python -m functionalize.codegen`` runs without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names; `jaxify` only where jax is installed."""
    return list(__all__)
