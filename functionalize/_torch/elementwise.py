"""The strides that the CPU's elementwise kernels give results with dimensions of size 0 or 1.

Fake tensors treat dimensions of size 1 as contiguous; torch's iterator over elements takes their strides as they are.
So it is for an index without masks, whose kernel uses that iterator too. After ``aten/src/ATen/TensorIterator.cpp`` and
``aten/src/ATen/native/TensorAdvancedIndexing.cpp``.

Limits: sizes and strides that are integers; kernels that use that iterator, as elementwise kernels do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import make_channels_last_strides_for  # as kernels make them
from torch._subclasses import FakeTensor

from functionalize._torch.dispatch import OpOverload
from functionalize.ops import traits
from functionalize.ops.calls import has_mask

_INDEX = torch.ops.aten.index.Tensor
Size = tuple[int, ...]
_NUMBERS = ("self", "other")  # a kernel makes tensors of these arguments
_CHANNELS_LAST = (1, 3, 2, 0)
_FAST_ORDERS: Mapping[int, tuple[Sequence[int] | None, ...]] = {0: (None,), 4: (None, _CHANNELS_LAST)}  # by rank


def elementwise_strides(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Size | None:
    """The strides that a kernel gives a result; None if the fake result has them already."""
    if not isinstance(out, FakeTensor) or out.layout is not torch.strided or not _by_elements(op):
        return None
    size = out.size()
    if not all(type(number) is int for number in size):
        return None
    tensors = [arg for arg in args if isinstance(arg, FakeTensor)]
    if not (all(map(_has_plain_strides, tensors)) if 0 in size else 1 in size and any(map(_is_odd, tensors))):
        return None
    return _strides(op, args, kwargs, out)


def gives_strides_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Whether an operator is elementwise, and its result for these arguments has the strides of ``out``.

    The arguments may be on the device ``meta``; ``out`` has their device.
    """
    if not isinstance(out, torch.Tensor) or op is _INDEX or not _by_elements(op):
        return False
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    named = any(isinstance(arg, torch.Tensor) for arg in kwargs.values())
    if named or not all(map(_has_plain_strides, (*tensors, out))):
        return False
    return _strides(op, args, kwargs, out) == tuple(out.stride())


