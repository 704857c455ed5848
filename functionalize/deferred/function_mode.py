"""What a construction does above the dispatcher, where no dispatch mode is told of it.

Invariant: a construction does here what it would do on real tensors. Limits: calls by the public name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, UninitializedTensorMixin
from torch.overrides import TorchFunctionMode

from functionalize._torch import FakeTensor, below_all_modes, storage_key
from functionalize.deferred.refusals import address_asked

_MAKE_LAZY = {kind.__new__.__code__ for kind in (UninitializedParameter, UninitializedBuffer)}
_Copies = dict[Any, Any]  # what `copy.deepcopy` has copied already, by identity


class DeferredFunctionMode(TorchFunctionMode):
    """Active while a construction is recorded."""

    def __init__(
        self, value: Callable[[torch.Tensor], torch.Tensor], become: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """``value``: what a deferred tensor comes to; ``become`` makes a real tensor object a deferred one."""
        super().__init__()
        self._value, self._become = value, become

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty and args == (0,) and _makes_uninitialized():
            return below_all_modes(func, args, kwargs or {})  # it holds nothing that could be deferred
        if args and isinstance(args[0], UninitializedTensorMixin):
            initialized = func == _SET_DATA and isinstance(args[1], FakeTensor)
            return self._become(*args) if initialized else below_all_modes(func, args, kwargs or {})
        if args and isinstance(args[0], FakeTensor):
            if func is _DEEPCOPY and args[0].is_leaf:
                return _deepcopy(*args)
            if func is _DATA_PTR:
                raise address_asked()
            if func is _NUMPY:
                array = self._value(args[0]).numpy(**(kwargs or {}))
                array.flags.writeable = False  # a write to it would not be seen
                return array
            if func == _SET_DATA and not isinstance(args[1], FakeTensor):
                # The memory of the real tensor cannot be had: a copy's, since nothing may write to what is outside.
                return func(args[0], args[1].clone())
        return func(*args, **(kwargs or {}))


def _makes_uninitialized() -> bool:
    """Whether the function that called torch makes a parameter or a buffer of a lazy module."""
    return sys._getframe(2).f_code in _MAKE_LAZY


_DEEPCOPY, _NUMPY, _DATA_PTR = torch.Tensor.__deepcopy__, torch.Tensor.numpy, torch.Tensor.data_ptr
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # stubs call it a tensor


def _deepcopy(tensor: torch.Tensor, memo: _Copies) -> torch.Tensor:
    """As ``copy.deepcopy`` copies a real tensor: those that shared memory do so as copies; parameters do not."""
    if id(tensor) in memo:
        copied: torch.Tensor = memo[id(tensor)]
        return copied
    with torch.no_grad():
        if isinstance(tensor, torch.nn.Parameter):
            new: Any = torch.nn.Parameter(tensor.data.clone(memory_format=torch.preserve_format), tensor.requires_grad)
        else:
            new = _at_its_place(tensor, memo).requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        new.grad = _deepcopy(tensor.grad, memo)
    for name, value in tensor.__dict__.items():
        if name not in new.__dict__:
            setattr(new, name, value)
    memo[id(tensor)] = new
    return new  # type: ignore[no-any-return]


def _at_its_place(tensor: torch.Tensor, memo: _Copies) -> torch.Tensor:
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
