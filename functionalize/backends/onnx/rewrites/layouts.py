"""Tensors as they lie in memory, and scatters of their parts, which ONNX does not know.

Invariant: the elements are where a program looks for them; of a tensor that is not contiguous they cannot be found.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize._torch.symbols.sizes import hint_of
from functionalize.backends.decompositions.own import places
from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite
from functionalize.errors import UnsupportedExportError

aten = torch.ops.aten


def _in_order(base: Any) -> Any:
    """The elements of a tensor as they lie in memory, which ONNX does not know: only of one that is contiguous."""
    if not base.is_contiguous():
        cause = UnsupportedExportError.cause(
            f"as_strided of a tensor of size {tuple(base.size())} and strides {tuple(base.stride())}",
            why="ONNX has no strides, and the tensor is not contiguous",
            hint="call .contiguous() first, or use views by dimension",
        )
        raise UnsupportedExportError("ONNX", [cause])
    return base.reshape(-1)


def _shown(base: Any, size: Any, stride: Any, offset: Any) -> Any:
    """Where the elements of a layout of its storage are in a tensor that lies in order."""
    begin = 0 if offset is None else offset - base.storage_offset()
    numbers = (*size, *stride, begin, base.numel())
    if all(type(one) is int for one in numbers) and 0 not in size:
        last = begin + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        if begin < 0 or last >= base.numel():
            cause = UnsupportedExportError.cause(
                "as_strided reads elements of a storage outside the tensor",
                why="an ONNX tensor has only its own elements, and no storage around them",
                hint="pass a tensor that covers that memory, and make the view inside the program",
            )
            raise UnsupportedExportError("ONNX", [cause])
    return places(size, stride, begin)


@rewrite(aten.squeeze.dims)
def squeeze(x: Any, dims: Any) -> Any:
    """One by one: torch's primitive decomposes into this operator again."""
    for dim in sorted((dim % max(x.dim(), 1) for dim in dims), reverse=True):
        x = aten.squeeze.dim(x, dim)
    return x


@rewrite(aten.as_strided_scatter.default)
def as_strided_scatter(base: Any, value: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    flat = _in_order(base)
    return aten.scatter.src(flat, 0, _shown(base, size, stride, offset), value.reshape(-1)).reshape(base.size())


@rewrite(aten.as_strided.default)
def as_strided(base: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return aten.index_select.default(_in_order(base), 0, _shown(base, size, stride, offset)).reshape(size)


@rewrite(aten.diagonal_scatter.default)
def diagonal_scatter(base: Any, value: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    every = aten.arange.default(base.numel(), dtype=torch.int64).reshape(base.size())
    found = diagonal(every, offset, dim1, dim2).reshape(-1)
    return aten.scatter.src(base.reshape(-1), 0, found, value.reshape(-1)).reshape(base.size())


@rewrite(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(values: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """By places: the exporter adds up rows, the rest of which it multiplies with zeros."""
    dim1, dim2 = dim1 % values.dim(), dim2 % values.dim()
    rest = [dim for dim in range(values.dim()) if dim not in (dim1, dim2)]
    rows, columns = values.size(dim1), values.size(dim2)
    count = torch.sym_max(torch.sym_min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    found = aten.arange.default(count, dtype=torch.int64) * (columns + 1) + (
        offset if offset > 0 else -offset * columns
    )
    flat = values.permute([*rest, dim1, dim2]).reshape([*(values.size(dim) for dim in rest), rows * columns])
    return aten.index_select.default(flat, len(rest), found)


@rewrite(aten.trace.default)
def trace(values: Any) -> Any:
    return diagonal(values).sum()


def _now(size: Any) -> Any:
    return size if type(size) is int else hint_of(size)


def _of_the_index(op: Any) -> Rewrite:
    """A scatter of the part of a source that its index tells of."""

    def of_part(base: Any, dim: int, index: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = enumerate(zip(index.size(), source.size(), strict=False))
        larger = [one for one, (size, whole) in sizes if _now(size) != _now(whole)]
        if not larger:
            return NotImplemented
        for one in larger:
            source = source.narrow(one, 0, index.size(one))
        return op(base, dim, index, source, *args, **kwargs)

    return of_part


for _op in (aten.scatter.src, aten.scatter.reduce, aten.scatter_add.default, aten.scatter_reduce.two):
    rewrite(_op)(_of_the_index(_op))


@rewrite(aten.index_copy.default)
def index_copy(base: Any, dim: int, index: Any, source: Any) -> Any:
    """By one scatter of the rows, which may write where they are: not by a copy with its dimensions exchanged."""
    if not base.dim():
        return source.reshape([])
    dim %= base.dim()
    shape = [1] * dim + [-1] + [1] * (base.dim() - dim - 1)
    return aten.scatter.src(base, dim, index.reshape(shape).expand(source.size()), source)


@rewrite(aten.put.default)
def put(base: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Places of all elements, one after the other."""
    found = aten.index_put.default(base.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return found.reshape(base.size())


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
