"""Operators that compute element by element, with torch's rules of promotion.

Invariant: operands are of one dtype before anything is computed, the one that torch computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.scipy import special

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.arithmetic import derivatives
from functionalize.backends.jax.lowerings.arithmetic.special import digamma, polygamma, zeta
from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import as_float, cast, category, promoted

aten = torch.ops.aten
Array = Any

_OF_FLOATS: dict[Any, Callable[[Array], Array]] = {
    aten.acos: jnp.arccos,
    aten.acosh: jnp.arccosh,
    aten.asin: jnp.arcsin,
    aten.asinh: jnp.arcsinh,
    aten.atan: jnp.arctan,
    aten.atanh: jnp.arctanh,
    aten.cos: jnp.cos,
    aten.cosh: jnp.cosh,
    aten.digamma: digamma,
    aten.erf: jax.lax.erf,
    aten.erfc: jax.lax.erfc,
    aten.erfinv: jax.lax.erf_inv,
    aten.exp: jnp.exp,
    aten.exp2: jnp.exp2,
    aten.expm1: jnp.expm1,
    aten.lgamma: derivatives.lgamma,
    aten.log: jnp.log,
    aten.log10: jnp.log10,
    aten.log1p: jnp.log1p,
    aten.log2: jnp.log2,
    aten.reciprocal: lambda x: 1 / x,
    aten.rsqrt: lambda x: 1 / jnp.sqrt(x),
    aten.sigmoid: jax.nn.sigmoid,
    aten.sin: jnp.sin,
    aten.sinh: jnp.sinh,
    aten.special_erfcx: special.erfcx,
    aten.special_i0e: special.i0e,
    aten.special_i1: special.i1,
    aten.special_i1e: special.i1e,
    aten.special_modified_bessel_i0: special.i0,
    aten.special_modified_bessel_i1: special.i1,
    aten.special_log_ndtr: special.log_ndtr,
    aten.special_ndtri: special.ndtri,
    aten.i0: derivatives.i0,
    aten.sinc: derivatives.sinc,
    aten.sqrt: jnp.sqrt,
    aten.tan: jnp.tan,
    aten.tanh: jnp.tanh,
}
_OF_ANY: dict[Any, Callable[[Array], Array]] = {
    aten.abs: derivatives.absolute,
    aten.bitwise_not: jnp.invert,
    aten.detach: jax.lax.stop_gradient,
    aten.isinf: jnp.isinf,
    aten.isnan: jnp.isnan,
    aten.logical_not: jnp.logical_not,
    aten.neg: jnp.negative,
    aten._neg_view: jnp.negative,
}
_OF_FRACTIONS: dict[Any, Callable[[Array], Array]] = {
    aten.ceil: jnp.ceil,
    aten.floor: jnp.floor,
    aten.trunc: jnp.trunc,
    aten.round.default: jnp.round,
}
_OF_BITS: dict[Any, Callable[[Array, Array], Array]] = {
    aten.bitwise_and: jnp.bitwise_and,
    aten.bitwise_or: jnp.bitwise_or,
    aten.bitwise_xor: jnp.bitwise_xor,
    aten.bitwise_left_shift: lambda x, y: _shifted(jnp.left_shift, x, y, 0),
    aten.bitwise_right_shift: lambda x, y: _shifted(jnp.right_shift, x, y, jnp.where(x < 0, -1, 0).astype(x.dtype)),
}
_OF_BITS |= {aten.__lshift__: _OF_BITS[aten.bitwise_left_shift], aten.__rshift__: _OF_BITS[aten.bitwise_right_shift]}
_COMPARED: dict[Any, Callable[[Array, Array], Array]] = {
    aten.eq: jnp.equal,
    aten.ne: jnp.not_equal,
    aten.lt: jnp.less,
    aten.le: jnp.less_equal,
    aten.gt: jnp.greater,
    aten.ge: jnp.greater_equal,
    aten.logical_and: jnp.logical_and,
    aten.logical_or: jnp.logical_or,
    aten.logical_xor: jnp.logical_xor,
}
_OF_TWO: dict[Any, Callable[[Array, Array], Array]] = {
    aten.maximum: jnp.maximum,
    aten.minimum: jnp.minimum,
    aten.fmax: derivatives.fmax,
    aten.fmin: derivatives.fmin,
    aten.fmod: lambda x, y: jnp.fmod(x, y),
    aten.remainder: jnp.remainder,
    aten.gcd: jnp.gcd,
    aten.lcm: lambda x, y: jnp.lcm(x, y),
    aten.mul: lambda x, y: jnp.logical_and(x, y) if x.dtype == bool else x * y,
    aten.nextafter: jnp.nextafter,
    aten.hypot: derivatives.hypot,
}
_OF_TWO_FLOATS: dict[Any, Callable[[Array, Array], Array]] = {
    aten.atan2: derivatives.arctan2,
    aten.copysign: derivatives.copysign,
    aten.xlogy: special.xlogy,
    aten.special_xlog1py: special.xlog1py,
    aten.special_zeta: zeta,
    aten.logaddexp: lambda x, y: logaddexp(x, y),
    aten.logaddexp2: jnp.logaddexp2,
    aten.igamma: special.gammainc,
    aten.igammac: special.gammaincc,
}


def _register() -> None:
    for op, function in _OF_FLOATS.items():
        lowering(op)(lambda x, function=function: rounded(function, as_float(x)))
    for op, function in _OF_ANY.items():
        lowering(op)(function)
    for op, function in _OF_FRACTIONS.items():
        lowering(op)(lambda x, function=function: x if category(x.dtype) < 2 else function(x))
    for op, of_both in (_OF_BITS | _OF_TWO | _COMPARED).items():
        lowering(op)(lambda x, y, function=of_both: rounded(function, *promoted(x, y)))
    for op, of_both in _OF_TWO_FLOATS.items():
        lowering(op)(lambda x, y, function=of_both: rounded(function, *map(as_float, promoted(x, y))))


def rounded(function: Callable[..., Array], *operands: Array) -> Array:
    """A function of arrays of one dtype, computed in 32 bits where they have fewer, as torch's kernels do.

    By conversions of ours: between operators of 16 bits XLA goes on with 32, where torch's kernels round, or overflow.
    """
    dtype = operands[0].dtype
    if dtype not in (jnp.float16, jnp.bfloat16):
        return function(*operands)
    found = function(*(x.astype(jnp.float32) for x in operands))
    return found if found.dtype == bool else found.astype(dtype)


def logaddexp(x: Array, y: Array) -> Array:
    """As torch's kernel: the imaginary part of a complex result is that of the larger argument, and more."""
    if not jnp.iscomplexobj(x):
        return jnp.logaddexp(x, y)
    first = x.real >= y.real
    large, small = jnp.where(first, x, y), jnp.where(first, y, x)
    found = large + jnp.log1p(jnp.exp(small - large))
    infinite = jnp.where(small.real < 0, small, jnp.log(jnp.exp(small) + jnp.exp(large)))
    return jnp.where(jnp.isinf(small.real) & (small.real == large.real), infinite, found)


