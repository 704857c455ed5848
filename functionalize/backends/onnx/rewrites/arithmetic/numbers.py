"""Functions of numbers whose formulas in the exporter lose digits, overflow, or miss zeros, infinities and no numbers.

Invariant: as exact as eager's kernels, up to a few units in the last place; 16 bits are computed with 32. Limits: the
signs of zeros that the engine chooses are lost, and of what is not a number; exponentials, logarithms and tangents are
the engine's.
"""

from __future__ import annotations

import math
from functools import partial, wraps
from typing import Any

import torch

from functionalize.backends.decompositions.opmath import wide
from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite, tensor_of

aten = torch.ops.aten


def _of_floats(function: Rewrite, *, alone: bool = False) -> Rewrite:
    """Of tensors and numbers of one dtype of floats, which is the result's; whole ones, unless ``alone``, as floats."""

    @wraps(function)
    def computed(*args: Any) -> Any:
        dtype = torch.result_type(*args) if len(args) > 1 else args[0].dtype
        if dtype.is_complex or (alone and not dtype.is_floating_point):
            return NotImplemented
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        return function(*(wide(tensor_of(one, dtype)) for one in args)).to(dtype)

    return computed


@rewrite(aten.log1p.default)
@_of_floats
def log1p(x: Any) -> Any:
    """What is lost when one is added is lost twice, and so cancels."""
    more = x + 1
    added = more - 1
    found = torch.where(aten.eq.Tensor(added, x), more.log(), more.log() * (x / added))
    return torch.where(added == 0, x, found)


@rewrite(aten.expm1.default)
@_of_floats
def expm1(x: Any) -> Any:
    return (x * 0.5).tanh() * (x.exp() + 1)


def _logarithm(base: int) -> Rewrite:
    """In 64 bits, of which the exporter's factor has 32."""

    def logarithm(x: Any) -> Any:
        return x.log() / math.log(base) if x.dtype == torch.float64 else NotImplemented

    return logarithm


rewrite(aten.log2.default)(_logarithm(2))
rewrite(aten.log10.default)(_logarithm(10))


@rewrite(aten.sinc.default, aten.special_sinc.default)
@_of_floats
def sinc(x: Any) -> Any:
    angle = x * math.pi
    return aten.where.ScalarSelf(x == 0, 1.0, angle.sin() / angle)


@rewrite(aten.sigmoid.default)
def sigmoid(x: Any) -> Any:
    """In 64 bits, of which the engine's has fewer."""
    return 1 / ((-x).exp() + 1) if x.dtype == torch.float64 else NotImplemented


@rewrite(aten.silu.default)
def silu(x: Any) -> Any:
    return x * sigmoid(x) if x.dtype == torch.float64 else NotImplemented


@rewrite(aten.log_sigmoid.default)
@_of_floats
def log_sigmoid(x: Any) -> Any:
    return x.clamp(max=0) - log1p((-x.abs()).exp())


