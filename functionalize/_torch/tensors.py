"""What a tensor says of itself, and its memory, past what modes and autograd see of it.

Invariant: no mode, no autograd and no version counter hears of what is asked and done here. Limits: plain tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # no public path to it
from torch.utils._python_dispatch import _disable_current_modes, return_and_correct_aliasing

# Types whose tensors reach a mode without a __torch_dispatch__ of their own.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})

# Whether a tensor's place is written in symbols. Private, but one question in C++ where sizes and strides are many.
is_symbolic: Callable[[torch.Tensor], bool] = operator.attrgetter("_has_symbolic_sizes_strides")

_STRIDED = torch.strided  # asked for each tensor: a module's attribute costs as much as the rest of the question


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identity of a storage, of fake ones as well: `data_ptr` is none where there are no data."""
    return int(storage._cdata)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; of the tensor itself where it has none (sparse, mkldnn), as a negative number."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return -id(tensor)
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # `storage_id`, in the hottest place
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def bytes_of_original(handle: torch.Tensor) -> int | None:
    """How large the storage is which a fake tensor's storage stands for, if it stands for one that lives.

    The storage of a fake tensor that was no view is as large as that tensor, whatever the original had around it.
    """
    if not isinstance(handle, FakeTensor):
        return None
    converter, fake = handle.fake_mode.fake_tensor_converter.meta_converter, storage_id(handle.untyped_storage())
    for number, storage in converter.storage_memo.items():
        if storage_id(storage) == fake:
            originals = converter.describer.lookup_storage.items()
            return next((original.nbytes() for original, its in originals if its == number), None)
    return None


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._is_view()


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is zeros without memory, as forward-mode gradients have them."""
    return tensor._is_zerotensor()


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Give tensors versions, as if they had been written so often."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def memory_write(handle: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into ``handle``'s memory, seen by no mode and no version counter. Same shape and dtype."""
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        handle.copy_(value)


def alias_of_wrapper(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """A wrapper subclass that a view op made, told that it shares the storage of the wrapper that it views."""
    with _disable_current_modes():
        told: torch.Tensor = return_and_correct_aliasing(func, args, kwargs, out)
    return told


def memory_view(
    handle: torch.Tensor, storage: torch.UntypedStorage, place: tuple[Any, Any, Any], dtype: torch.dtype
) -> torch.Tensor:
    """A place (size, strides, offset) of a storage that a tensor has, or had, as a tensor that no mode has seen."""
    size, stride, offset = place
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        twin = torch.empty(0, dtype=dtype, device=storage.device)
        return twin.set_(storage, offset, size, stride)


def copy_of_memory(value: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """A real tensor of the same strides in a copy of its storage; `clone` makes what is not dense contiguous."""
    twin = torch.empty(0, dtype=value.dtype, device=value.device)
    twin.set_(
        value.untyped_storage().clone() if storage is None else storage,
        value.storage_offset(),
        value.size(),
        value.stride(),
    )
    if value.is_conj():
        twin = twin.conj()
    return torch._neg_view(twin) if value.is_neg() else twin


def autograd_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a tensor for a view of; itself where it is none."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor
