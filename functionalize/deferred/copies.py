"""Deep copies of deferred tensors.

Invariant: copies share memory where copies of real tensors would. Limits: a storage that tensors of several dtypes
share is copied once for each dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize._torch.deferred import attributes_of_users

_Copies = dict[Any, Any]  # the memo of `copy.deepcopy`: what it has copied, by identity


def copied(tensor: torch.Tensor, memo: _Copies) -> torch.Tensor:
    """Copy a tensor as ``copy.deepcopy`` copies a real one: copies share memory as originals do, except parameters."""
    if id(tensor) in memo:
        earlier: torch.Tensor = memo[id(tensor)]
        return earlier
    with torch.no_grad():
        if isinstance(tensor, torch.nn.Parameter):
            new: Any = torch.nn.Parameter(tensor.data.clone(memory_format=torch.preserve_format), tensor.requires_grad)
        else:
            new = _in_copied_storage(tensor, memo).requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        new.grad = copied(tensor.grad, memo)
    for name, value in attributes_of_users(tensor).items():  # type: ignore[arg-type]
        setattr(new, name, copy.deepcopy(value, memo))
    if isinstance(tensor, torch.nn.Buffer):
        new = torch.nn.Buffer(new, persistent=tensor.persistent)
    memo[id(tensor)] = new
    return new  # type: ignore[no-any-return]


def _in_copied_storage(tensor: torch.Tensor, memo: _Copies) -> torch.Tensor:
    """A copy of a tensor, in a copy of its storage."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    where = tensor.size(), tensor.stride(), tensor.storage_offset()
    key = "storage", storage_key(tensor), tensor.dtype
    if tensor.is_contiguous() and tensor.numel() == count:
        whole = memo[key] if key in memo else tensor.detach().clone().view(-1)
    else:
        whole = memo[key] if key in memo else tensor.detach().as_strided((count,), (1,), 0).clone()
    memo[key] = whole
    return whole.as_strided(*where).detach() if tensor.dim() != 1 or tensor.numel() != count else whole.detach()
