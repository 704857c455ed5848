"""``tensor.as_subclass``: torch makes a view that modes do not see, and a fake tensor cannot have another class.

Invariant: the class of fake tensors is as it was once all calls have ended. Limits: the method, on fake tensors;
``Sub(tensor)`` is left to torch.
"""

from __future__ import annotations

import torch

from functionalize._torch import FakeTensor, unwrap_functorch
from functionalize.patches import Patch, Patches
from functionalize.refusals.tensors import SUBCLASS

_METHOD = torch.Tensor.as_subclass


def as_subclass_seen() -> Patches:
    """For a call: make modes see what ``as_subclass`` does."""
    return Patches([Patch.by(_as_subclass, FakeTensor, "as_subclass")])


def _as_subclass(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    if unwrap_functorch(tensor) is not tensor:
        return _METHOD(tensor, cls)
    if cls in (torch.Tensor, FakeTensor):
        return torch.ops.aten.alias.default(tensor)  # type: ignore[no-any-return]
    raise SUBCLASS.error(tensor="a tensor that the program makes with `as_subclass`", kind=cls.__name__)
