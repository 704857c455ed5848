"""Matrices decomposed into factors, and what is solved by those: LU, Cholesky, eigenvectors, singular values.

Invariant: factors that are not unique, as the signs of eigenvectors, are JAX's. Limits: what fails is told by numbers
that are no numbers; `info` tells it where an LU factorization finds a zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from functionalize.backends.arrays.interpreter import Call
from functionalize.backends.jax.lowerings.registry import lowering

aten = torch.ops.aten
Array = Any
_solve = jax.lax.linalg.triangular_solve


def _adjoint(x: Array) -> Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _batched(*several: Array) -> list[Array]:
    """Matrices with the batches of all of them."""
    batch = jnp.broadcast_shapes(*(one.shape[:-2] for one in several))
    return [jnp.broadcast_to(one, (*batch, *one.shape[-2:])) for one in several]


def _lu(x: Array) -> tuple[Array, Array]:
    """Both factors in one matrix, and which row each row was exchanged with, counted from one."""
    found, pivots, _ = jax.lax.linalg.lu(x)
    return found, pivots + 1


def _info(factors: Array) -> Array:
    """The first zero on the diagonal, counted from one; 0 where there is none."""
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    first = jnp.argmax(zero, -1) + 1 if zero.shape[-1] else jnp.zeros(zero.shape[:-1])
    return jnp.where(jnp.any(zero, -1), first, 0).astype(jnp.int32)


@lowering(aten.linalg_lu_factor_ex.default)
def lu_factor(x: Array, *, pivot: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array]:
    if not pivot:
        raise ValueError("JAX has no LU factorization without pivots")
    factors, pivots = _lu(x)
    return factors, pivots, _info(factors)


def _triangles(factors: Array) -> tuple[Array, Array]:
    rows, columns = factors.shape[-2:]
    least = min(rows, columns)
    lower = jnp.tril(factors[..., :, :least], -1) + jnp.eye(rows, least, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :least, :])


@lowering(aten.lu_unpack.default)
def lu_unpack(
    factors: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Array, Array, Array]:
    nothing = jnp.zeros((0,), factors.dtype)
    lower, upper = _triangles(factors) if unpack_data else (nothing, nothing)
    return (_permutation(pivots, factors) if unpack_pivots else nothing), lower, upper


def _permutation(pivots: Array, factors: Array) -> Array:
    order = jax.lax.linalg.lu_pivots_to_permutation(pivots - 1, factors.shape[-2])
    return jnp.swapaxes(jax.nn.one_hot(order, factors.shape[-2], dtype=factors.dtype), -1, -2)


@lowering(aten.linalg_lu.default)
def lu(x: Array, *, pivot: bool = True) -> tuple[Array, Array, Array]:
    factors, pivots, _ = lu_factor(x, pivot=pivot)
    return lu_unpack(factors, pivots)


@lowering(aten.linalg_lu_solve.default)
def lu_solve(factors: Array, pivots: Array, right: Array, *, left: bool = True, adjoint: bool = False) -> Array:
    if not left:
        return _adjoint(lu_solve(factors, pivots, _adjoint(right), adjoint=not adjoint))
    permutation = _permutation(pivots, factors)
    permutation, factors, right = _batched(permutation, factors, right)
    lower = partial(_solve, factors, left_side=True, lower=True, unit_diagonal=True)
    upper = partial(_solve, factors, left_side=True, lower=False)
    if not adjoint:
        return upper(lower(jnp.matmul(jnp.swapaxes(permutation, -1, -2), right)))
    options = {"transpose_a": True, "conjugate_a": True}
    return jnp.matmul(permutation, lower(upper(right, **options), **options))


@lowering(aten._linalg_solve_ex.default)
def solve(
    x: Array, right: Array, *, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    factors, pivots = _lu(x)
    vector = right.ndim == 1 or (x.ndim - 1 == right.ndim and right.shape == x.shape[:-1])
    found = lu_solve(factors, pivots, right[..., None] if vector else right, left=left or vector)
    return (found[..., 0] if vector else found), factors, pivots, _info(factors)


def _factors_of_determinant(call: Call, x: Array) -> tuple[Array, Array]:
    """Those of torch's kernel: of the transpose where the matrix is contiguous and real, which its backward asks."""
    matrix = call.meta(0)
    return _lu(jnp.swapaxes(x, -1, -2) if matrix.is_contiguous() and not matrix.is_complex() else x)


@lowering(aten._linalg_det.default, takes_call=True)
def det(call: Call, x: Array) -> tuple[Array, Array, Array]:
    return jnp.linalg.det(x), *_factors_of_determinant(call, x)


@lowering(aten._linalg_slogdet.default, takes_call=True)
def slogdet(call: Call, x: Array) -> tuple[Array, Array, Array, Array]:
    sign, size = jnp.linalg.slogdet(x)
    return sign, size, *_factors_of_determinant(call, x)


