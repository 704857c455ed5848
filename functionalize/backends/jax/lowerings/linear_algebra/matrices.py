"""Products of matrices, distances, and linear algebra.

Invariant: products are computed in the precision that JAX is set to (``jax_default_matmul_precision``), else in torch's
(``torch.set_float32_matmul_precision``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize.backends.jax.lowerings.arithmetic.derivatives import absolute, of_order
from functionalize.backends.jax.lowerings.registry import lowering
from functionalize.backends.jax.values import cast, opmath

aten = torch.ops.aten
Array = Any


@lowering(aten.mm.default, aten.bmm.default, aten.mv, aten.dot, aten.matmul)
def product(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y)


@lowering(aten.vdot)
def vdot(x: Array, y: Array) -> Array:
    return jnp.vdot(x, y)


def _sum(begin: Array, product: Array, beta: Any, alpha: Any) -> Array:
    """A product added to what is there; where that counts nothing, nothing of it does."""
    product = product if _is(alpha, 1) else product * cast(alpha, product.dtype)
    if _is(beta, 0):
        return product
    return product + (begin if _is(beta, 1) else begin * cast(beta, begin.dtype))


def _is(number: Any, value: int) -> bool:
    return isinstance(number, (bool, int, float)) and number == value


@lowering(aten.addmm.default, aten.addmv, aten.baddbmm.default)
def addmm(begin: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    wide = opmath(x.dtype)
    return _sum(begin.astype(wide), jnp.matmul(x, y, preferred_element_type=wide), beta, alpha).astype(x.dtype)


@lowering(aten.addbmm)
def addbmm(begin: Array, x: Array, y: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    wide = opmath(x.dtype)
    summed = jnp.sum(jnp.matmul(x, y, preferred_element_type=wide), 0)
    return _sum(begin.astype(wide), summed, beta, alpha).astype(x.dtype)


@lowering(aten._cdist_forward)
def cdist(x: Array, y: Array, p: float, compute_mode: Any = None) -> Array:
    return _norm(x[..., :, None, :] - y[..., None, :, :], p)


@lowering(aten._pdist_forward)
def pdist(x: Array, p: float = 2.0) -> Array:
    rows, columns = jnp.triu_indices(x.shape[0], 1)
    return _norm(x[rows] - x[columns], p)


def _norm(difference: Array, p: float) -> Array:
    if p == 0:
        return jnp.sum(difference != 0, -1).astype(difference.dtype)
    if p == float("inf"):
        return jnp.max(absolute(difference), -1, initial=0)
    return of_order(float(p), (-1,), False, difference)


# Linear algebra: what fails is told by numbers that are no numbers, and `info` is zero


@lowering(aten.linalg_inv_ex)
def inv(x: Array, *, check_errors: bool = False) -> tuple[Array, Array]:
    return jnp.linalg.inv(x), jnp.zeros(x.shape[:-2], jnp.int32)


@lowering(aten.linalg_qr)
def qr(x: Array, mode: str = "reduced") -> tuple[Array, Array]:
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@lowering(aten.linalg_solve_triangular)
def solve_triangular(x: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    batch = jnp.broadcast_shapes(x.shape[:-2], b.shape[:-2])
    x, b = (jnp.broadcast_to(one, (*batch, *one.shape[-2:])) for one in (x, b))
    return jax.lax.linalg.triangular_solve(x, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


_TERMS = jax.lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
    dot_dimension_numbers=(((1,), (0,)), ((), ())), lhs_ragged_dimensions=(1,), rhs_group_dimensions=()
)


@lowering(aten._grouped_mm.default)
def grouped_mm(a: Array, b: Array, offs: Array | None = None, bias: None = None, out_dtype: Any = None) -> Array:
    """Products of groups of rows, of columns or of terms. What is of no group is zeros."""
    if offs is None:
        return jnp.matmul(a, b)
    sizes = jnp.diff(offs, prepend=0)
    if a.ndim == b.ndim:
        return jax.lax.ragged_dot_general(a, b, sizes, _TERMS)
    if a.ndim == 2:
        return jax.lax.ragged_dot(a, b, sizes)
    return jax.lax.ragged_dot(b.T, jnp.swapaxes(a, 1, 2), sizes).T