def _shifted(shift: Callable[[Array, Array], Array], x: Array, y: Array, beyond: Any) -> Array:
    """A shift by so many bits; by as many as there are, or more, nothing is left."""
    bits = x.dtype.itemsize * 8
    legal = (y >= 0) & (y < bits)
    return jnp.where(legal, shift(x, jnp.where(legal, y, 0).astype(y.dtype)), beyond)


_register()


@lowering(aten.sign)
def sign(x: Array) -> Array:
    return x if x.dtype == bool else jnp.where(jnp.isnan(x), 0, jnp.sign(x)).astype(x.dtype)


@lowering(aten.sgn)
def sgn(x: Array) -> Array:
    if category(x.dtype) < 3:
        return sign(x)
    size = jnp.abs(x)
    return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size)).astype(x.dtype)


@lowering(aten.angle)
def angle(x: Array) -> Array:
    x = as_float(x)
    return jnp.where(jnp.isnan(x), jnp.nan, jnp.angle(x)).astype(jnp.abs(x).dtype)


@lowering(aten.conj_physical, aten._conj, aten._conj_physical)
def conj(x: Array) -> Array:
    return jnp.conj(x) if category(x.dtype) == 3 else x


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(x: Array, y: Array, alpha: Any = 1) -> Array:
    x, y = promoted(x, y)
    if x.dtype == bool:
        return jnp.logical_or(x, jnp.logical_and(y, alpha))
    return _plus(x, y, alpha)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(x: Array, y: Array, alpha: Any = 1) -> Array:
    x, y = promoted(x, y)
    return _plus(x, -y, alpha)


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(x: Array, y: Array, alpha: Any = 1) -> Array:
    return sub(y, x, alpha)


def _plus(x: Array, y: Array, alpha: Any) -> Array:
    if isinstance(alpha, (int, float)) and alpha == 1:
        return rounded(jnp.add, x, y)
    return rounded(lambda x, y, alpha: x + y * alpha, x, y, cast(alpha, x.dtype))


