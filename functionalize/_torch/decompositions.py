"""Torch's own decompositions of operators, and how they decompose one call of an operator.

Invariant: a decomposition is traced on fake tensors, whose symbolic sizes stay symbols.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

# `torch.export.default_decompositions()` leaves out most of this table, which its other rows cover.
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher

# The mode of fake tensors, without which their ops do not run.
from torch._guards import detect_fake_mode

# For `isinstance`: an operator with its overloads.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree  # torch has no public pytree

from functionalize.ops import tables

__all__ = ["HigherOrderOperator", "OpOverloadPacket", "decomposition_of", "traced_call"]


@functools.cache
def _core() -> Mapping[Any, Callable[..., Any]]:
    return torch.export.default_decompositions()


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """A function of an operator's arguments that computes the same by other operators; None if torch lacks one."""
    for table in (_core(), decomposition_table):
        if op in table:
            return table[op]
    return op.decompose if isinstance(op, OpOverload) and tables.decomposes(op) else None


def traced_call(function: Callable[..., Any], leaves: list[Any], gives: Any = None) -> torch.fx.GraphModule:
    """The operators that a function of fake tensors, symbols and plain values runs, as a graph of those leaves.

    ``gives``: its result, if known. For a call on symbols alone, the result shows to which mode they belong.
    """
    mode = detect_fake_mode([leaf for leaf in pytree.tree_leaves((leaves, gives)) if isinstance(leaf, torch.Tensor)])
    with torch.no_grad():
        if mode is None:
            return make_fx(function, tracing_mode="fake")(*leaves)
        kernels = enable_python_dispatcher() if mode.shape_env is not None else contextlib.nullcontext()
        with mode, kernels:  # for symbols: some kernels in C++ take only integers
            return make_fx(function)(*leaves)
