"""Derivatives as torch has them, where JAX's formulas give others: at kinks, at ties, at zero over zero.

Invariant: values are those of the function; derivatives of derivatives are those of torch's formulas. Limits: real
numbers; complex ones have JAX's derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.scipy import special

from functionalize.backends.jax.lowerings.arithmetic.special import digamma

Array = Any


def with_slopes(function: Callable[..., Array], *slopes: Callable[..., Array]) -> Callable[..., Array]:
    """A function of elements with partial derivatives of ours, each a function of the result and the operands."""
    sloped = jax.custom_jvp(function)

    def jvp(operands: Any, tangents: Any) -> tuple[Array, Array]:
        found = sloped(*operands)
        tangent = jnp.zeros_like(found)
        for slope, one in zip(slopes, tangents, strict=True):
            if type(one) is not SymbolicZero:
                tangent = tangent + slope(found, *operands) * one
        return found, tangent

    sloped.defjvp(jvp, symbolic_zeros=True)

    def computed(*operands: Array) -> Array:
        real = all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
        return sloped(*operands) if real else function(*operands)

    return computed


def held(inside: Array, x: Array, otherwise: Array) -> Array:
    """One value where a condition holds, and elsewhere another, which has no derivative."""
    return jnp.where(inside, x, jax.lax.stop_gradient(otherwise))


def bounded(x: Array, low: Array | None, high: Array | None) -> Array:
    """A value between bounds, or the bound: on a bound it counts for the value, with its derivative and its sign."""
    if low is not None:
        x = jnp.where((x < low) | (low != low), low, x)
    return x if high is None else jnp.where((x > high) | (high != high), high, x)


def evenly(x: Array, value: Array) -> Array:
    """A value that is that of some elements: all of these have the same part in its derivative."""
    value = jax.lax.stop_gradient(value)
    alike = (x == value) | ((x != x) & (value != value))
    moved = jnp.where(alike, x - jax.lax.stop_gradient(x), 0)
    return value + jnp.where(alike.any(), jnp.sum(moved) / jnp.maximum(jnp.sum(alike), 1), 0).astype(x.dtype)


def _over(x: Array, y: Array) -> Array:
    """A quotient, which is zero where it is divided by zero."""
    none = y == 0
    return jnp.where(none, 0, x / jnp.where(none, 1, y))


def _by_base(found: Array, x: Array, y: Array) -> Array:
    constant = y == 0
    return jnp.where(constant, 0, y * power(x, jnp.where(constant, 1, y - 1)))


def _by_exponent(found: Array, x: Array, y: Array) -> Array:
    constant = (x == 0) & (y >= 0)
    return jnp.where(constant, 0, power(x, y) * jnp.log(jnp.where(constant, 1, x)))


def _sign(x: Array) -> Array:
    return jnp.where(x != x, 0, jnp.sign(x))


def _logit(x: Array) -> Array:
    return jnp.log(x / (1 - x))


def sinc(x: Array) -> Array:
    """At zero it is one, and has no derivative of any order, as in torch."""
    turns = jnp.asarray(jnp.pi, x.dtype) * jnp.where(x == 0, 1, x)
    return jnp.where(x == 0, 1, jnp.sin(turns) / turns)


def _quotient(x: Array, y: Array) -> Array:
    """The quotient, rounded once: XLA multiplies by the reciprocal of a divisor that it broadcasts, but not of this."""
    return x / jnp.where(jnp.isnan(x), y * jnp.nan, y)


absolute = with_slopes(jnp.abs, lambda found, x: _sign(x))
arctan2 = with_slopes(jnp.arctan2, lambda _, y, x: _over(x, x * x + y * y), lambda _, y, x: _over(-y, x * x + y * y))
copysign = with_slopes(jnp.copysign, lambda found, x, y: _over(found, x), lambda found, x, y: jnp.zeros_like(found))
hypot = with_slopes(jnp.hypot, lambda found, x, y: x / found, lambda found, x, y: y / found)
i0 = with_slopes(special.i0, lambda found, x: special.i1(x))
lgamma = with_slopes(jax.lax.lgamma, lambda found, x: digamma(x))
logit = with_slopes(_logit, lambda found, x: jnp.where((x < 0) | (x > 1), jnp.nan, 1 / (jnp.abs(x) * (1 - x))))
power = with_slopes(jnp.power, _by_base, _by_exponent)
quotient = with_slopes(_quotient, lambda found, x, y: 1 / y, lambda found, x, y: -found / y)
# As in deviations and norms.
root: Callable[[Array], Array] = with_slopes(jnp.sqrt, lambda found, x: _over(jnp.full_like(x, 0.5), root(x)))


def fmax(x: Array, y: Array) -> Array:
    """The larger of two, the first of two alike, and a number rather than none."""
    return jnp.where((x >= y) | (y != y), x, y)


def fmin(x: Array, y: Array) -> Array:
    """The smaller, likewise."""
    return jnp.where((x <= y) | (y != y), x, y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def of_order(order: float, axes: tuple[int, ...], keepdims: bool, x: Array) -> Array:
    """The norm of some order, finite and not zero, over some dimensions; at zero it has no derivative, as in torch."""
    size = absolute(x)
    if order == 1 or all(x.shape[one] == 1 for one in axes):
        return jnp.sum(size, axes, keepdims=keepdims)
    if order == 2:
        return root(jnp.sum(x * x, axes, keepdims=keepdims))
    return power(jnp.sum(_raised(size, order), axes, keepdims=keepdims), jnp.asarray(1 / order, x.dtype))


@of_order.defjvp
def _of_order_jvp(order: float, axes: tuple[int, ...], keepdims: bool, primals: Any, tangents: Any) -> Any:
    (x,), (moved,) = primals, tangents
    found = of_order(order, axes, keepdims, x)
    if order == 2:
        return found, _over(jnp.sum(x * moved, axes, keepdims=keepdims), found)
    slope = _sign(x) if order == 1 else _sign(x) * _raised(jnp.where(x == 0, 1, absolute(x)), order - 1)
    part = jnp.sum(slope * moved, axes, keepdims=keepdims)
    none = found == 0
    return found, jnp.where(none, 0, part * _raised(jnp.where(none, 1, found), 1 - order))


def _raised(x: Array, order: float) -> Array:
    return power(x, jnp.asarray(order, x.dtype))
