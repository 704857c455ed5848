"""Fake quantization, its observers' statistics, and the gradients of learned scales, by operators that engines have.

Invariant: the numbers of torch's kernels on the CPU, also where an element is not finite or the scale is zero. Limits:
results for a scale of zero or infinity are those of arithmetic.
Source: ``aten/src/ATen/native/quantized`` (``FakeQuantPerTensorAffine.cpp``, ``FakeQuantPerChannelAffine.cpp``,
``FusedObsFakeQuant.cpp``, ``cpu/kernels/QuantizedOpKernels.cpp``) and ``QuantUtils.h`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_BEYOND = 2.0**63  # what no int64 holds becomes the least of them
_LEAST_SCALE = 6.1e-5
_SCALE_OF_NOTHING = 0.1


def _wide(x: Any) -> Any:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _number(value: Any, dtype: torch.dtype) -> Any:
    return aten.full.default([], value, dtype=dtype)


def _along(values: Any, x: Any, axis: int) -> Any:
    """Numbers of channels, as they lie beside a tensor."""
    return values.reshape([1] * axis + [-1] + [1] * (x.dim() - axis - 1))


def _whole(places: Any) -> Any:
    """Whole numbers as kernels convert them to int64: what is not finite, or too large, is the least."""
    return torch.where(places.abs() < _BEYOND, places, -_BEYOND)


def per_tensor(x: Any, scale: Any, zero_point: Any, least: int, most: int) -> Any:
    """Rounded to the numbers of a scale, and which elements lie within the bounds; NaN goes to the lower bound."""
    wide = _wide(x)
    places = (wide * (1 / scale)).round() + zero_point
    places = torch.where(places.isnan(), least, places)
    within = torch.logical_and(torch.logical_and(places >= least, places <= most), torch.logical_not(wide.isnan()))
    return ((places.clamp(least, most) - zero_point) * scale).to(x.dtype), within


def _by_numbers(x: Any, scale: float, zero_point: int, least: int, most: int) -> Any:
    return per_tensor(x, _number(scale, torch.float32), _number(zero_point, torch.float32), least, most)


def _if_enabled(x: Any, scale: Any, zero_point: Any, enabled: Any, least: int, most: int) -> Any:
    quantized, within = per_tensor(x, scale, zero_point, least, most)
    return torch.where(enabled != 0, quantized, x), torch.logical_or(within, enabled == 0)


def per_channel(x: Any, scale: Any, zero_point: Any, axis: int, least: int, most: int) -> Any:
    """The same with a scale for each channel. A zero point that is no whole number is added before it is rounded."""
    scale, zero = _along(scale, x, axis), _along(zero_point, x, axis)
    scaled = _wide(x) * (1 / scale)
    added = zero.to(torch.float32)
    places = _whole((scaled + added).round() if zero_point.is_floating_point() else scaled.round() + added)
    within = torch.logical_and(places >= least, places <= most)
    return ((places.clamp(least, most) - added) * scale).to(x.dtype), within


def _learned_per_tensor(x: Any, scale: Any, zero_point: Any, least: int, most: int, factor: float = 1.0) -> Any:
    return per_tensor(x, scale.reshape([]), zero_point.reshape([]).round().clamp(least, most), least, most)[0]


def _learned_per_channel(
    x: Any, scale: Any, zero_point: Any, axis: int, least: int, most: int, factor: float = 1.0
) -> Any:
    zero_point = zero_point.round().clamp(least, most).to(torch.int32)
    return per_channel(x, scale, zero_point, axis, least, most)[0]


def _gradients(
    gradient: Any, x: Any, scale: Any, zero: Any, bounds: Sequence[int], factor: float
) -> tuple[Any, Any, Any]:
    """By element: of what is quantized, of the scale, and of the zero point."""
    least, most = bounds
    wide, given = _wide(x), _wide(gradient)
    places = _whole((wide * (1 / scale)).round() + zero)
    below, above = places < least, places > most
    outside = torch.logical_or(below, above)
    rounded = (places.clamp(least, most) - zero) * scale
    of_scale = torch.where(below, least - zero, torch.where(above, most - zero, (rounded - wide) * (1 / scale)))
    of_zero = torch.where(outside, -scale, 0.0)
    of_x = torch.where(outside, 0.0, given).to(x.dtype)
    return of_x, given * of_scale * factor, given * of_zero * factor


def _learned_per_tensor_backward(
    gradient: Any, x: Any, scale: Any, zero_point: Any, least: int, most: int, factor: float = 1.0
) -> Any:
    zero = (zero_point.reshape([]) + 0.5).clamp(least, most).trunc()
    of_x, of_scale, of_zero = _gradients(gradient, x, scale.reshape([]), zero, (least, most), factor)
    return of_x, of_scale.sum().reshape(1).to(scale.dtype), of_zero.sum().reshape(1).to(zero_point.dtype)


def _learned_per_channel_backward(
    gradient: Any, x: Any, scale: Any, zero_point: Any, axis: int, least: int, most: int, factor: float = 1.0
) -> Any:
    zero = _along(zero_point.round().clamp(least, most), x, axis)
    of_x, of_scale, of_zero = _gradients(gradient, x, _along(scale, x, axis), zero, (least, most), factor)
    others = [dim for dim in range(x.dim()) if dim != axis]

    def summed(values: Any, like: Any) -> Any:
        return (values.sum(others) if others else values).to(like.dtype)

    return of_x, summed(of_scale, scale), summed(of_zero, zero_point)


def _parameters(low: Any, high: Any, least: int, most: int, symmetric: bool) -> tuple[Any, Any]:
    """The scale and the zero point for a range of numbers, which is made to hold zero."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    balanced = torch.logical_and(low < 0, high > 0) if symmetric else torch.zeros_like(low, dtype=torch.bool)
    half = (most - least) // 2
    largest = torch.maximum((low / -(half + 1)).abs(), (high / half).abs())
    low, high = torch.where(balanced, largest * -(half + 1), low), torch.where(balanced, largest * half, high)
    low, high = low.double(), high.double()
    scale = (high - low) / (most - least)
    narrow = scale.to(torch.float32)
    scale = torch.where(torch.logical_or(narrow == 0, (1 / narrow).isinf()), _SCALE_OF_NOTHING, scale)
    small = scale < _LEAST_SCALE
    amplified = _LEAST_SCALE / scale
    from_low = torch.where(low == 0, 0.0, torch.where(high == 0, -_LEAST_SCALE * (most - least), low * amplified))
    from_high = torch.where(high == 0, 0.0, torch.where(low == 0, _LEAST_SCALE * (most - least), high * amplified))
    low, high = torch.where(small, from_low, low), torch.where(small, from_high, high)
    scale = torch.where(small, _LEAST_SCALE, scale)
    by_low, by_high = least - low / scale, most - high / scale
    error_low, error_high = abs(least) + (low / scale).abs(), abs(most) + (high / scale).abs()
    zero = torch.where(balanced, (least + most) / 2, torch.where(error_low < error_high, by_low, by_high))
    return scale.to(torch.float32), zero.round().clamp(least, most).to(torch.int32)


