"""Ops that give a tensor the data of another: copies between devices, and `tensor.data = other` as an operator.

Invariant: a copy to the CPU is complete when a call returns. Limits: versions of torch that have the operator, by which
Dynamo records such assignments.
"""

from __future__ import annotations

import torch

from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.writing_call import Kwargs

SETTING = (torch.ops.aten.shallow_copy_data_.default,) if hasattr(torch.ops.aten, "shallow_copy_data_") else ()


def set_data(context: FunctionalizationContext, handle: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Give a tensor the data of another, and its layout."""
    context.set_data(handle, source)
    return handle


def waiting(kwargs: Kwargs) -> Kwargs:
    """Options that make a copy to the CPU complete when it returns: a graph does not show when the program waits."""
    waits = kwargs.get("non_blocking") and torch.device(kwargs.get("device") or "meta").type == "cpu"
    return {name: value for name, value in kwargs.items() if waits and name != "non_blocking"} or kwargs
