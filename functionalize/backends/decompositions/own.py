"""Decompositions that torch's tables lack, or have wrong: operators that engines do not have, by operators of the core
ATen set.

Invariant: a row computes what the operator computes; for arguments that it does not take it gives NotImplemented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from functionalize.backends.decompositions.families.antialiasing import ANTIALIASED
from functionalize.backends.decompositions.families.attention import ATTENTION
from functionalize.backends.decompositions.families.backwards import BACKWARDS, DIFFERENTIATED
from functionalize.backends.decompositions.families.embedding_bags import BAGS
from functionalize.backends.decompositions.families.gpu_kernels import GPU_KERNELS
from functionalize.backends.decompositions.families.quantization import QUANTIZATION
from functionalize.backends.decompositions.families.recurrent_layers import LAYERS
from functionalize.backends.decompositions.opmath import wide

aten = torch.ops.aten


def places(size: Sequence[Any], stride: Sequence[Any], offset: Any) -> Any:
    """The elements of a storage that a layout shows, one after the other."""
    found: Any = aten.full.default([1] * len(size), offset, dtype=torch.int64)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * dim + [count] + [1] * (len(size) - dim - 1)
        found = found + aten.arange.default(count, dtype=torch.int64).reshape(shape) * step
    return found.expand(size).reshape(-1)


def as_strided_scatter(base: Any, value: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    """Of a tensor whose elements lie in order."""
    if not base.is_contiguous():
        return NotImplemented
    found = aten.scatter.src(base.reshape(-1), 0, places(size, stride, offset or 0), value.reshape(-1))
    return found.reshape(base.size())


def weight_norm_backward(gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> Any:
    """Of `v * g / norms`, the norms taken of all dimensions but one."""
    others = [one for one in range(v.dim()) if one != dim % v.dim()]
    along = (gradient * v).sum(others, keepdim=True) / norms
    of_v = (gradient - v * (along / norms)) * (g / norms)
    return of_v.to(v.dtype), along.to(g.dtype)


_MEAN, _SUM = 1, 2  # among the reductions


def multilabel_margin_loss(x: Any, targets: Any, reduction: int) -> Any:
    """Also with what is a target: torch's own takes the places behind the last target for the first class."""
    size, rows, labels = x.size(), torch.atleast_2d(x), torch.atleast_2d(targets)
    count = rows.size(1)
    classes = torch.arange(count)
    ends = torch.where(labels < 0, classes, count).amin(-1, keepdim=True)
    counted = classes < ends
    is_target = torch.logical_and(classes == labels.unsqueeze(-1), counted.unsqueeze(-1)).any(1)
    scores = rows.gather(1, torch.where(counted, labels, 0))
    margins = (1 - scores.unsqueeze(-1) + rows.unsqueeze(1)).clamp(min=0)
    counts = torch.logical_and(counted.unsqueeze(-1), torch.logical_not(is_target).unsqueeze(1))
    losses = torch.where(counts, margins, 0).sum([1, 2]) / count
    found = losses.mean() if reduction == _MEAN else losses.sum() if reduction == _SUM else losses.reshape(size[:-1])
    return found, is_target.to(x.dtype).reshape(targets.size())


def multilabel_margin_loss_backward(gradient: Any, x: Any, targets: Any, reduction: int, _: Any) -> Any:
    backward: Any = torch.func.vjp(lambda x: multilabel_margin_loss(x, targets, reduction)[0], x)[1]
    return backward(gradient)[0]


def soft_margin_loss(x: Any, target: Any, reduction: int = _MEAN) -> Any:
    """In the steps of torch's kernels, which overflow with 16 bits: its decomposition goes by 32."""
    losses = (-x * target).exp().log1p()
    return losses.mean() if reduction == _MEAN else losses.sum() if reduction == _SUM else losses


def soft_margin_loss_backward(gradient: Any, x: Any, target: Any, reduction: int) -> Any:
    z = (-target * x).exp()
    norm = 1 / x.numel() if reduction == _MEAN else 1.0
    return target * z * -norm / (z + 1) * gradient


def trilinear(*args: Any) -> Any:
    """The product of three tensors with dimensions put in, summed up over some: what `nn.Bilinear` computes."""
    factors, added, summed = args[:3], args[3:6], args[6]
    dims = range(factors[0].dim() + len(added[0]))
    names = [[chr(ord("a") + dim) for dim in dims if dim not in own] for own in (*added, summed)]
    return torch.einsum(f"{','.join(map(''.join, names[:3]))}->{''.join(names[3])}", *factors)


