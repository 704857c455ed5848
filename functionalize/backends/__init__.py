"""Programs without mutation for other compilers. Invariant: nothing is imported before it is asked for.

Classes for a backend of your own:
    Lowerings       a table: what runs an operator on the arrays of a backend
    Backend         a table, and how tensors, dtypes and random numbers become those of the backend
    Interpreter     runs a graph by a backend
    ArrayProgram    a captured program by a backend: (state, *args) -> (new state, outputs)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functionalize.backends.array_program import ArrayProgram as ArrayProgram
    from functionalize.backends.interpreter import Backend as Backend
    from functionalize.backends.interpreter import Interpreter as Interpreter
    from functionalize.backends.registry import Lowerings as Lowerings

_HOME = {
    "ArrayProgram": "functionalize.backends.array_program",
    "Backend": "functionalize.backends.interpreter",
    "Interpreter": "functionalize.backends.interpreter",
    "Lowerings": "functionalize.backends.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
