"""What tensors keep private."""

from __future__ import annotations

import torch


def autograd_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a tensor for a view of; itself where it is none."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor
