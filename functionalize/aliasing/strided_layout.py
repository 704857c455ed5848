"""Makes tensors at a layout: views of a storage, copies with its strides, storages that hold it.

Invariant: a tensor made here has exactly the sizes, strides, offset and lazy bits of the layout. Limits: sizes known
as integers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from functionalize._torch.dispatch import BelowVersions
from functionalize.aliasing.geometry import Layout

aten = torch.ops.aten


def view_at(tensor: torch.Tensor, base: Layout, layout: Layout) -> torch.Tensor:
    """The view that is to ``tensor`` what ``layout`` is to ``base``; see :func:`is_differentiable`."""
    if is_differentiable(base, layout):
        start = base.offset
        if base.dtype != layout.dtype:
            tensor, start = torch.view_as_real(tensor), 2 * base.offset
        made = tensor.as_strided(layout.size, layout.stride, tensor.storage_offset() + layout.offset - start)
        made = made.conj() if layout.conj != base.conj else made
        return aten._neg_view.default(made) if layout.neg != base.neg else made
    distance = tensor.storage_offset() * tensor.itemsize - base.offset * base.dtype.itemsize
    offset = layout.offset + distance // layout.dtype.itemsize
    made = tensor_at(tensor.untyped_storage(), replace(layout, offset=offset))
    return with_lazy_bits(made, layout)


def is_differentiable(base: Layout, layout: Layout) -> bool:
    """Whether autograd sees through a view: of the same dtype, or the parts of complex numbers."""
    if base.dtype == layout.dtype:
        return True
    return base.dtype.is_complex and layout.dtype == base.dtype.to_real() and not (base.conj or base.neg)


def with_lazy_bits(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor with the conjugate and negative bits of a layout."""
    tensor = tensor.conj() if layout.conj else tensor
    return aten._neg_view.default(tensor) if layout.neg else tensor


def tensor_at(storage: torch.UntypedStorage, layout: Layout) -> torch.Tensor:
    """A tensor at a layout of a storage, without its lazy bits."""
    with torch.no_grad():
        empty = torch.empty(0, dtype=layout.dtype, device=storage.device)
        return empty.set_(storage, layout.offset, layout.size, layout.stride)


def with_layout(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The value itself if it has the strides of a layout, else a copy that has them; its lazy bits are kept."""
    if value.layout is not torch.strided or not layout.static or has_strides(value, layout.stride):
        return value
    made = torch.empty_strided(layout.size, layout.stride, dtype=value.dtype, device=value.device)  # not a view
    return copy_into(with_lazy_bits(made, Layout.of(value)), value)


def with_strides(value: torch.Tensor, stride: Any) -> torch.Tensor:
    """The tensor itself, given the strides if they differ from its own only in dimensions of one position."""
    if value.layout is torch.strided and value.stride() != stride and has_strides(value, stride):
        with BelowVersions():  # hidden from autograd
            value.as_strided_(value.size(), stride, value.storage_offset())
    return value


def with_own_bits(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same value with the conjugate and negative bits of a layout; autograd records the conversion."""
    if value.is_conj() != layout.conj:
        value = value.conj_physical().conj() if layout.conj else value.resolve_conj()
    if value.is_neg() != layout.neg:
        value = aten._neg_view.default(-value) if layout.neg else value.resolve_neg()
    return value


def has_bits(value: torch.Tensor, layout: Layout) -> bool:
    """Whether a tensor has the conjugate and negative bits of a layout."""
    return value.is_conj() == layout.conj and value.is_neg() == layout.neg


def has_strides(value: torch.Tensor, strides: Any) -> bool:
    """Whether a tensor has these strides along its dimensions of more than one position."""
    actual = value.stride()
    return actual == strides or all(
        mine == wanted for size, mine, wanted in zip(value.size(), actual, strides, strict=True) if size > 1
    )


def copy_into(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a value to a target whose positions may share elements, which get one value. Returns the target."""
    part, source = target, value
    for dim, (size, stride) in enumerate(zip(target.size(), target.stride(), strict=True)):
        if stride == 0 and size > 1:
            part, source = part.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    try:
        part.copy_(source)
    except RuntimeError as error:
        if not str(error).startswith("unsupported operation"):
            raise
        for index in range(part.size(0)):  # windows that overlap: one by one
            copy_into(part[index], source[index])
    return target


def make_room(tensor: torch.Tensor, layout: Layout) -> None:
    """Let a tensor's storage grow until it holds a layout."""
    storage, needed = tensor.untyped_storage(), layout.span[1]
    if storage.nbytes() < needed:
        storage.resize_(needed)