@lowering(aten.div)
def div(x: Array, y: Array, rounding_mode: str | None = None) -> Array:
    x, y = promoted(x, y)
    if rounding_mode is None:
        return rounded(divided, as_float(x), as_float(y))
    if rounding_mode == "floor":
        return floor_divide(x, y)
    if category(x.dtype) < 2:
        return jax.lax.div(*jnp.broadcast_arrays(x, y))
    return rounded(lambda x, y: jnp.trunc(divided(x, y)), x, y)


def divided(x: Array, y: Array) -> Array:
    """The quotient, rounded once."""
    return x / y if category(x.dtype) != 2 or x.shape == y.shape else derivatives.quotient(x, y)


@lowering(aten.floor_divide)
def floor_divide(x: Array, y: Array) -> Array:
    x, y = promoted(x, y)
    return jnp.floor_divide(x, y) if category(x.dtype) < 2 else rounded(_floored, x, y)


def _floored(x: Array, y: Array) -> Array:
    rest = jnp.fmod(x, y)
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    whole = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(x), x / y), floored)
    return jnp.where(y == 0, x / y, whole).astype(x.dtype)


@lowering(aten.signbit.default)
def signbit(x: Array) -> Array:
    return x < 0 if category(x.dtype) < 2 else jnp.signbit(x)


@lowering(aten.pow)
def power(x: Array, y: Array) -> Array:
    root = y if isinstance(y, float) and abs(y) == 0.5 else None  # of what is infinite, as torch takes it
    x, y = promoted(x, y)
    if root is not None and category(x.dtype) > 1:
        return rounded(lambda x: jnp.sqrt(x) if root > 0 else 1 / jnp.sqrt(x), x)
    if category(x.dtype) != 1:
        return rounded(derivatives.power, x, y)
    inverse = jnp.where(x == 1, 1, jnp.where(x == -1, jnp.where(y % 2 == 0, 1, -1), 0)).astype(x.dtype)
    return jnp.where(y < 0, inverse, jnp.power(x, jnp.maximum(y, 0)))


@lowering(aten.clamp, aten.clamp_min)
def clamp(x: Array, min: Any = None, max: Any = None) -> Array:
    given = [bound for bound in (min, max) if bound is not None]
    x, *bounds = promoted(x, *given)
    low = None if min is None else bounds[0]
    return derivatives.bounded(x, low, None if max is None else bounds[-1])


@lowering(aten.clamp_max)
def clamp_max(x: Array, max: Any) -> Array:
    return clamp(x, None, max)


@lowering(aten.logit)
def logit(x: Array, eps: Any = None) -> Array:
    x = as_float(x)
    if eps is not None:
        low = cast(eps, x.dtype)
        x = derivatives.bounded(x, low, 1 - low)
    return derivatives.logit(x) if x.dtype.itemsize > 2 else rounded(jnp.log, rounded(lambda x: x / (1 - x), x))


@lowering(aten.where.self)
def where(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.astype(bool), *promoted(x, y))


@lowering(aten.masked_fill)
def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, cast(value, x.dtype), x)


@lowering(aten._to_copy, takes_call=True)
def to_copy(call: Call, x: Any, **_: Any) -> Array:
    return cast(x, call.dtype)


@lowering(aten.clone, aten.alias, aten.lift_fresh, aten.positive, aten.contiguous)
def clone(x: Array, memory_format: Any = None) -> Array:
    return x


@lowering(aten.copy)
def copy(x: Array, src: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(cast(src, x.dtype), x.shape)


@lowering(aten.fill.Scalar, aten.fill.Tensor)
def fill(x: Array, value: Any) -> Array:
    return jnp.full(x.shape, cast(value, x.dtype))


@lowering(aten.polygamma)
def polygamma_of(n: int, x: Array) -> Array:
    return rounded(lambda x: polygamma(n, x), as_float(x))


@lowering(aten.frexp.Tensor)
def frexp(x: Array) -> tuple[Array, Array]:
    mantissa, exponent = jnp.frexp(x)
    return mantissa, exponent.astype(jnp.int32)


@lowering(aten.complex)
def complex_of(real: Array, imag: Array) -> Array:
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering(aten.polar)
def polar(size: Array, angle: Array) -> Array:
    return jax.lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@lowering(aten.view_as_real)
def view_as_real(x: Array) -> Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@lowering(aten.view_as_complex)
def view_as_complex(x: Array) -> Array:
    return jax.lax.complex(x[..., 0], x[..., 1])