@rewrite(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
@_of_floats
def xlogy(x: Any, y: Any) -> Any:
    return torch.where(aten.isnan.default(y), y, aten.where.ScalarSelf(x == 0, 0.0, x * y.log()))


def _joined(one: Any, other: Any, base: float) -> Any:
    """The logarithm of the sum of two powers, by the larger one and the distance between them."""
    most, least = aten.maximum.default(one, other), aten.minimum.default(one, other)
    factor = math.log(base)
    found = most + log1p(((least - most) * factor).exp()) * (1 / factor)
    return torch.where(aten.eq.Tensor(one, other), one + 1 / factor * math.log(2), found)


@rewrite(aten.logaddexp.default)
@_of_floats
def logaddexp(one: Any, other: Any) -> Any:
    return _joined(one, other, math.e)


@rewrite(aten.logaddexp2.default)
@_of_floats
def logaddexp2(one: Any, other: Any) -> Any:
    return _joined(one, other, 2)


# Of (1 + 2x) erfcx(x), by Chebyshev's polynomials of (x - k) / (x + k).
_MIDDLE = 2.5
_SERIES = (
    *(1.17711893397557838, 0.0142127408273233209, -0.100377102577437955, 0.0483842219749577072, -0.0126074255310691043),
    *(0.00164215553347065961, 5.2927052289800507e-5, -5.10608837840982664e-5, 2.37142855850200303e-6),
    *(1.5839410905182581e-6, -1.24839582117508472e-7, -6.0456573213360395e-8, 4.09259412452101354e-9),
    *(2.73740942371872445e-9, -4.58869337160037558e-11, -1.31877503697294642e-10, -8.26809080612033172e-12),
    *(5.9379251241790285e-12, 1.05963572885401746e-12, -1.98922599214370836e-13, -8.47465310911098113e-14),
    *(-2.51833437016695609e-16, 4.97497199379126011e-15, 7.9883454287885646e-16, -1.75950718956739537e-16),
)
_IN_32_BITS = 13  # terms


def _scaled_tail(x: Any) -> Any:
    """``erfcx`` of what is not negative."""
    place = 1 - 2 * _MIDDLE / (x + _MIDDLE)
    last, before = torch.zeros_like(x), torch.zeros_like(x)
    for factor in reversed(_SERIES[1 : None if x.dtype == torch.float64 else _IN_32_BITS]):
        last, before = 2 * place * last - before + factor, last
    return (place * last - before + _SERIES[0]) / (2 * x + 1)


@rewrite(aten.special_erfcx.default)
@_of_floats
def erfcx(x: Any) -> Any:
    found = _scaled_tail(x.abs())
    return torch.where(x < 0, 2 * (x * x).exp() - found, found)


@rewrite(aten.erfc.default)
@_of_floats
def erfc(x: Any) -> Any:
    found = (-x * x).exp() * _scaled_tail(x.abs())
    return torch.where(x < 0, 2 - found, found)


@rewrite(aten.signbit.default)
def signbit(x: Any) -> Any:
    """Of zeros, by the infinity that they are the reciprocals of."""
    x = wide(x)
    return torch.where(x == 0, x.reciprocal(), x) < 0 if x.dtype.is_floating_point else NotImplemented


@rewrite(aten.copysign.Tensor, aten.copysign.Scalar)
@_of_floats
def copysign(x: Any, of: Any) -> Any:
    """By a product, which keeps the sign of zeros."""
    return x.abs() * (1 - 2 * signbit(of).to(x.dtype))


@rewrite(aten.hypot.default)
@_of_floats
def hypot(x: Any, y: Any) -> Any:
    """By the longer one and the quotient; infinite beside what is NaN, too."""
    x, y = x.abs(), y.abs()
    longer = torch.where(x > y, x, y)
    quotient = aten.where.ScalarSelf(longer == 0, 0.0, torch.where(x > y, y, x) / longer)
    found = longer * (quotient * quotient + 1).sqrt()
    found = torch.where(aten.isnan.default(x + y), x + y, found)
    infinite = (x == math.inf) | (y == math.inf)
    return aten.where.ScalarSelf(infinite, math.inf, found)


def _of_numbers(choose: Any) -> Rewrite:
    """The other one, where one is NaN."""

    def chosen(one: Any, other: Any) -> Any:
        dtype = torch.result_type(one, other)
        one, other = one.to(dtype), other.to(dtype)
        if not dtype.is_floating_point:
            return choose(one, other)
        found = torch.where(aten.isnan.default(other), one, choose(one, other))
        return torch.where(aten.isnan.default(one), other, found)

    return chosen


rewrite(aten.fmax.default)(_of_numbers(aten.maximum.default))
rewrite(aten.fmin.default)(_of_numbers(aten.minimum.default))


_of_floats_alone = partial(_of_floats, alone=True)


@rewrite(aten.sign.default, aten.sgn.default)
@_of_floats_alone
def sign(x: Any) -> Any:
    """Zero where there is NaN."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@rewrite(aten.heaviside.default)
@_of_floats_alone
def heaviside(x: Any, at_zero: Any) -> Any:
    return torch.where(x == 0, at_zero, (x > 0).to(x.dtype))


@rewrite(aten.atan2.default)
@_of_floats
def atan2(y: Any, x: Any) -> Any:
    """The angle of both without their signs; then, by their signs, of the quarter."""
    up, along = y.abs(), x.abs()
    found = torch.where(aten.eq.Tensor(up, along), (up != 0).to(up.dtype), up / along).atan()
    found = torch.where(signbit(x), math.pi - found, found)
    return torch.where(signbit(y), -found, found)


@rewrite(aten.angle.default)
def angle(x: Any) -> Any:
    if x.is_complex():
        parts = aten.view_as_real.default(x)
        return atan2(aten.select.int(parts, -1, 1), aten.select.int(parts, -1, 0))
    return _angle(x)


@_of_floats
def _angle(x: Any) -> Any:
    return torch.where(aten.isnan.default(x), x, (x < 0).to(x.dtype) * math.pi)


@rewrite(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
@_of_floats_alone
def remainder(one: Any, other: Any) -> Any:
    """Of floats: by the rest of the division towards zero, which is exact."""
    rest = aten.fmod.Tensor(one, other)
    below = aten.logical_and.default(rest != 0, aten.ne.Tensor(other < 0, rest < 0))
    return torch.where(below, rest + other, rest)
