"""Ops that give a tensor another size, other strides or another storage in place: their arguments.

Limits: strided tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from functionalize._torch import unbacked
from functionalize.aliasing.geometry import Layout, fits, hinted_span, is_empty
from functionalize.aliasing.tensor_queries import is_fake
from functionalize.refusals.values import STORAGE_BYTES_ACCESSED
from functionalize.refusals.writes import LAZY_IN_INFERENCE_MODE, SET_BEYOND_STORAGE

aten = torch.ops.aten


def new_size(func: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The new size of a resize; None for other ops."""
    if func is aten.resize_.default:
        return tuple(args[1])
    return tuple(args[1].size()) if func is aten.resize_as_.default else None


def with_kept_strides(func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """An op and its arguments; `set_` to a storage without strides keeps those of a tensor that has the size.

    Raises what eager raises if a storage would grow for a tensor that keeps its size and strides.
    """
    if func is aten.set_.source_Storage_storage_offset and len(args) == 5:
        _check_room(args[1], replace(Layout.of(args[0]), offset=args[2]), args[3:])
    if func is aten.set_.source_Storage:
        sized = (*args, 0, [args[1].nbytes() // args[0].element_size()])
    elif func is aten.set_.source_Storage_storage_offset and len(args) == 4:
        sized = tuple(args)
    else:
        return func, args
    handle, storage, offset, size = sized
    if tuple(handle.size()) != tuple(size):
        return func, args
    kept = replace(Layout.of(handle), offset=offset)
    if not fits(kept, storage.nbytes()):
        raise SET_BEYOND_STORAGE.error(strides=tuple(handle.stride()))
    return aten.set_.source_Storage_storage_offset, (*sized, list(handle.stride()))


def refuse_bytes(handle: torch.Tensor, owner: torch.Tensor | None) -> None:
    """Raise if torch makes a tensor of a storage's bytes, as the storage's `fill_` does: fake storages lack bytes.

    ``owner``: a tensor of the storage, to which the handle is about to be set.

    Raises:
        UnsupportedMutationError: torch makes such a tensor.
    """
    if owner is not None and handle.device != owner.device:
        raise STORAGE_BYTES_ACCESSED.error(size=tuple(owner.size()))


def _check_room(storage: torch.UntypedStorage, kept: Layout, wanted: Sequence[Any]) -> None:
    if (kept.size, kept.stride) == tuple(map(tuple, wanted)):
        _refuse_beyond(storage, kept)


def check_place(source: torch.Tensor, args: Sequence[Any]) -> None:
    """Raise what eager raises for `as_strided` beyond a storage; with lazy bits fake kernels let the storage grow."""
    if is_fake(source) and (source.is_conj() or source.is_neg()):
        size, stride, *rest = args
        own = Layout.of(source)
        offset = next((value for value in rest if value is not None), own.offset)
        wanted = replace(own, size=tuple(size), stride=tuple(stride), offset=offset)
        _refuse_beyond(source.untyped_storage(), wanted)


def _refuse_beyond(storage: torch.UntypedStorage, layout: Layout) -> None:
    if not (is_empty(layout) or unbacked(layout.size) or fits(layout, storage.nbytes())):
        raise RuntimeError(
            f"setStorage: sizes {list(layout.size)}, strides {list(layout.stride)}, storage offset {layout.offset}, "
            f"and itemsize {layout.dtype.itemsize} requiring a storage size of {hinted_span(layout)[1]} are out of "
            f"bounds for storage of size {storage.nbytes()}"
        )


def refuse_uncounted(func: Any, handle: torch.Tensor) -> None:
    """Raise if torch resolves a lazy conjugate or negation for a composite op, and may resize the result."""
    if torch.is_inference_mode_enabled() and not handle.is_inference() and (handle.is_neg() or handle.is_conj()):
        raise LAZY_IN_INFERENCE_MODE.error(op=func)


def keeps_size(handle: torch.Tensor, size: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a resize leaves everything as it is; guards on symbols, as eager's kernel compares sizes."""
    if kwargs.get("memory_format") is not None or unbacked((*handle.size(), *size)):
        return False
    return tuple(handle.size()) == size