def _of_triangle(x: Array, upper: bool = False) -> Array:
    """The Hermitian matrix that has one triangle of a matrix; its gradient goes to both, as in torch."""
    half = jnp.triu(x) if upper else jnp.tril(x)
    whole = half + _adjoint(jnp.triu(x, 1) if upper else jnp.tril(x, -1))
    mean = (x + _adjoint(x)) / 2
    return mean + jax.lax.stop_gradient(whole - mean)


def cholesky(x: Array, upper: bool = False) -> Array:
    return jnp.linalg.cholesky(_of_triangle(x, upper), upper=upper, symmetrize_input=False)


if hasattr(aten, "cholesky"):  # up to torch 2.14
    lowering(aten.cholesky.default)(cholesky)


@lowering(aten.linalg_cholesky_ex)
def cholesky_ex(x: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    return cholesky(x, upper), jnp.zeros(x.shape[:-2], jnp.int32)  # what fails is told by NaN


@lowering(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(right: Array, factor: Array, upper: bool = False) -> Array:
    factor, right = _batched(factor, right)
    first = {"transpose_a": upper, "conjugate_a": upper}
    second = {"transpose_a": not upper, "conjugate_a": not upper}
    half = _solve(factor, right, left_side=True, lower=not upper, **first)
    return _solve(factor, half, left_side=True, lower=not upper, **second)


@lowering(aten.cholesky_inverse.default)
def cholesky_inverse(factor: Array, upper: bool = False) -> Array:
    return cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowering(aten.triangular_solve.default)
def triangular_solve(
    right: Array, x: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    x, right = _batched(x, right)
    options = {"transpose_a": transpose, "unit_diagonal": unitriangular}
    return _solve(x, right, left_side=True, lower=not upper, **options), x


@lowering(aten._linalg_eigh.default)
def eigh(x: Array, uplo: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(_of_triangle(x, uplo.upper() == "U"), symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


@lowering(aten._linalg_svd.default)
def svd(
    x: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Array, Array, Array]:
    if compute_uv:
        left, values, right = jnp.linalg.svd(x, full_matrices=full_matrices)
        return left, values, right
    nothing = jnp.zeros((0,), x.dtype)
    return nothing, jnp.linalg.svd(x, compute_uv=False), nothing


@lowering(aten.linalg_pinv.atol_rtol_tensor)
def pinv(x: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False) -> Array:
    real = jnp.real(x).dtype
    precision = max(x.shape[-2:]) * np.finfo(real).eps
    absolute = jnp.zeros((), real) if atol is None else atol.astype(real)
    relative = jnp.where(absolute > 0, 0, precision) if rtol is None else rtol
    return _pinv(x, absolute[..., None], relative[..., None].astype(real), hermitian)


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _pinv(x: Array, absolute: Array, relative: Array, hermitian: bool) -> Array:
    if hermitian:
        values, left = jnp.linalg.eigh(_of_triangle(x), symmetrize_input=False)
        right = _adjoint(left)
    else:
        left, values, right = jnp.linalg.svd(x, full_matrices=False)
    size = jnp.abs(values)
    most = jnp.max(size, -1, initial=0, keepdims=True)
    counts = size > jnp.maximum(absolute, relative * most)
    inverse = jnp.where(counts, 1 / jnp.where(counts, values, 1), 0)
    return jnp.matmul(_adjoint(right) * inverse[..., None, :].astype(x.dtype), _adjoint(left))


@_pinv.defjvp
def _pinv_jvp(hermitian: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Golub and Pereyra's formula: that of the factors has none where singular values are equal, as zeros are."""
    x, change = primals[0], tangents[0]
    found = _pinv(*primals, hermitian)
    back = jnp.matmul(found, x)
    onto, back_change = jnp.matmul(x, found), _adjoint(change)
    first = jnp.matmul(found, jnp.matmul(_adjoint(found), back_change))
    second = jnp.matmul(jnp.matmul(back_change, _adjoint(found)), found)
    moved = first - jnp.matmul(first, onto) + second - jnp.matmul(back, second)
    return found, moved - jnp.matmul(found, jnp.matmul(change, found))


@lowering(aten.linalg_matrix_exp.default)
def matrix_exp(x: Array) -> Array:
    flat = x.reshape(-1, *x.shape[-2:])
    return (jax.vmap(jax.scipy.linalg.expm)(flat) if flat.size else flat).reshape(x.shape)


@lowering(aten.linalg_householder_product.default)
def householder_product(x: Array, scales: Array) -> Array:
    return jax.lax.linalg.householder_product(x, scales)


@lowering(aten.linalg_eig.default)
def eig(x: Array) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eig(x)
    return values, vectors
