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
    from functionalize.backends.arrays.interpreter import Backend as Backend
    from functionalize.backends.arrays.interpreter import Interpreter as Interpreter
    from functionalize.backends.arrays.program import ArrayProgram as ArrayProgram
    from functionalize.backends.arrays.registry import Lowerings as Lowerings

_HOME = {
    "ArrayProgram": "functionalize.backends.arrays.program",
    "Backend": "functionalize.backends.arrays.interpreter",
    "Interpreter": "functionalize.backends.arrays.interpreter",
    "Lowerings": "functionalize.backends.arrays.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
