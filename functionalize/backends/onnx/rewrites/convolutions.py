"""Convolutions backwards, pooling and padding, as ONNX has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript.ir import DataType

from functionalize._torch.onnx import exporters
from functionalize.backends.onnx.rewrites.registry import OPSET, rewrite

aten = torch.ops.aten


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


def _adaptive_max_pool(dims: int) -> Callable[..., Any]:
    """The maxima of windows of several sizes, and their places in the plane."""

    def pooled(inputs: Any, output_size: Any) -> Any:
        plane, lead = inputs.size()[-dims:], inputs.dim() - dims
        if not inputs.is_floating_point() or any(type(size) is not int for size in (*plane, *output_size)):
            return NotImplemented
        found, places = inputs, aten.full.default([], 0, dtype=torch.int64)
        for dim, (size, count) in enumerate(zip(plane, output_size, strict=True)):
            windows, within = _windows(size, count)
            shape = [1] * (2 * dims)
            shape[2 * dim], shape[2 * dim + 1] = windows.size()
            at = lead + 2 * dim  # behind the windows and their elements of the dimensions before
            found = found.index_select(at, windows.reshape(-1)).unflatten(at, list(windows.size()))
            found = torch.where(within.reshape(shape[: 2 * dim + 2] + [1] * (dims - 1 - dim)), found, -math.inf)
            places = places * size + windows.reshape(shape)
        order = [*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]
        found = found.permute([*range(lead), *(lead + one for one in order)]).flatten(lead + dims)
        best = aten.argmax.default(found, -1, True)
        places = places.permute(order).flatten(dims).expand(found.size()).gather(-1, best)
        return found.gather(-1, best).squeeze(-1), places.squeeze(-1)

    return pooled


def _windows(size: int, count: int) -> tuple[Any, Any]:
    """For each window of an adaptive pooling the places of its elements, and which of them are in it."""
    first = aten.arange.default(count, dtype=torch.int64)
    starts, ends = first * size // count, ((first + 1) * size + count - 1) // count
    most = max(-(-(one + 1) * size // count) - one * size // count for one in range(count))
    places = starts.unsqueeze(-1) + aten.arange.default(most, dtype=torch.int64)
    return places.clamp(max=size - 1), places < ends.unsqueeze(-1)


rewrite(aten.adaptive_max_pool2d.default)(_adaptive_max_pool(2))
rewrite(aten.adaptive_max_pool3d.default)(_adaptive_max_pool(3))


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


@rewrite(aten.convolution.default)
def convolution(
    inputs: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """Transposed ones with more elements at the end than a step has, by what is cut off and added: ONNX has none."""
    if not transposed or all(more < step for more, step in zip(output_padding, stride, strict=True)):
        return NotImplemented
    none = [0] * len(stride)
    whole = aten.convolution.default(inputs, weight, None, stride, none, dilation, True, none, groups)
    ends = zip(reversed(padding), reversed(output_padding), strict=True)
    found = aten.constant_pad_nd.default(whole, [end for cut, more in ends for end in (-cut, more - cut)])
    return found if bias is None else found + bias.reshape([-1] + [1] * len(stride))


@rewrite(aten.convolution_backward.default)
def convolution_backward(
    gradient: Any, inputs: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Any,
) -> Any:  # fmt: skip
    """By convolutions: of the gradient with the weight, and of the input with the gradient.

    A transposed one is what a plain one gives its input for a gradient: so the two change places.
    """
    dims, geometry = list(range(2, inputs.dim())), (stride, padding, dilation, groups)
    of_input = of_weight = of_bias = None
    if wanted[0] and transposed:
        rest = (stride, padding, dilation, False, [0] * len(stride), groups)
        of_input = aten.convolution.default(gradient, weight, None, *rest)
        for dim in dims:  # more elements at the end than a step has are no output
            of_input = of_input.narrow(dim, 0, inputs.size(dim))
    elif wanted[0]:
        reached = [
            (gradient.size(dim) - 1) * stride[n] - 2 * padding[n] + dilation[n] * (weight.size(dim) - 1) + 1
            for n, dim in enumerate(dims)
        ]
        more = [inputs.size(dim) - size for dim, size in zip(dims, reached, strict=True)]
        options = (stride, padding, dilation, True, more, groups)
        of_input = aten.convolution.default(gradient, weight, None, *options)
    if wanted[1]:
        both = (inputs, gradient) if transposed else (gradient, inputs)
        of_weight = _weight_gradient(*both, weight, geometry)
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


def _max_pool(op: Any) -> Callable[..., Any]:
    """With infinities below where a window has nothing else: of these the engine makes the least finite number.

    So it does with 32 bits alone.
    """

    def pooled(x: Any, *geometry: Any) -> Any:
        pool = exporters(op)
        found, indices = pool(x, *geometry)
        if x.dtype != DataType.FLOAT:
            return found, indices
        counts = OPSET.Cast(OPSET.Not(OPSET.IsInf(x, detect_positive=0)), to=DataType.FLOAT)
        counts.shape = x.shape  # which the exporter asks for
        some, _ = pool(counts, *geometry)
        infinite = OPSET.Constant(value_float=-math.inf)
        return OPSET.Where(OPSET.Cast(some, to=DataType.BOOL), found, infinite), indices

    return pooled


_POOLS = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
TRANSLATIONS: dict[Any, Callable[..., Any]] = {op: _max_pool(op) for op in _POOLS}
"""Operators, by functions of values of ONNX that give such."""
