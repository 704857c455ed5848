"""Objects that no captured program can hold or get, refused by name where a program is captured or called.

Invariant: what is refused here would run, and be wrong, or fail with an error that does not say why.
Limits: tensors, modules, and keys of dicts that a program changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from functionalize._torch import PLAIN_TYPES
from functionalize.errors import UnsupportedProgramError
from functionalize.python_state.traversal_rules import key_behind

_UNWRAP = "capture the inner module (`.module`), and wrap the code that calls the program"
_SHARDED = "its hooks gather and scatter the parameters with collectives that write in place", _UNWRAP
# Classes of torch, by name, as torch.distributed is loaded by those who use it: why, and what to try.
_MODULES: Mapping[str, tuple[str, str]] = {
    "DistributedDataParallel": (
        "it sums gradients over processes in backward hooks, which a graph does not have",
        _UNWRAP,
    ),
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": (
        _SHARDED[0],
        "capture the module before `fully_shard`",
    ),
    "ScriptModule": (
        "TorchScript keeps its parameters and runs its code in C++, where Python cannot replace them",
        "use the original module, without torch.jit",
    ),
}


def refuse_module(module: torch.nn.Module, path: str) -> None:
    """Raise if a module is of a kind that cannot be captured.

    Raises:
        UnsupportedProgramError: it is.
    """
    for kind in type(module).__mro__:
        reasons = _MODULES.get(kind.__qualname__)
        if reasons is not None and kind.__module__.partition(".")[0] == "torch":
            what = f"the module `{path}`" if path else "the module that is captured"
            raise UnsupportedProgramError(f"{what} is a {kind.__name__}", why=reasons[0], hint=reasons[1])


def refuse_weak_keys(keys: Iterable[Any], path: str) -> None:
    """Raise if keys under which a program changed something are weak references to tensors.

    Raises:
        UnsupportedProgramError: one is.
    """
    if any(isinstance(key_behind(key), torch.Tensor) for key in keys if isinstance(key, weakref.ReferenceType)):
        raise UnsupportedProgramError(
            f"the program changes `{path}`, a dict whose keys are weak references to tensors",
            why="an entry disappears together with its tensor, and a call cannot know when",
            hint=(
                "put an object there before the call, and change its attributes; or use a dict whose keys are the "
                "tensors themselves"
            ),
        )


def refuse_tensor(tensor: torch.Tensor, what: str) -> None:
    """Raise if a tensor is of a class of its own, or of a layout that no fake tensor has.

    Raises:
        UnsupportedProgramError: it is.
    """
    if tensor.is_nested or tensor.is_mkldnn:
        raise UnsupportedProgramError(
            f"{what} is a {'nested' if tensor.is_nested else 'mkldnn'} tensor",
            why="a program is captured with fake tensors, which cannot have this layout",
            hint="pass padded or dense tensors",
        )
    if type(tensor) in PLAIN_TYPES:
        return
    if is_lazy(tensor):
        raise UnsupportedProgramError(
            f"{what} has no size yet",
            why="a lazy module makes its parameters when it first runs",
            hint="run the module once before it is captured",
        )
    raise UnsupportedProgramError.of_subclass(type(tensor), what)
