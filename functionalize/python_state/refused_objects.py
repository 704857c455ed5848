"""Objects that no captured program can hold or get, refused by name where a program is captured or called.

Invariant: a program that is refused here would run and be wrong, or fail with an error that does not say why.
Limits: tensors, modules, and keys of dicts that a program changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from functionalize._torch import PLAIN_TYPES
from functionalize._torch.subclasses.wrappers import is_wrapper_class
from functionalize.errors import UnsupportedProgramError
from functionalize.python_state.ownership import root_of
from functionalize.python_state.traversal_rules import key_behind
from functionalize.refusals.python_objects import WEAK_KEYS_CHANGED
from functionalize.refusals.refusal import Refusal
from functionalize.refusals.tensors import (
    LAZY_PARAMETER,
    SCRIPT_MODULE,
    SHARDED_MODULE,
    SUBCLASS,
    UNSUPPORTED_LAYOUT,
)

# Classes of torch by name, so that torch.distributed is not loaded.
_MODULES: Mapping[str, Refusal[UnsupportedProgramError]] = {
    "FullyShardedDataParallel": SHARDED_MODULE,
    "ScriptModule": SCRIPT_MODULE,
}


def refused_base(cls: type) -> type | None:
    """The first class in ``_MODULES`` on which a class of modules is based; None if such modules can be captured."""
    named = (base for base in cls.__mro__ if base.__qualname__ in _MODULES)
    return next((base for base in named if root_of(base.__module__) == "torch"), None)


def module_refused(base: type, path: str) -> UnsupportedProgramError:
    """Why a module cannot be captured, from its base class in ``_MODULES``."""
    what = f"the module `{path}`" if path else "the module that is captured"
    return _MODULES[base.__qualname__].error(module=what, kind=base.__name__)


def refuse_weak_keys(keys: Iterable[Any], path: str) -> None:
    """Raise if keys under which a program changed something are weak references to tensors.

    Raises:
        UnsupportedProgramError: a key is a weak reference to a tensor.
    """
    if any(isinstance(key_behind(key), torch.Tensor) for key in keys if isinstance(key, weakref.ReferenceType)):
        raise WEAK_KEYS_CHANGED.error(path=path)


def is_opened(tensor: torch.Tensor, what: str) -> bool:
    """Whether a tensor is a wrapper: a program takes its parts.

    Raises:
        UnsupportedProgramError: it is of another subclass, or has a layout that fake tensors do not support.
    """
    if type(tensor) not in PLAIN_TYPES:
        if is_lazy(tensor):
            raise LAZY_PARAMETER.error(tensor=what)
        if not is_wrapper_class(type(tensor)):
            raise SUBCLASS.error(tensor=what, kind=type(tensor).__name__)
        return True
    if tensor.is_nested or tensor.is_mkldnn:
        raise UNSUPPORTED_LAYOUT.error(tensor=what, layout="nested" if tensor.is_nested else "mkldnn")
    return False