def _strides(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Size | None:
    size = tuple(out.size())
    if op is _INDEX:
        return None if has_mask(args[1]) else _strides_of_result(size, [*_operands_of_index(*args)])
    if op in traits.PRESERVES_FORMAT:
        memory = kwargs.get("memory_format")
        if memory in (None, torch.preserve_format):
            return _copied(size, tuple(args[0].stride()))
        return _contiguous(size) if memory is torch.contiguous_format else make_channels_last_strides_for(size)
    if op in traits.GIVES_CONTIGUOUS:
        return _contiguous(size)
    operands = [*_operands(op, args, out)]
    return _strides_of_result(size, operands[::-1] if op in traits.SWAPS_OPERANDS else operands)


@functools.lru_cache(maxsize=512)
def _by_elements(op: OpOverload) -> bool:
    if op in traits.PRESERVES_FORMAT or op is _INDEX:
        return True
    return torch.Tag.pointwise in op.tags and not op._schema.is_mutable and op not in traits.CALLS_OTHER_KERNELS


def _has_plain_strides(tensor: Any) -> bool:
    """Whether a tensor has strides, and these and its sizes are integers."""
    return tensor.layout is torch.strided and all(type(n) is int for n in (*tensor.size(), *tensor.stride()))


def _is_odd(tensor: Any) -> bool:
    """Whether dimensions of size 1 have other strides than in a contiguous tensor."""
    if not _has_plain_strides(tensor):
        return False
    size, stride = tensor.size(), tensor.stride()
    return any(n == 1 and step != wanted for n, step, wanted in zip(size, stride, _contiguous(size), strict=True))


def _operands(op: Any, args: Sequence[Any], out: Any) -> Iterator[tuple[Size, Size]]:
    """The sizes and strides that the iterator gets. Operands of another dtype than it computes in are copied before."""
    is_plain = all(isinstance(arg, (torch.Tensor, int, float, complex)) for arg in args)  # no symbols
    compared = out.dtype is torch.bool and len(args) == 2 and is_plain
    computed = torch.result_type(*args) if compared else None if out.dtype is torch.bool else out.dtype
    for arg, declared in zip(args, op._schema.arguments, strict=False):
        if isinstance(arg, torch.Tensor):
            size, stride = tuple(arg.size()), tuple(arg.stride())
            copied = out.device.type == "cpu" and computed is not None and arg.dtype not in (computed, torch.bool)
            yield size, _copied(size, stride) if copied else stride
        elif declared.name in _NUMBERS:
            yield (), ()


def _operands_of_index(source: Any, indices: Sequence[Any]) -> Iterator[tuple[Size, Size]]:
    """The same for an index: the source has a stride of 0 in the place of the dimensions that are indexed."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [indices[dim] for dim in dims]
    shape = tuple(torch.broadcast_shapes(*(index.size() for index in tensors)))
    others = [dim for dim in range(source.dim()) if dim not in dims]
    adjacent = bool(dims) and len(dims) == dims[-1] - dims[0] + 1
    before = [dim for dim in others if adjacent and dim < dims[0]]  # else what is indexed comes first
    after = others[len(before) :]

    def around(middle: Size, own: Sequence[int]) -> Size:
        return (*(own[dim] for dim in before), *middle, *(own[dim] for dim in after))

    yield around(shape, source.size()), around((0,) * len(shape), source.stride())
    for index in tensors:
        own = _broadcast(shape, tuple(index.size()), tuple(index.stride()))
        yield _surrounded(len(before), shape, own, len(after))


def _surrounded(before: int, shape: Size, stride: Size, after: int) -> tuple[Size, Size]:
    """A size and strides with dimensions of size 1 around them, whose strides are those that `reshape` gives them."""
    size = (1,) * before + shape + (1,) * after
    if not shape:
        return size, (1,) * len(size)
    steps, elements = [*stride], 1
    base = stride[-1]  # of the innermost dimensions that follow one another in memory
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            steps[dim] = elements * base
        elements *= shape[dim]
        if dim and shape[dim - 1] != 1 and stride[dim - 1] != elements * base:
            base, elements = stride[dim - 1], 1
    return size, (elements * base,) * before + tuple(steps) + (stride[-1],) * after


def _strides_of_result(size: Size, operands: Sequence[tuple[Size, Size]]) -> Size:
    if all(other == size for other, _ in operands):
        for order in _FAST_ORDERS.get(len(size), _FAST_ORDERS[0]):
            if all(_is_contiguous(*operand, order) for operand in operands):
                return _contiguous(size, order)
        first = operands[0][1]
        if all(stride == first for _, stride in operands) and all(_is_dense(*operand) for operand in operands):
            return first  # symbols may be among them
    return _in_order(size, [_broadcast(size, *operand) for operand in operands])


def _copied(size: Size, stride: Size) -> Size:
    return stride if _is_dense(size, stride) else _in_order(size, [stride])


def _broadcast(size: Size, own: Size, stride: Size) -> Size:
    pairs = zip(size[len(size) - len(own) :], own, stride, strict=True)
    return (0,) * (len(size) - len(own)) + tuple(0 if n == 1 and m != 1 else step for m, n, step in pairs)


def _in_order(size: Size, strides: Sequence[Size]) -> Size:
    """The strides of a dense result whose dimensions have the order of those of the operands."""
    order = [*reversed(range(len(size)))]
    for last in range(1, len(size)):
        place = last
        for before in reversed(range(last)):
            compared = _compared(size, strides, order[before], order[place])
            if compared > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif compared < 0:
                break
    result, step = [0] * len(size), 1
    if order == [*reversed(range(len(size)))]:
        return _contiguous(size)
    for dim in order:
        result[dim] = step
        step *= size[dim]
    return tuple(result)


def _compared(size: Size, strides: Sequence[Size], inner: int, outer: int) -> int:
    for stride in strides:
        inner_stride, outer_stride = stride[inner], stride[outer]
        if inner_stride == 0 or outer_stride == 0:
            continue
        if inner_stride != outer_stride:
            return -1 if inner_stride < outer_stride else 1
        if size[inner] > size[outer]:
            return 1
    return 0


def _contiguous(size: Sequence[int], order: Sequence[int] | None = None) -> Size:
    """The strides of a dense tensor with its dimensions in an order, innermost first."""
    strides, step = [0] * len(size), 1
    for dim in reversed(range(len(size))) if order is None else order:
        strides[dim] = step
        step *= max(size[dim], 1)
    return tuple(strides)


def _is_contiguous(size: Size, stride: Size, order: Sequence[int] | None) -> bool:
    wanted = _contiguous(size, order)
    return 0 in size or all(n == 1 or a == b for n, a, b in zip(size, stride, wanted, strict=True))


def _is_dense(size: Size, stride: Size) -> bool:
    if 0 in size:
        return True
    step = 1
    for own, n in sorted((own, n) for n, own in zip(size, stride, strict=True) if n != 1):
        if own != step:
            return False
        step *= n
    return True
