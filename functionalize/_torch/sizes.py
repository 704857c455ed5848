"""Sizes that may be symbols: what is known of them, asked without a guard.

Invariant: no answer pins a symbol. Limits: loads no sympy, which where there are symbols torch has loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # no public path to either

from functionalize._torch.modes import TorchDispatchMode
from functionalize._torch.tensors import is_symbolic

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbol(number: Any) -> bool:
    return isinstance(number, torch.SymInt)


def hint_of(number: Any, supposed: int | None = None) -> Any:
    """The size that a symbol has in this trace, without a guard; of one that comes from data what is to be supposed."""
    node = number.node
    if node.hint is not None:
        return node.hint
    if node.shape_env.has_guarding_hint(node.expr):  # was equated with sizes of inputs after it was made
        return node.shape_env.guarding_hint_or_throw(node.expr)
    return None if supposed is None else node.shape_env.optimization_hint(node.expr, fallback=supposed)


def unbacked(numbers: Sequence[Any]) -> bool:
    """Whether some size is known when the program runs only: it comes from data, not from the inputs' sizes."""
    return any(type(number) is not int and hint_of(number) is None for number in numbers)


def sized_by_data(tensor: FakeTensor, numbers: Sequence[Any] = ()) -> bool:
    """Whether sizes, of a tensor or among numbers, are known when the program runs only, or were so until a guard."""
    if not (is_symbolic(tensor) or any(is_symbol(number) for number in numbers)):
        return False
    return tensor.fake_mode.static_shapes or unbacked((*tensor.size(), *filter(is_symbol, numbers)))


def forget_offset(handle: FakeTensor) -> None:
    """Let nobody wait for the symbol of a view's storage offset: its copy starts at zero."""
    environment, offset = handle.fake_mode.shape_env, handle.storage_offset()
    if environment is not None and isinstance(offset, torch.SymInt):
        pending = environment.pending_fresh_unbacked_symbols
        pending[:] = [symbol for symbol in pending if symbol not in offset.node.expr.free_symbols]


def has_symbol(value: Any) -> bool:
    """Whether it is a symbol, or a tensor of symbolic sizes."""
    return isinstance(value, SYMBOLS) or (isinstance(value, torch.Tensor) and is_symbolic(value))


def symbols_in_making(modes: Sequence[TorchDispatchMode]) -> Mapping[Any, Any]:
    """The symbols that fake tensors of plain sizes get while a program runs, from data: by now, and later."""
    for mode in modes:
        if isinstance(mode, FakeTensorMode) and mode.static_shapes and mode.shape_env is not None:
            ranges: Mapping[Any, Any] = mode.shape_env.var_to_range
            return ranges
    return {}


def has_symbols(modes: Sequence[TorchDispatchMode]) -> bool:
    """Whether fake tensors made by these modes have symbolic sizes."""
    return any(isinstance(mode, FakeTensorMode) and mode.shape_env is not None for mode in modes)