def observed(
    x: Any,
    observer_on: Any,
    fake_quant_on: Any,
    running_min: Any,
    running_max: Any,
    scale: Any,
    zero_point: Any,
    averaging_const: float,
    least: int,
    most: int,
    axis: int,
    per_row: bool = False,
    symmetric: bool = False,
) -> Any:
    """Moving averages of the least and the largest numbers, the scale for these, and what it quantizes."""
    others = [dim for dim in range(x.dim()) if dim != axis] if per_row else list(range(x.dim()))
    observes, quantizes = observer_on.reshape([]) != 0, fake_quant_on.reshape([]) != 0
    rows = [x.size(axis)] if per_row else [1]

    def averaged(running: Any, least_or_most: Callable[..., Any]) -> Any:
        now = least_or_most(x, others).reshape(rows).to(torch.float32)
        moved = torch.where(running.isinf(), now, running + averaging_const * (now - running))
        return torch.where(observes, moved.reshape(running.size()), running)

    low, high = averaged(running_min, aten.amin.default), averaged(running_max, aten.amax.default)
    new_scale, new_zero = _parameters(low.reshape(rows), high.reshape(rows), least, most, symmetric)
    scale = torch.where(quantizes, new_scale.reshape(scale.size()), scale)
    zero_point = torch.where(quantizes, new_zero.reshape(zero_point.size()).to(zero_point.dtype), zero_point)
    if per_row:
        quantized, within = per_channel(x, scale, zero_point, axis, least, most)
    else:
        quantized, within = per_tensor(x, scale.reshape([]), zero_point.reshape([]), least, most)
    within = torch.logical_or(within, torch.logical_not(quantizes))
    return torch.where(quantizes, quantized, x), within, low, high, scale, zero_point


QUANTIZATION: dict[Any, Callable[..., Any]] = {
    aten.fake_quantize_per_tensor_affine_cachemask.default: _by_numbers,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _if_enabled,
    aten.fake_quantize_per_channel_affine_cachemask.default: per_channel,
    aten._fake_quantize_learnable_per_tensor_affine.default: _learned_per_tensor,
    aten._fake_quantize_learnable_per_tensor_affine_backward.default: _learned_per_tensor_backward,
    aten._fake_quantize_learnable_per_channel_affine.default: _learned_per_channel,
    aten._fake_quantize_learnable_per_channel_affine_backward.default: _learned_per_channel_backward,
    aten._fused_moving_avg_obs_fq_helper_functional.default: observed,
}
