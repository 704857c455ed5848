"""What is computed element by element, or drawn at random."""

from __future__ import annotations

from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import REWRITES, Rewrite, rewrite

aten = torch.ops.aten


@rewrite(aten._cdist_forward.default)
def cdist(one: Any, other: Any, p: float, mode: int | None) -> Any:
    """Norms of all differences."""
    return aten.linalg_vector_norm.default(one.unsqueeze(-2) - other.unsqueeze(-3), p, [-1])


@rewrite(aten._is_all_true.default)
def is_all_true(values: Any) -> Any:
    return aten.all.default(values)


@rewrite(aten._is_any_true.default)
def is_any_true(values: Any) -> Any:
    return aten.any.default(values)


@rewrite(aten.uniform.default)
def uniform(like: Any, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    return NotImplemented if generator else aten.rand.default(like.size(), dtype=like.dtype) * (high - low) + low


@rewrite(aten.bucketize.Tensor)
def bucketize(values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """How many boundaries are not above: what is not a number is above all."""
    above = (aten.gt if right else aten.ge).Tensor(boundaries, values.unsqueeze(-1))
    return aten.logical_not.default(above).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


_SHIFTS = {
    shift: whole
    for one, other, whole in (
        ("__lshift__", "bitwise_left_shift", aten.bitwise_left_shift.Tensor),
        ("__rshift__", "bitwise_right_shift", aten.bitwise_right_shift.Tensor),
    )
    for shift in (getattr(aten, one).Scalar, getattr(aten, one).Tensor, getattr(aten, other).Tensor_Scalar, whole)
}


def _shift(whole: Any) -> Rewrite:
    """By 64 bits: the exporter gives other widths other signs."""

    def shifted(value: Any, by: Any) -> Any:
        if value.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32):
            return NotImplemented
        steps = by.long() if isinstance(by, torch.Tensor) else aten.full.default([], by, dtype=torch.int64)
        return whole(value.long(), steps).to(value.dtype)

    return shifted


REWRITES.update({shift: _shift(whole) for shift, whole in _SHIFTS.items()})