def _bounds(x: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Between what a histogram counts: where the bounds are one number, the least and the largest element."""
    known = isinstance(low, (int, float)) and isinstance(high, (int, float))
    first, last = (aten.full.default([], bound, dtype=x.dtype) for bound in (low, high))
    if known and low != high:
        return first, last
    if x.numel():
        extent = aten.amin.default(x, _every(x)), aten.amax.default(x, _every(x))
        alike = first == last
        first, last = (torch.where(alike, end, bound) for end, bound in zip(extent, (first, last), strict=True))
    alike = first == last
    return torch.where(alike, first - 1, first), torch.where(alike, last + 1, last)


def histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """How many elements are in each of some bins of one width; what is in none of them, as NaN, does not count."""
    x = x.reshape(-1)
    low, high = _bounds(x, min, max)
    counts = torch.logical_and(x >= low, x <= high)
    places = torch.where(counts, (x - low) * bins / (high - low), 0).to(torch.int64).clamp(max=bins - 1)
    none = aten.full.default([bins], 0, dtype=torch.int64)
    return aten.scatter_add.default(none, 0, places, counts.to(torch.int64)).to(x.dtype)


def unscaled(gradients: Sequence[Any], found_inf: Any, inverse: Any) -> Any:
    """Gradients times the inverse of the scale of a loss, and one where an element is not finite."""
    infinite = found_inf
    for gradient in gradients:
        finite = aten.all.default(torch.isfinite(wide(gradient)))
        infinite = torch.where(finite, infinite, aten.full.default([], 1, dtype=found_inf.dtype))
    factor = inverse.reshape([])
    products = [(wide(gradient) * factor).to(gradient.dtype) for gradient in gradients]
    return products, infinite


def new_scale(scale: Any, successes: Any, found_inf: Any, growth: float, backoff: float, interval: int) -> Any:
    """The scale of a loss after a step: less where an element was not finite, more after some steps without such."""
    failed = found_inf.reshape(scale.size()) != 0
    counted = successes + 1
    grows = torch.logical_and(counted == interval, torch.logical_not(failed.reshape(successes.size())))
    grown, shrunk = (scale.double() * growth).to(scale.dtype), (scale.double() * backoff).to(scale.dtype)
    larger = torch.logical_and(grows.reshape(scale.size()), torch.isfinite(grown))
    scale = torch.where(failed, shrunk, torch.where(larger, grown, scale))
    begins_anew = torch.logical_or(failed.reshape(successes.size()), grows)
    return scale, torch.where(begins_anew, 0, counted).to(successes.dtype)


def _zeros(size: Any, *, dtype: Any = None, **options: Any) -> Any:
    return aten.full.default(size, 0, dtype=dtype or torch.get_default_dtype())


def _every(x: Any) -> list[int]:
    return list(range(x.dim()))


def _without_generator(op: Any) -> Callable[..., Any]:
    """Of an operator that takes a generator, and is given none."""

    def drawn(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
        return NotImplemented if generator is not None else op(*args, **kwargs)

    return drawn


def geometric(x: Any, p: float, *, generator: Any = None) -> Any:
    """Also of integers: torch's own draws uniform numbers of their dtype, of which there are none."""
    if generator is not None:
        return NotImplemented
    drawn = torch.rand_like(x, dtype=None if x.is_floating_point() else torch.float32)
    return ((-drawn).log1p() / math.log1p(-p)).floor().add(1).to(x.dtype)


def _drawing() -> Iterator[tuple[Any, Callable[..., Any]]]:
    for name in ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"):
        packet = getattr(aten, name)
        for overload in packet.overloads():
            plain = overload.removesuffix("generator").rstrip("_") or "default"
            if overload.endswith("generator") and plain in packet.overloads():
                yield getattr(packet, overload), _without_generator(getattr(packet, plain))


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **dict(_drawing()),
    aten.geometric.default: geometric,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    aten.multilabel_margin_loss_backward.default: multilabel_margin_loss_backward,
    aten.histc.default: histc,
    aten._amp_foreach_non_finite_check_and_unscale.default: unscaled,
    aten._amp_update_scale.default: new_scale,
    aten.max.default: lambda x: aten.amax.default(x, _every(x)),
    aten.min.default: lambda x: aten.amin.default(x, _every(x)),
    aten._trilinear.default: trilinear,
    **ANTIALIASED,
    **ATTENTION,
    **BACKWARDS,
    **BAGS,
    aten._efficientzerotensor.default: _zeros,
    **GPU_KERNELS,
    **LAYERS,
    **QUANTIZATION,
}

# Of these, what torch decomposes into something else, and for autograd before any table is asked; and what is
# differentiated, which it cannot do where it takes programs apart. The last three it leaves as they are, in any table:
# they have composite kernels beside their own.
DIFFERING = DIFFERENTIATED | {
    aten.multilabel_margin_loss_forward.default,
    aten.multilabel_margin_loss_backward.default,
    *ATTENTION,
    aten.mish_backward.default,
    aten.native_channel_shuffle.default,
    aten.silu_backward.default,
}
# What torch's tables compute with 32 bits, where its kernels do not: for programs that torch runs.
ROUNDED: dict[Any, Callable[..., Any]] = {
    aten.soft_margin_loss.default: soft_margin_loss,
    aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
}
