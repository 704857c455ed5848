"""Ops that give a tensor another size, other strides or another storage in place: what they are asked for.

Limits: strided tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from functionalize._torch import unbacked
from functionalize.aliasing.geometry import Layout, fits
from functionalize.errors import UnsupportedMutationError

aten = torch.ops.aten


def new_size(func: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The size that a resize gives; None of other ops."""
    if func is aten.resize_.default:
        return tuple(args[1])
    return tuple(args[1].size()) if func is aten.resize_as_.default else None


def with_kept_strides(func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """An op and its arguments; `set_` to a storage without strides keeps those of what has the size."""
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
        raise UnsupportedMutationError(
            f"set_ to a storage without strides keeps {tuple(handle.stride())}, which reach beyond that storage",
            why="eager reads and writes there memory that is none of the storage's",
            hint="give the strides, too",
        )
    return aten.set_.source_Storage_storage_offset, (*sized, list(handle.stride()))


def refuse_uncounted(func: Any, handle: torch.Tensor) -> None:
    """Where torch resolves a lazy conjugate or negation for a composite op, it may resize what it has then."""
    if torch.is_inference_mode_enabled() and not handle.is_inference() and (handle.is_neg() or handle.is_conj()):
        raise UnsupportedMutationError(
            f"{func} of a lazy conjugate or negation in inference mode",
            why="whether autograd counts it as a write depends on the device, and on which op asked for it",
            hint="resolve it first with resolve_conj() or resolve_neg(), or use torch.no_grad()",
        )


def keeps_size(handle: torch.Tensor, size: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a resize leaves everything as it is; asks the symbols, as eager's kernel asks the sizes."""
    if kwargs.get("memory_format") is not None or unbacked((*handle.size(), *size)):
        return False
    return tuple(handle.size()) == size
