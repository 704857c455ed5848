"""What is taken of many elements at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch.symbols.sizes import hint_of
from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite

aten = torch.ops.aten


@rewrite(aten.any.default, aten.any.dim, aten.any.dims)
def any_of_dims(values: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    """Of no elements, the largest of which is less than all to ONNX, and so no zero."""
    dims = list(range(values.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if values.dim() and not _may_be_none(values, dims):
        return NotImplemented
    found = aten.ne.Scalar(values, 0)
    found = found.sum(dims, keepdim=keepdim) > 0 if values.dim() else found
    return found.to(torch.uint8) if values.dtype == torch.uint8 else found  # of bytes torch gives a byte


@rewrite(aten.mean.default, aten.mean.dim)
def mean(
    values: Any, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Of no elements, which is NaN; ONNX says zero."""
    dims = list(dim or range(values.dim()))
    if not values.dim() or not _may_be_none(values, dims):
        return NotImplemented
    return values.sum(dims, keepdim=keepdim, dtype=dtype) / math.prod(values.size(one) for one in dims)


def _mean_loss(op: Any) -> Rewrite:
    """The mean of a loss of no elements, which is NaN."""
    names = [argument.name for argument in op._schema.arguments]

    def of_elements(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("reduction", _MEAN) != _MEAN or not _may_be_none(args[0], range(args[0].dim())):
            return NotImplemented
        return mean(op(**given | {"reduction": 0}))

    return of_elements


_MEAN = 1  # among the reductions
for _op in (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
):
    rewrite(_op)(_mean_loss(_op))


_OVERFLOWS = 65520.0  # the least number that float16 rounds to infinity


@rewrite(aten.soft_margin_loss.default)
def soft_margin_loss(x: Any, target: Any, reduction: int = _MEAN) -> Any:
    """Of float16 as eager's kernel, step by step: it overflows, where the engine computes with 32 bits."""
    if x.dtype is not torch.float16:
        return NotImplemented
    powers = (-x * target).float().exp()
    losses = (aten.where.ScalarSelf(powers >= _OVERFLOWS, math.inf, powers) + 1).log().half()
    return losses if reduction == 0 else losses.mean() if reduction == _MEAN else losses.sum()


@rewrite(aten.var_mean.correction)
def var_mean(
    values: Any, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """Of no elements, which are no numbers, and ONNX says zero; of fewer than are corrected for, infinite."""
    correction = 1 if correction is None else correction
    if not values.dim():
        return torch.var_mean(values.reshape([1]), [0], correction=correction)
    dims = list(dim or range(values.dim()))
    count: Any = math.prod(values.size(one) for one in dims)
    if not (_may_be_none(values, dims) or _may_be_less(count, correction)):
        return NotImplemented
    if values.dtype in (torch.float16, torch.bfloat16):
        found = var_mean(values.float(), dims, correction=correction, keepdim=keepdim)
        return tuple(one.to(values.dtype) for one in found)
    middle = values.sum(dims, keepdim=True) / count
    squares = (values - middle).square().sum(dims, keepdim=keepdim)
    freedom = torch.sym_max(count - (int(correction) if correction == int(correction) else correction), 0)
    return squares / freedom, middle if keepdim else middle.reshape(squares.size())


def _may_be_less(count: Any, least: float) -> bool:
    """Whether a number of elements may be less than another, or leave nothing; one is sure."""
    return bool(count <= least) if type(count) is int else least > 1


def _by_variance(made: Callable[[Any, Any], Any]) -> Rewrite:
    """What is made of the variance and the mean."""

    def computed(*args: Any, **options: Any) -> Any:
        found = var_mean(*args, **options)
        return found if found is NotImplemented else made(*found)

    return computed


rewrite(aten.var.correction)(_by_variance(lambda variance, _: variance))
rewrite(aten.std.correction)(_by_variance(lambda variance, _: variance.sqrt()))
rewrite(aten.std_mean.correction)(_by_variance(lambda variance, mean: (variance.sqrt(), mean)))


def _may_be_none(values: Any, dims: Sequence[int]) -> bool:
    """Whether there may be no elements along some dimensions; sizes that arguments tell are others than zero."""
    return any(size == 0 if type(size) is int else hint_of(size) is None for size in map(values.size, dims))


@rewrite(aten.linalg_vector_norm.default)
def vector_norm(
    values: Any, order: Any = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """The extreme ones, which are no numbers if some value is none; others of 64 bits, with powers of 64 bits."""
    values = values if dtype is None else values.to(dtype)
    if values.is_complex() or not values.dim():
        return NotImplemented
    dims = list(range(values.dim())) if dim is None else list(dim)
    if order in (math.inf, -math.inf):
        found = (aten.amax if order > 0 else aten.amin).default(values.abs(), dims, keepdim)
        unknown = aten.any.dims(aten.isnan.default(values), dims, keepdim)
        return aten.where.ScalarSelf(unknown, math.nan, found)
    if values.dtype != torch.float64 or order in (0, 1, 2):
        return NotImplemented
    return values.abs().pow(order).sum(dims, keepdim=keepdim).pow(1 / order)


def _largest(whole: Any, of_truths: Any, values: Any, dim: Sequence[int], keepdim: bool) -> Any:
    if not values.dim():
        return aten.clone.default(values)
    if dim and values.dtype is not torch.bool:
        return NotImplemented
    return (of_truths if values.dtype is torch.bool else whole)(values, list(dim or range(values.dim())), keepdim)


@rewrite(aten.amax.default)
def largest(values: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return _largest(aten.amax.default, aten.any.dims, values, dim, keepdim)


@rewrite(aten.amin.default)
def smallest(values: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return _largest(aten.amin.default, aten.all.dims, values, dim, keepdim)


@rewrite(aten.aminmax.default)
def smallest_and_largest(values: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = list(range(values.dim())) if dim is None else [dim]
    return aten.amin.default(values, dims, keepdim), aten.amax.default(values, dims, keepdim)


@rewrite(aten.scatter_reduce.two)
def scatter_mean(
    values: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:  # fmt: skip
    """The mean of what goes to one place, which the exporter writes over each other."""
    if reduce != "mean":
        return NotImplemented
    if values.dtype in (torch.float16, torch.bfloat16):
        options = {"include_self": include_self}
        return scatter_mean(values.float(), dim, index, source.float(), reduce, **options).to(values.dtype)
    add = aten.scatter_reduce.two
    total = add(values, dim, index, source, "sum", include_self=include_self)
    first = torch.full_like(values, int(include_self))
    count = add(first, dim, index, torch.ones_like(source), "sum").clamp(min=1)
    rounding = None if values.dtype.is_floating_point else "floor"
    return aten.div.Tensor_mode(total, count, rounding_mode=rounding)


_BEYOND = {"amax": -math.inf, "amin": math.inf}


@rewrite(aten.scatter_reduce.two)
def scatter_extreme(
    values: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:  # fmt: skip
    """Of floats without what is there: the exporter puts the extreme finite numbers there, and no infinities."""
    if include_self or reduce not in _BEYOND or not values.dtype.is_floating_point:
        return NotImplemented
    cleared = aten.scatter.value(values, dim, index, _BEYOND[reduce])
    return aten.scatter_reduce.two(cleared, dim, index, source, reduce)


def _on_one_element(op: Any) -> Rewrite:
    """Along a dimension of a tensor that has none."""

    def with_a_dimension(*args: Any, **kwargs: Any) -> Any:
        if args[0].dim():
            return NotImplemented
        found = op(*(one.reshape(1) if isinstance(one, torch.Tensor) else one for one in args), **kwargs)
        return found.reshape([]) if isinstance(found, torch.Tensor) else tuple(one.reshape([]) for one in found)

    return with_a_dimension


for _op in (
    *(aten.all.dim, aten.prod.dim_int, aten.topk.default),
    *(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two),
):
    rewrite(_op)(_on_one_element(_op))


@rewrite(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_joined(values: Any, dim: int, index: Any, source: Any, *, reduce: str) -> Any:
    """By the names that ``scatter`` has for these."""
    if not isinstance(source, torch.Tensor):
        source = aten.full.default(index.size(), source, dtype=values.dtype)
    return aten.scatter_reduce.two(values, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])
