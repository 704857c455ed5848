"""Special functions that JAX has otherwise than torch, or for fewer numbers.

Invariant: poles and numbers without a value give what torch's kernels give; derivatives are torch's formulas.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.scipy import special

Array = Any


@jax.custom_jvp
def digamma(x: Array) -> Array:
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), special.digamma(x))


@jax.custom_jvp
def zeta(x: Array, q: Array) -> Array:
    r"""Hurwitz' :math:`\sum_k (q + k)^{-x}`, over the negative numbers among :math:`q + k` as well.

    These are finitely many. Without their signs they go in steps of one, too: a difference of two sums.
    Limits: no number where infinite summands of either sign meet.
    """
    x, q = jnp.broadcast_arrays(x, q)
    pole = (q <= 0) & (q == jnp.floor(q))
    below = (q < 0) & ~pole
    first = jnp.where(below, -q - jnp.floor(-q), 0.5)  # the last negative number, without its sign
    sign = jnp.where(x % 2 == 1, -1, 1).astype(x.dtype)
    found = _zeta(x, jnp.where(below, 1 - first, jnp.where(pole, 1, q)))
    mirrored = found + sign * _zeta(x, first) - sign * _zeta(x, jnp.where(below, 1 - q, 1))
    mirrored = jnp.where(x == jnp.inf, x, jnp.where(x == jnp.floor(x), mirrored, jnp.nan))
    found = jnp.where(below, mirrored, found)
    found = jnp.where(pole, jnp.inf, found)
    return jnp.where(x < 1, jnp.nan, jnp.where(x == 1, jnp.inf, found))


def _zeta(x: Array, q: Array) -> Array:
    """Of positive numbers, by JAX; where the exponent is infinite, by the first number of the sum."""
    infinite = x == jnp.inf
    first = jnp.where(q < 1, jnp.inf, jnp.where(q == 1, 1, jnp.nan))
    return jnp.where(infinite, first, special.zeta(jnp.where(infinite, 2, x), q)).astype(q.dtype)


def _zeta_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """By the second argument as in torch. By the first one torch has no derivative: JAX's, where there is one."""
    x, q = jnp.broadcast_arrays(*primals)
    found, tangent = zeta(x, q), jnp.zeros_like(x)
    if type(tangents[1]) is not SymbolicZero:
        tangent = tangent - x * zeta(x + 1, q) * tangents[1]
    if type(tangents[0]) is not SymbolicZero:
        inside = (x > 1) & (q > 0)
        inner, other = jnp.where(inside, x, 2), jnp.where(inside, q, 1)
        slope = jax.jvp(lambda inner: special.zeta(inner, other), (inner,), (jnp.ones_like(inner),))[1]
        tangent = tangent + jnp.where(inside, slope, jnp.nan) * tangents[0]
    return found, tangent


zeta.defjvp(_zeta_jvp, symbolic_zeros=True)


def _trigamma(x: Array) -> Array:
    """As torch's kernel, which gives finite numbers at all poles but zero."""
    mirrored = x < 0.5
    sine = jnp.sin(jnp.asarray(jnp.pi, x.dtype) * jnp.where(mirrored, x, 0.5))
    begun = jnp.where(mirrored, -jnp.square(jnp.asarray(jnp.pi, x.dtype)) / (sine * sine), 0)
    y, found = jnp.where(mirrored, 1 - x, x), begun
    for _ in range(6):
        found, y = found + 1 / (y * y), y + 1
    inverse = 1 / (y * y)
    series = 1 + 1 / (2 * y) + inverse * (1 / 6 - inverse * (1 / 30 - inverse * (1 / 42)))
    found = found + series / y
    return jnp.where(mirrored, -found, found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def polygamma(n: int, x: Array) -> Array:
    if n < 2:
        return _trigamma(x) if n else digamma(x)
    factor = jnp.exp(jax.lax.lgamma(jnp.asarray(n + 1, x.dtype)))
    return (factor if n % 2 else -factor) * zeta(jnp.asarray(n + 1, x.dtype), x)


@polygamma.defjvp
def _polygamma_jvp(n: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return polygamma(n, *primals), polygamma(n + 1, *primals) * tangents[0]


@digamma.defjvp
def _digamma_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return digamma(*primals), polygamma(1, *primals) * tangents[0]
