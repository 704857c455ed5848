"""What is computed element by element."""

from __future__ import annotations

import math
from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import REWRITES, Rewrite, either_of, rewrite, tensor_of

aten = torch.ops.aten


@rewrite(aten._cdist_forward.default)
def cdist(one: Any, other: Any, p: float, mode: int | None) -> Any:
    """Norms of all differences."""
    return aten.linalg_vector_norm.default(one.unsqueeze(-2) - other.unsqueeze(-3), p, [-1])


rewrite(aten._is_all_true.default)(aten.all.default)
rewrite(aten._is_any_true.default)(aten.any.default)


@rewrite(aten.add.Tensor)
def either_is_true(one: Any, other: Any, *, alpha: Any = 1) -> Any:
    """The sum of two bools, of which ONNX has none."""
    if not (_are_truths(one, other) and alpha == 1):
        return NotImplemented
    return aten.logical_or.default(tensor_of(one, torch.bool), tensor_of(other, torch.bool))


@rewrite(aten.mul.Tensor)
def both_are_true(one: Any, other: Any) -> Any:
    """The product of two bools."""
    if not _are_truths(one, other):
        return NotImplemented
    return aten.logical_and.default(tensor_of(one, torch.bool), tensor_of(other, torch.bool))


def _are_truths(*values: Any) -> bool:
    return all(one is True or one is False or getattr(one, "dtype", None) is torch.bool for one in values)


@rewrite(aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
def floor_divide(one: Any, other: Any, *, rounding_mode: str | None = "floor") -> Any:
    """Of floats: by the rest of the division, as eager's kernel, for the quotient is rounded up to whole numbers."""
    dtype = torch.result_type(one, other)
    if rounding_mode == "floor" and not dtype.is_floating_point and not isinstance(one, torch.Tensor):
        return aten.floor_divide.default(tensor_of(one, dtype), other)
    if rounding_mode != "floor" or not dtype.is_floating_point:
        return NotImplemented
    one, other = tensor_of(one, dtype), tensor_of(other, dtype)
    rest = aten.fmod.Tensor(one, other)
    below = aten.logical_and.default(rest != 0, aten.ne.Tensor(other < 0, rest < 0))
    quotient = (one - rest) / other - below.to(dtype)
    floor = quotient.floor()
    floor = floor + (quotient - floor > 0.5).to(dtype)
    return torch.where(other == 0, one / other, torch.where(quotient == 0, one / other * 0, floor))


@rewrite(aten.arange.start_step)
def arange(start: Any, end: Any, step: Any = 1, **options: Any) -> Any:
    """Of floats: by whole numbers, of which there are as many as torch counts, and with 64 bits, as eager's kernel."""
    if all(isinstance(one, int) for one in (start, end, step)) or not all(
        isinstance(one, (int, float)) for one in (start, end, step)
    ):
        return NotImplemented
    dtype = options.get("dtype") or torch.get_default_dtype()
    count = max(math.ceil((end - start) / step), 0)
    return (aten.arange.default(count, dtype=torch.int64).double() * step + start).to(dtype)


@rewrite(aten._native_batch_norm_legit_no_training.default)
def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float) -> Any:
    """With float64, of which ONNX's operator rounds `eps` to 32 bits."""
    if x.dtype != torch.float64:
        return NotImplemented
    shape = [1, -1] + [1] * (x.dim() - 2)
    found = (x - mean.reshape(shape)) * aten.rsqrt.default(variance.reshape(shape) + eps)
    found = found if weight is None else found * weight.reshape(shape)
    found = found if bias is None else found + bias.reshape(shape)
    return found, x.new_zeros(0), x.new_zeros(0)


@rewrite(aten.clamp.default)
def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Of floats: to the engine, a bound that is not there is the largest finite number, and no infinity."""
    if not x.dtype.is_floating_point or (min is not None and max is not None):
        return NotImplemented
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    return aten.clamp.default(x, torch.sym_float(low), torch.sym_float(high))


@rewrite(aten.clamp_min.default)
def clamp_min(x: Any, min: Any) -> Any:
    return clamp(x, min)


@rewrite(aten.clamp_max.default)
def clamp_max(x: Any, max: Any) -> Any:
    return clamp(x, None, max)


rewrite(aten.clamp_min.Tensor)(aten.maximum.default)
rewrite(aten.clamp_max.Tensor)(aten.minimum.default)


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
        dtype = torch.result_type(value, by)
        if dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32):
            return NotImplemented
        return whole(value.long(), tensor_of(by, torch.int64)).to(dtype)

    return shifted


def _by_tensors(shift: Any, whole: Any) -> Rewrite:
    """Of 64 bits; beyond these, eager shifts all out."""

    def shifted(value: Any, by: Any) -> Any:
        dtypes = {value.dtype, by.dtype} if isinstance(by, torch.Tensor) else set()
        if not dtypes or torch.result_type(value, by) != torch.int64 or (shift is whole and len(dtypes) == 1):
            return NotImplemented
        value, by = value.long(), by.long()
        inside = (by >= 0) & (by < 64)
        found = whole(value, torch.where(inside, by, 0 * by))
        return torch.where(inside, found, 0 * value if whole is aten.bitwise_left_shift.Tensor else -(value < 0).long())

    return shifted


REWRITES.update({shift: either_of(_shift(whole), _by_tensors(shift, whole)) for shift, whole in _SHIFTS.items()})
