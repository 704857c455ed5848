"""Ops whose legality or meaning rests on strides, prepared for values.

Note [Values may have other strides than their handles]: a `*_copy` is contiguous, a functional variant keeps what
strides it likes. So such an op runs on a value only after what is done here.

Invariant: the op gives what it gives on the handle. Limits: the arguments are values, the source comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functionalize._torch import below_all_modes, on_handles, unbacked
from functionalize.aliasing.geometry import hint
from functionalize.aliasing.tensor_queries import is_contiguous, is_fake

aten = torch.ops.aten

_LEGAL_BY_STRIDES = frozenset({aten.view.default, aten.view.dtype, aten.view_as_complex.default})
_CHECKED_AS_COPY = _LEGAL_BY_STRIDES - {aten.view.default}  # view_copy takes any strides
# They copy their source and what lies before it in its storage, so that the copy has the source's offset.
KEEP_OFFSET = frozenset({aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default})
_BY_STORAGE = frozenset({aten.as_strided.default, aten.as_strided_scatter.default})


def prepared(op: Any, args: tuple[Any, ...], *, copies: bool) -> tuple[Any, ...]:
    """Arguments for an op on values; ``copies`` says that the op's ``*_copy`` will run."""
    if op in _BY_STORAGE:
        return _by_storage(op, args)
    if op in (_CHECKED_AS_COPY if copies else _LEGAL_BY_STRIDES):
        return (_with_legal_strides(op, args), *args[1:])
    return args


def _by_storage(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``as_strided`` counts from the start of the value's storage, a rule from the value's first element."""
    base, rest, offset = args[0], args[1:-1], args[-1]
    start = base.storage_offset()
    # A scatter copies its base, and its meta kernel forgets that the copy starts where the base did.
    shifted = op is aten.as_strided_scatter.default and not (type(start) is int and start == 0)
    if shifted or not is_contiguous(base):
        base = aten.clone.default(base, memory_format=torch.contiguous_format)
    return (base, *rest, offset + base.storage_offset())


def _with_legal_strides(op: Any, args: tuple[Any, ...]) -> torch.Tensor:
    base: torch.Tensor = args[0]
    if op is aten.view.default and is_contiguous(base):
        return base
    try:
        on_handles(op, args, {})
        if op is aten.view.default and is_fake(base):
            below_all_modes(_view_of_nothing, (base, args[1]), {})
    except (RuntimeError, ValueError):
        if op is aten.view.dtype and 0 in base.size():  # contiguous strides of nothing may be as illegal
            strides = [args[1].itemsize] * (base.dim() - 1) + [1]
            return aten.new_empty_strided.default(base, list(base.size()), strides)  # type: ignore[no-any-return]
        return aten.clone.default(base, memory_format=torch.contiguous_format)  # type: ignore[no-any-return]
    return base


def _view_of_nothing(base: torch.Tensor, size: Sequence[Any]) -> None:
    """Raises what the kernel of `view` raises, for the sizes of this trace: that of fake tensors lets more pass."""
    if not unbacked((*base.size(), *size)):
        layout = list(map(hint, base.size())), list(map(hint, base.stride()))
        torch.empty_strided(*layout, device="meta").view(list(map(hint, size)))
