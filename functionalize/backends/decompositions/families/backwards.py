"""Backwards that torch decomposes nowhere: of what resamples each dimension by itself, of what picks elements, and of
what has a formula by other operators, which are differentiated.

A resampling (pooling of averages, interpolation, replicating borders) is a product with a matrix along each dimension,
and its backward one with the transposed matrices. The matrix of a dimension is what the operator itself makes of the
identity there, so that each backend computes both by one row.

Invariant: a row computes what the operator computes, 16 bits in 32; for arguments that it does not take it gives
NotImplemented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch.decompositions import decomposition_of
from functionalize.backends.decompositions.opmath import wide

aten = torch.ops.aten
Function = Callable[..., Any]
Resampled = Callable[[Any, int, Any], Any]  # (identity, dimension, size there before) -> what is made of the identity


def transposed(gradient: Any, sizes: Sequence[Any], resampled: Resampled) -> Any:
    """A gradient times the transposed matrices of the last dimensions. ``sizes``: of these, before the resampling."""
    dims, dtype = len(sizes), gradient.dtype
    if not gradient.numel():
        return gradient.new_zeros([*gradient.size()[: gradient.dim() - dims], *sizes])
    found = wide(gradient)
    for dim, size in enumerate(sizes):
        shape = [size if one == dim else 1 for one in range(dims)]
        identity = torch.eye(size, dtype=found.dtype, device=gradient.device).reshape([1, size, *shape])
        found = along(found, dim - dims, resampled(identity, dim, size).reshape(size, -1).t())
    return found.to(dtype)


def along(x: Any, dim: int, matrix: Any) -> Any:
    """The product with a matrix along a dimension, counted from the end."""
    rows = x.movedim(dim, -1)
    product = aten.mm.default(rows.reshape([-1, matrix.size(0)]), matrix)
    return product.reshape([*rows.size()[:-1], matrix.size(1)]).movedim(-1, dim)


def _alone(dims: int, dim: int, value: Any, other: Any = 1) -> list[Any]:
    """A list with a value for one dimension, and another one for the rest."""
    return [value if one == dim else other for one in range(dims)]


def _of_interpolation(op: Any, dims: int) -> Function:
    count = len(op._schema.arguments) - 2 - dims

    def backward(gradient: Any, output_size: Any, input_size: Any, *rest: Any) -> Any:
        options, scales = rest[:count], [*rest[count:], *[None] * dims][:dims]

        def resampled(identity: Any, dim: int, size: Any) -> Any:
            kept = _alone(dims, dim, scales[dim], None)
            return op(identity, _alone(dims, dim, output_size[dim]), *options, *kept)

        return transposed(gradient, input_size[2:], resampled)

    return backward


def _each(values: Any, dims: int, default: Sequence[int] = ()) -> list[int]:
    given = list(values) or list(default)
    return given * dims if len(given) == 1 else given


def _of_average_pool(op: Any, dims: int) -> Function:
    def backward(
        gradient: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, included: bool,
        divisor: int | None,
    ) -> Any:  # fmt: skip
        kernel = _each(kernel, dims)
        stride, padding = _each(stride, dims, kernel), _each(padding, dims)

        def resampled(identity: Any, dim: int, size: Any) -> Any:
            geometry = (
                _alone(dims, dim, kernel[dim]),
                _alone(dims, dim, stride[dim]),
                _alone(dims, dim, padding[dim], 0),
            )
            return op(identity, *geometry, ceil_mode, included, None if divisor is None else 1)

        found = transposed(gradient, x.size()[-dims:], resampled)
        return found if divisor is None else found / divisor

    return backward


def _of_adaptive_average_pool(op: Any, dims: int) -> Function:
    def backward(gradient: Any, x: Any) -> Any:
        def resampled(identity: Any, dim: int, size: Any) -> Any:
            return op(identity, _alone(dims, dim, gradient.size(dim - dims)))

        return transposed(gradient, x.size()[-dims:], resampled)

    return backward


def _of_replication_pad(op: Any, dims: int) -> Function:
    def backward(gradient: Any, x: Any, padding: Any) -> Any:
        def resampled(identity: Any, dim: int, size: Any) -> Any:
            first = 2 * (dims - 1 - dim)  # the last dimension comes first
            return op(identity, [padding[one] if one in (first, first + 1) else 0 for one in range(2 * dims)])

        return transposed(gradient, x.size()[-dims:], resampled)

    return backward


def _of_maximum_pool(dims: int) -> Function:
    """The gradients at the places of the maxima, which count the elements of a plane; the last argument has them."""

    def backward(gradient: Any, x: Any, *geometry: Any) -> Any:
        size, lead = x.size(), x.dim() - dims
        zeros = aten.full.default([*size[:lead], math.prod(size[lead:])], 0, dtype=gradient.dtype)
        places = geometry[-1].reshape([*size[:lead], -1])
        return zeros.scatter_add(lead, places, gradient.reshape([*size[:lead], -1])).reshape(size)

    return backward


def adaptive_average_pool_3d(x: Any, output_size: Any) -> Any:
    """Along the last two dimensions, and along the first."""
    lead, (depth, height, width) = x.size()[:-3], x.size()[-3:]
    found = aten._adaptive_avg_pool2d.default(x.reshape([-1, depth, height, width]), list(output_size[1:]))
    height, width = output_size[1:]
    found = aten._adaptive_avg_pool2d.default(
        found.reshape([-1, 1, depth, height * width]), [output_size[0], height * width]
    )
    return found.reshape([*lead, *output_size])


def masked_scatter_backward(gradient: Any, mask: Any, sizes: Any) -> Any:
    """The elements that a mask chooses, one after the other, and zeros behind them."""
    chosen = mask.expand(gradient.size()).reshape(-1)
    places = torch.where(chosen, chosen.to(torch.int64).cumsum(0) - 1, 0)
    values = torch.where(chosen, gradient.reshape(-1), 0)
    count = math.prod(sizes)
    zeros = aten.full.default([count], 0, dtype=gradient.dtype)
    return zeros.scatter_add(0, places, values).reshape(sizes)


def _differentiated(function: Function, inputs: Sequence[Any], gradient: Any) -> Any:
    """The gradients of a function of tensors."""
    backward: Any = torch.func.vjp(function, *inputs)[1]
    return backward(gradient)


def shrink_backward(gradient: Any, x: Any, limit: Any) -> Any:
    return torch.where((x >= -limit) & (x <= limit), 0, gradient)


def grid_sampler_2d_backward(
    gradient: Any, x: Any, grid: Any, mode: int, padding: int, align_corners: bool, wanted: Any
) -> Any:
    formula = decomposition_of(aten.grid_sampler_2d.default)
    assert formula is not None
    found = _differentiated(lambda *both: formula(*both, mode, padding, align_corners), (x, grid), gradient)
    return tuple(one if want else None for one, want in zip(found, wanted, strict=True))


def multi_margin_loss_backward(gradient: Any, x: Any, *rest: Any) -> Any:
    formula = decomposition_of(aten.multi_margin_loss.default)
    assert formula is not None
    return _differentiated(lambda x: formula(x, *rest), (x,), gradient)[0]


def _of_distances(gradient: Any, differences: Any, p: float, distances: Any) -> Any:
    """Of the norms of differences along the last dimension; zeros where the norm is not smooth."""
    far, by = distances.unsqueeze(-1), gradient.unsqueeze(-1)
    signs, sizes = differences.sign(), differences.abs()
    if p == 0:
        return differences * 0
    if p == 1:
        return signs * by
    if p == math.inf:
        return signs * (sizes == far) * by
    powers = differences if p == 2 else signs * sizes.pow(p - 1)
    if p < 2:
        powers = torch.where(differences == 0, 0, powers)
    return torch.where(far == 0, 0, powers * by / (far if p == 2 else far.pow(p - 1)))


def cdist_backward(gradient: Any, x: Any, y: Any, p: float, distances: Any) -> Any:
    return _of_distances(gradient, x.unsqueeze(-2) - y.unsqueeze(-3), p, distances).sum(-2)


def _pairs(count: int) -> list[Any]:
    """The rows and columns of a matrix's upper part, one after the other."""
    rows, columns = [], []
    for row in range(count - 1):
        rows.append(aten.full.default([count - 1 - row], row, dtype=torch.int64))
        columns.append(aten.arange.start(row + 1, count, dtype=torch.int64))
    return [torch.cat(rows), torch.cat(columns)]


