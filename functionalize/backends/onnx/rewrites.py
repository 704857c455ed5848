"""Operators that ONNX has not, by those that it has: a row each.

Invariant: both sides compute the same; a row holds for all arguments that it takes, else it gives NotImplemented.
Limits: what torch takes apart by itself needs no row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from functionalize.errors import UnsupportedExportError

aten = torch.ops.aten
Rewrite = Callable[..., Any]
REWRITES: dict[Any, Rewrite] = {}
# What torch takes apart although the exporter translates it. ONNX's running variance is a biased one; of other results
# than the first, which backwards read, the exporter makes up some.
BY_TORCH = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_group_norm.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
)
# Operators of which the exporter gives the first result alone.
FIRST_ALONE = frozenset(
    {
        aten.embedding_bag.default,
        aten.embedding_bag.padding_idx,
        aten._embedding_bag.default,
        aten._embedding_bag_forward_only.default,
        aten._linalg_det.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
)


def rewrite(*ops: Any) -> Callable[[Rewrite], Rewrite]:
    """Register a row."""

    def register(function: Rewrite) -> Rewrite:
        REWRITES.update(dict.fromkeys(ops, function))
        return function

    return register


def _places(size: Sequence[Any], stride: Sequence[Any], offset: Any) -> Any:
    """The elements of a storage that a layout shows, one after the other."""
    found: Any = aten.full.default([1] * len(size), offset, dtype=torch.int64)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * dim + [count] + [1] * (len(size) - dim - 1)
        found = found + aten.arange.default(count, dtype=torch.int64).reshape(shape) * step
    return found.expand(size).reshape(-1)


def _in_order(base: Any) -> Any:
    """The elements of a tensor as they lie in memory, which ONNX does not know: only of one that is contiguous."""
    if not base.is_contiguous():
        cause = UnsupportedExportError.cause(
            f"as_strided of a tensor of size {tuple(base.size())} and strides {tuple(base.stride())}",
            why="ONNX has no strides, so that the elements are not where the program looks for them",
            hint="call .contiguous() first, or use views by dimension",
        )
        raise UnsupportedExportError("ONNX", [cause])
    return base.reshape(-1)


@rewrite(aten.as_strided_scatter.default)
def as_strided_scatter(base: Any, value: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    flat = _in_order(base)
    return aten.scatter.src(flat, 0, _places(size, stride, offset or 0), value.reshape(-1)).reshape(base.size())


@rewrite(aten.as_strided.default)
def as_strided(base: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return aten.index_select.default(_in_order(base), 0, _places(size, stride, offset or 0)).reshape(size)


@rewrite(aten.diagonal_scatter.default)
def diagonal_scatter(base: Any, value: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    stride, step = list(base.contiguous().stride()), list(base.contiguous().size())
    shown = torch.empty_strided(step, stride, device="meta").diagonal(offset, dim1, dim2)
    places = _places(list(shown.size()), list(shown.stride()), shown.storage_offset())
    return aten.scatter.src(base.reshape(-1), 0, places, value.reshape(-1)).reshape(base.size())


@rewrite(aten.index_copy.default)
def index_copy(base: Any, dim: int, index: Any, source: Any) -> Any:
    """By one scatter of the rows, which may write where they are: not by a copy with its dimensions exchanged."""
    if not base.dim():
        return source.reshape([])
    dim %= base.dim()
    shape = [1] * dim + [-1] + [1] * (base.dim() - dim - 1)
    return aten.scatter.src(base, dim, index.reshape(shape).expand(source.size()), source)


@rewrite(aten.index_put.default)
def index_put(base: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Rows along one dimension, by :func:`index_copy`."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[dims[0]] if len(dims) == 1 and not accumulate else None
    if index is None or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    size = list(base.size())
    size[dims[0]] = index.size(0)
    return index_copy(base, dims[0], index, values.expand(size))


@rewrite(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    inputs: Any, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False, included: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    """Sums divided by a number of one's own, which the exporter takes for averages."""
    if divisor is None:
        return NotImplemented
    dims = len(kernel)
    stride, padding = list(stride or kernel), [*padding] * (dims // len(padding))
    pool = aten.avg_pool2d.default if dims == 2 else aten.avg_pool3d.default
    found = pool(inputs, kernel, stride, padding, ceil_mode, True)
    for dim in range(-dims, 0):
        start = aten.arange.default(found.size(dim)) * stride[dim] - padding[dim]
        counted = aten.clamp.default(start + kernel[dim], None, inputs.size(dim) + padding[dim]) - start
        found = found * counted.reshape([-1] + [1] * (-dim - 1))
    return found / divisor


@rewrite(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(inputs: Any, padding: Any) -> Any:
    """What is cut off, before what is added: ONNX Runtime does the first by itself for zeros alone."""
    if not any(type(size) is int and size < 0 for size in padding):
        return NotImplemented
    dims = len(padding) // 2
    for dim in range(dims):
        before, after = (max(0, -size) for size in padding[2 * dim : 2 * dim + 2])
        inputs = inputs.narrow(-1 - dim, before, inputs.size(-1 - dim) - before - after)
    pad = (aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)[dims - 1].default
    return pad(inputs, [max(0, size) for size in padding])


@rewrite(aten._cdist_forward.default)
def cdist(one: Any, other: Any, p: float, mode: int | None) -> Any:
    """Norms of all differences."""
    return aten.linalg_vector_norm.default(one.unsqueeze(-2) - other.unsqueeze(-3), p, [-1])


@rewrite(aten.bucketize.Tensor)
def bucketize(values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """How many boundaries are not above: what is not a number is above all."""
    above = (aten.gt if right else aten.ge).Tensor(boundaries, values.unsqueeze(-1))
    return aten.logical_not.default(above).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


_SHIFTS = {
    shift: whole
    for one, other, whole in (
        ("__lshift__", "bitwise_left_shift", aten.bitwise_left_shift.Tensor),
        ("__rshift__", "bitwise_right_shift", aten.bitwise_right_shift.Tensor),
    )
    for shift in (getattr(aten, one).Scalar, getattr(aten, one).Tensor, getattr(aten, other).Tensor_Scalar, whole)
}


def _shift(whole: Any) -> Rewrite:
    """By 64 bits: the exporter gives other widths other signs."""

    def shifted(value: Any, by: Any) -> Any:
        if value.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32):
            return NotImplemented
        steps = by.long() if isinstance(by, torch.Tensor) else aten.full.default([], by, dtype=torch.int64)
        return whole(value.long(), steps).to(value.dtype)

    return shifted


REWRITES.update({shift: _shift(whole) for shift, whole in _SHIFTS.items()})


_LSTM = 2  # among the kinds of layers


@rewrite(aten.mkldnn_rnn_layer.default)
def recurrent_layer(*args: Any) -> Any:
    """One direction of one layer of an LSTM, step by step."""
    inputs, *weights, hidden, cell, reverse, _, mode, _, _, has_biases, _, _, _ = args
    if mode != _LSTM:
        return NotImplemented
    of_input, of_hidden = weights[:2]
    bias = weights[2] + weights[3] if has_biases else None
    before = inputs @ of_input.t()
    before = before if bias is None else before + bias
    outputs = []
    for step in range(inputs.size(0)):
        gates = before.select(0, inputs.size(0) - 1 - step if reverse else step) + hidden @ of_hidden.t()
        enters, forgets, new, leaves = gates.chunk(4, -1)
        cell = forgets.sigmoid() * cell + enters.sigmoid() * new.tanh()
        hidden = leaves.sigmoid() * cell.tanh()
        outputs.append(hidden)
    outputs = outputs[::-1] if reverse else outputs
    return torch.stack(outputs), hidden, cell, inputs.new_zeros([0], dtype=torch.uint8)


@rewrite(aten.convolution_backward.default)
def convolution_backward(
    gradient: Any, inputs: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Any,
) -> Any:  # fmt: skip
    """By convolutions: of the gradient with the weight, and of the input with the gradient."""
    if transposed:
        return NotImplemented
    dims = list(range(2, inputs.dim()))
    of_input = of_weight = of_bias = None
    if wanted[0]:
        reached = [
            (gradient.size(dim) - 1) * stride[n] - 2 * padding[n] + dilation[n] * (weight.size(dim) - 1) + 1
            for n, dim in enumerate(dims)
        ]
        more = [inputs.size(dim) - size for dim, size in zip(dims, reached, strict=True)]
        options = (stride, padding, dilation, True, more, groups)
        of_input = aten.convolution.default(gradient, weight, None, *options)
    if wanted[1]:
        of_weight = _weight_gradient(gradient, inputs, weight, (stride, padding, dilation, groups))
    if wanted[2]:
        of_bias = gradient.sum([0, *dims])
    return of_input, of_weight, of_bias


def _weight_gradient(gradient: Any, inputs: Any, weight: Any, options: Any) -> Any:
    stride, padding, dilation, groups = options
    found = []
    for part, given in zip(inputs.chunk(groups, 1), gradient.chunk(groups, 1), strict=True):
        rest = (None, dilation, padding, stride, False, [0] * len(stride), 1)
        made = aten.convolution.default(part.transpose(0, 1), given.transpose(0, 1), *rest)
        for dim in range(2, weight.dim()):
            made = made.narrow(dim, 0, weight.size(dim))
        found.append(made.transpose(0, 1))
    return torch.cat(found)


_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _scores(query: Any, key: Any, is_causal: bool, mask: Any, scale: Any) -> Any:
    found = (query @ key.transpose(-2, -1)) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        rows = aten.arange.default(query.size(-2)).unsqueeze(1)
        seen = aten.arange.default(key.size(-2)).unsqueeze(0) <= rows
        found = aten.where.ScalarOther(seen, found, float("-inf"))
    return found if mask is None else found + mask


def attention(
    query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None,
    scale: Any = None,
) -> Any:  # fmt: skip
    """With what its backward reads. Without a backward the exporter's own translation is taken."""
    if dropout:
        return NotImplemented
    scores = _scores(query, key, is_causal, attn_mask, scale)
    most = aten.amax.default(scores, [-1], True)
    shares = (scores - most).exp()
    total = shares.sum(-1, keepdim=True)
    return (shares / total) @ value, (total.log() + most).squeeze(-1)


@rewrite(_ATTENTION_BACKWARD)
def attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, total: Any, dropout: float, is_causal: bool, *,
    attn_mask: Any = None, scale: Any = None,
) -> Any:  # fmt: skip
    if dropout:
        return NotImplemented
    factor = query.size(-1) ** -0.5 if scale is None else scale
    shares = (_scores(query, key, is_causal, attn_mask, scale) - total.unsqueeze(-1)).exp()
    of_shares = gradient @ value.transpose(-2, -1)
    of_scores = shares * (of_shares - (gradient * out).sum(-1, keepdim=True)) * factor
    of_query, of_key = of_scores @ key, of_scores.transpose(-2, -1) @ query
    return of_query, of_key, shares.transpose(-2, -1) @ gradient


def rows_for(ops: Collection[Any]) -> dict[Any, Rewrite]:
    """The rows for a program that has some operators."""
    return REWRITES | ({_ATTENTION: attention} if _ATTENTION_BACKWARD in ops else {})
