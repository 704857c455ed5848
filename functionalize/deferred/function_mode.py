"""Intercepts calls of a construction to functions of torch that no dispatch mode sees.

Invariant: they do what they would do on real tensors. Limits: calls by the public name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from functionalize._torch import FakeTensor, below_all_modes, pytree
from functionalize.refusals.deferred import DEFERRED_ADDRESS_READ

_LAZY = (UninitializedParameter, UninitializedBuffer)
_MAKE_LAZY = {lazy.__new__.__code__ for lazy in _LAZY}


class DeferredFunctionMode(TorchFunctionMode):
    """Active while a construction is recorded."""

    def __init__(
        self, value: Callable[[torch.Tensor], torch.Tensor], become: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """``value`` computes a deferred tensor; ``become`` makes an uninitialized tensor object a deferred one."""
        super().__init__()
        self._value, self._become = value, become
        self._held: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty and args == (0,) and _makes_uninitialized():
            return below_all_modes(func, args, kwargs or {})  # it has no data to defer
        if args and isinstance(args[0], _LAZY):
            initialized = func == _SET_DATA and isinstance(args[1], FakeTensor)
            return self._become(*args) if initialized else below_all_modes(func, args, kwargs or {})
        if func in _TO_DEVICES and not torch.cuda.is_available():
            func, args, kwargs = _to_missing_device(func, args, kwargs or {})
        if func in _OF_LISTS and args and isinstance(args[0], (list, tuple)):
            args = (pytree.tree_map_only(FakeTensor, self._value, args[0]), *args[1:])
        if args and isinstance(args[0], FakeTensor):
            return self._of_deferred(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _of_deferred(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call on a deferred tensor."""
        if func is _DATA_PTR:
            raise DEFERRED_ADDRESS_READ.error()
        if func is _FORMAT and not args[0].dim():
            return format(self._value(args[0]), *args[1:])
        if func in _ARRAYS:
            array = func(self._value(args[0]), *args[1:], **kwargs)
            array.flags.writeable = False  # a write to it would not be recorded
            return array
        if func in _STORAGES:
            self._held.append(args[0])  # only its tensors say what a storage holds
        if func == _SET_DATA and not isinstance(args[1], FakeTensor):
            # It gets the memory of a copy: the construction must not write to the real tensor.
            return func(args[0], args[1].clone())
        return func(*args, **kwargs)


def _makes_uninitialized() -> bool:
    """Whether the function that called torch makes a parameter or a buffer of a lazy module."""
    return sys._getframe(2).f_code in _MAKE_LAZY


_ARRAYS, _DATA_PTR = (torch.Tensor.numpy, torch.Tensor.__array__), torch.Tensor.data_ptr
_FORMAT = torch.Tensor.__format__
_OF_LISTS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)  # they read the tensors of a list
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # stubs call it a tensor


def _to_missing_device(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A move to CUDA on a machine without it, with a device index: else torch asks the driver for a device."""

    def with_index(value: Any) -> Any:
        plain = isinstance(value, (str, torch.device)) and torch.device(value) == torch.device("cuda")
        return torch.device("cuda", 0) if plain else value

    if func is _CUDA:
        device, *rest = (*args[1:], kwargs.pop("device", None))[:1] or (None,)
        args = (args[0], torch.device("cuda", 0) if device is None else with_index(device), *rest)
    return torch.Tensor.to, tuple(map(with_index, args)), {name: with_index(value) for name, value in kwargs.items()}


_STORAGES = (torch.Tensor.untyped_storage, torch.Tensor.storage)
_CUDA = torch.Tensor.cuda
_TO_DEVICES = (torch.Tensor.to, _CUDA)