def pdist_forward(x: Any, p: float = 2) -> Any:
    if type(x.size(0)) is not int:
        return NotImplemented
    if x.size(0) < 2:
        return x.new_zeros([0])
    rows, columns = _pairs(x.size(0))
    return torch.linalg.vector_norm(x[rows] - x[columns], p, -1)


def pdist_backward(gradient: Any, x: Any, p: float, distances: Any) -> Any:
    if type(x.size(0)) is not int:
        return NotImplemented
    if x.size(0) < 2:
        return torch.zeros_like(x)
    rows, columns = _pairs(x.size(0))
    found = _of_distances(gradient, x[rows] - x[columns], p, distances)
    return torch.zeros_like(x).index_add(0, rows, found).index_add(0, columns, -found)


_INTERPOLATIONS = {
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_trilinear3d": 3,
    "upsample_bicubic2d": 2,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
}


def _backward_of(name: str) -> Any:
    return getattr(aten, f"{name}_backward").default


OF_INTERPOLATIONS: dict[Any, Function] = {
    _backward_of(name): _of_interpolation(getattr(aten, name).default, dims) for name, dims in _INTERPOLATIONS.items()
}
BACKWARDS: dict[Any, Function] = {
    **OF_INTERPOLATIONS,
    **{_backward_of(f"avg_pool{n}d"): _of_average_pool(getattr(aten, f"avg_pool{n}d").default, n) for n in (2, 3)},
    **{
        _backward_of(f"_adaptive_avg_pool{n}d"): _of_adaptive_average_pool(
            getattr(aten, f"_adaptive_avg_pool{n}d").default, n
        )
        for n in (2, 3)
    },
    **{
        _backward_of(f"replication_pad{n}d"): _of_replication_pad(getattr(aten, f"replication_pad{n}d").default, n)
        for n in (1, 2, 3)
    },
    aten.max_pool3d_with_indices_backward.default: _of_maximum_pool(3),
    aten.adaptive_max_pool2d_backward.default: _of_maximum_pool(2),
    aten.adaptive_max_pool3d_backward.default: _of_maximum_pool(3),
    aten.fractional_max_pool2d_backward.default: _of_maximum_pool(2),
    aten.fractional_max_pool3d_backward.default: _of_maximum_pool(3),
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.hardshrink_backward.default: shrink_backward,
    aten.softshrink_backward.default: shrink_backward,
    aten.grid_sampler_2d_backward.default: grid_sampler_2d_backward,
    aten.multi_margin_loss_backward.default: multi_margin_loss_backward,
    aten._cdist_backward.default: cdist_backward,
    aten._pdist_forward.default: pdist_forward,
    aten._pdist_backward.default: pdist_backward,
    aten._adaptive_avg_pool3d.default: adaptive_average_pool_3d,
}
DIFFERENTIATED = frozenset({aten.grid_sampler_2d_backward.default, aten.multi_margin_loss_backward.default})
