"""The types of operators, and what they tell of themselves.

Invariant: nothing here runs an op. Limits: written against torch 2.13 and 2.15.
"""

from __future__ import annotations

from functools import cache

import torch
from torch._higher_order_ops.auto_functionalize import (  # the graph form of a mutable custom op
    auto_functionalized,
    auto_functionalized_v2,
    can_auto_functionalize,
)

__all__ = ["auto_functionalized", "auto_functionalized_v2", "can_auto_functionalize"]


OpOverload = torch._ops.OpOverload  # the type of every op; torch.ops has no public name for it

HigherOrderOperator = torch._ops.HigherOrderOperator


def decomposes(op: OpOverload) -> bool:
    """Whether an op has a CompositeImplicitAutograd kernel."""
    try:
        return bool(op._can_decompose())
    except RuntimeError:  # prim::device and its like are known to TorchScript alone, not to the dispatcher
        return False


@cache
def counts_versions(op: OpOverload) -> bool:
    """Whether an op that writes has grown the version counters of what it writes before modes see it, or never does."""
    if op.namespace == "aten":  # of those without such a kernel only the `foreach` ones call others that have one
        return not op.name().startswith("aten::_foreach_")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView"))
