"""``copy.copy`` and ``copy.deepcopy`` of tensors: torch reads the memory, which handles do not have.

Invariant: tensors that share a storage are copied with it, once, so that their copies share a storage; but a parameter
is copied alone, without its gradient. Limits: does not copy attributes that a program gave a tensor; a copy of a part
is a view of the copied whole, unlike eager's.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize._torch import FakeTensor, gradient_hooks, storage_key
from functionalize.refusals.values import TENSOR_SAVED

_REFUSING: Any = torch.Tensor.__deepcopy__  # raises for tensors that are not leaves

_REDUCING: Any = torch.Tensor.__reduce_ex__
_KINDS = {"_is_param", "_is_buffer", "persistent"}  # what makes a tensor a parameter, or a buffer


def deep_copy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """The result of ``tensor.__deepcopy__(memo)``.

    Raises:
        RuntimeError: as in eager, if the tensor is not a leaf.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if not tensor.is_leaf:
        return _REFUSING(tensor, memo)  # type: ignore[no-any-return]
    is_parameter = isinstance(tensor, torch.nn.Parameter)  # its elements alone are copied
    with torch.no_grad():
        made = tensor.clone() if is_parameter else _copied(tensor, memo)
        made.requires_grad_(tensor.requires_grad)
        for name in vars(tensor).keys() & _KINDS:  # of fake tensors, which have one class
            setattr(made, name, getattr(tensor, name))
        if tensor.grad is not None and not is_parameter:
            made.grad = deep_copy(tensor.grad, memo)
    memo[id(tensor)] = made
    return made


def _copied(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storages = memo.setdefault("torch", {})  # torch notes storages there by their address
    key = deep_copy, storage_key(tensor), tensor.dtype
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.numel() == count and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if key not in storages:
        storages[key] = tensor.clone() if whole else tensor.as_strided((count,), (1,), 0).clone()
        if whole:
            return storages[key]  # type: ignore[no-any-return]
    return tensor.new_empty(0).set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())


def reduced(tensor: torch.Tensor, protocol: Any) -> Any:
    """``tensor.__reduce_ex__(protocol)`` for ``copy.copy``, which makes from it a tensor in the same memory.

    Raises:
        UnsupportedProgramError: the tensor is sparse, or has hooks.
    """
    if not isinstance(tensor, FakeTensor):
        return _REDUCING(tensor, protocol)
    if tensor.layout is not torch.strided or any(gradient_hooks(tensor)):
        raise TENSOR_SAVED.error()
    return _InTheSameMemory(tensor), ()


class _InTheSameMemory:
    """Makes a tensor with the layout and memory of another, unknown to autograd."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> torch.Tensor:
        tensor = self._tensor
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(tensor.data, tensor.requires_grad)
        return tensor.data.requires_grad_(tensor.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TENSOR_SAVED.error()
