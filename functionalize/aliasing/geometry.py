"""How a tensor addresses its storage, and arithmetic on sizes that may be symbols.

In: tensors, sizes and strides. Out: `Layout`, the only form in which a layout is passed, and comparisons of them.
Guarantees: equal layouts have equal keys; only `differ` guards a symbol. Limits: symbolic layouts are equal if their
expressions are. `Layout` is a strided layout; a tensor's ``layout`` attribute is torch's: strided, sparse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from functionalize._torch import FakeTensor, hint_of, is_symbolic, unbacked

Size = tuple[Any, ...]  # of int or SymInt
_STRIDED = torch.strided


def _hashable(number: Any) -> Any:
    # Note [Symbolic sizes as keys]: a SymInt has no hash, its sympy expression has one.
    return number if type(number) is int else number.node.expr


def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two lists of sizes are known to be equal, without a guard on a symbol."""
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a is b:
            continue
        if _hashable(a) != _hashable(b):
            return False
    return True


def differ(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two sizes differ. Guards their symbols.

    Data-dependent sizes differ unless their expressions are equal.
    """
    return not same(first, second) and (unbacked((*first, *second)) or tuple(first) != tuple(second))


def hint(number: Any) -> int:
    """The value of a number in this trace; does not guard a symbol."""
    return number if type(number) is int else hint_of(number) or 0


_MANY = 61  # the hint for a data-dependent size: a prime, which is not a multiple of another size


def size_hint(number: Any) -> int:
    """The value of a number in this trace, with 61 for each data-dependent size."""
    return number if type(number) is int else hint_of(number, _MANY)


def plain(number: Any) -> Any:
    """The number as an int if it is one or a guard has pinned it; else unchanged."""
    if type(number) is int or not number.node.expr.is_number:
        return number
    return int(number.node.expr)


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor addresses its storage. Sizes, strides and offset count elements of ``dtype``."""

    size: Size
    stride: Size
    offset: Any
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        if tensor.layout is not _STRIDED or (type(tensor) is not FakeTensor and tensor.is_nested):
            # It has no storage to address, and no views.
            return cls(() if tensor.is_nested else tuple(tensor.size()), (), 0, tensor.dtype)
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        dtype = tensor.dtype
        conj, neg = dtype.is_complex and tensor.is_conj(), tensor.is_neg()
        if not is_symbolic(tensor):
            return plain_layout(size, stride, offset, dtype, conj, neg)
        return cls(tuple(map(plain, size)), tuple(map(plain, stride)), plain(offset), dtype, conj, neg)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Hashable; equal for layouts that address the same elements in the same way."""
        size, stride = tuple(map(_hashable, self.size)), tuple(map(_hashable, self.stride))
        return (size, stride, _hashable(self.offset), self.dtype, self.conj, self.neg)

    def matches(self, other: Layout, *, ignoring_lazy_bits: bool = False) -> bool:
        """Whether two layouts address the same elements in the same way.

        ``ignoring_lazy_bits`` also compares current expressions: symbols may have become equal since keys were made.
        """
        if self is other or not ignoring_lazy_bits:
            return self is other or self.key == other.key
        equal = same(self.size, other.size) and same(self.stride, other.stride) and same([self.offset], [other.offset])
        return equal and self.dtype == other.dtype

    @cached_property
    def static(self) -> bool:
        return not self.symbols

    @property
    def symbols(self) -> list[torch.SymInt]:
        """The sizes, strides and offset that are not plain integers."""
        return [n for n in (*self.size, *self.stride, self.offset) if type(n) is not int]

    def simplified(self) -> Layout:
        """The same layout, with symbols that guards have pinned as integers."""
        size, stride = tuple(map(plain, self.size)), tuple(map(plain, self.stride))
        return replace(self, size=size, stride=stride, offset=plain(self.offset))

    @cached_property
    def reach(self) -> tuple[bool, int, int]:
        """Sort key: largest for the layout to address others through (contiguous, starting early, reaching far)."""
        low, high = hinted_span(self)
        return (self.contiguous, -low, high)

    @property
    def numel(self) -> Any:
        """How many elements."""
        return math.prod(self.size)

    @cached_property
    def elements(self) -> Any:
        """`numel`, as a number or an expression of symbols: can be compared without a guard."""
        return _hashable(self.numel)

    @cached_property
    def span(self) -> tuple[int, int]:
        """Bytes from first to one past the last; an empty tensor spans nothing. Needs ``static``."""
        return (0, 0) if 0 in self.size else hinted_span(self)

    @cached_property
    def extent(self) -> int:
        """Elements from first to one past the last. Needs ``static``."""
        low, high = self.span
        return (high - low) // self.dtype.itemsize

    @cached_property
    def byte_steps(self) -> list[tuple[Any, Any]]:
        """(stride in bytes, size) of each dimension."""
        return [(stride * self.dtype.itemsize, size) for stride, size in zip(self.stride, self.size, strict=True)]

    @cached_property
    def dense(self) -> bool:
        """Whether each element between first and last is addressed exactly once."""
        return self.static and self.extent == self.numel and self.strides_nest

    @cached_property
    def _walks(self) -> list[tuple[int, int]]:
        """(stride, size) of each dimension that leads to other elements, innermost first; unknown sizes by a hint."""
        dims = [(size_hint(stride), size_hint(size)) for size, stride in zip(self.size, self.stride, strict=True)]
        return sorted((stride, size) for stride, size in dims if size != 1)

    @cached_property
    def strides_nest(self) -> bool:
        """Whether each stride steps over all that the smaller ones reach, so that offsets decompose in one way."""
        reach = 0
        for stride, size in self._walks:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True

    @cached_property
    def has_internal_overlap(self) -> bool:
        """Whether two positions share an element, for the sizes of this trace; data-dependent ones by a hint."""
        if len(self.stride) < len(self.size) or (self.static and self.contiguous):
            return False  # sparse, or each position has its own element
        return not self.strides_nest and all(size for _, size in self._walks) and _has_equal_offsets(self._walks)

    @property
    def overlaps_beyond_expand(self) -> bool:
        """Whether two positions share an element though no stride is zero."""
        return self.has_internal_overlap and all(stride for stride, _ in self._walks)

    @cached_property
    def outermost_first(self) -> list[int]:
        """The dimensions in the order of their strides, for the sizes of this trace."""
        return sorted(range(len(self.size)), key=lambda dim: (-hint(self.stride[dim]), -hint(self.size[dim])))

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions in the order of a contiguous storage, outermost first; None if no order is contiguous."""
        dims = self.outermost_first
        size, stride = tuple(self.size[dim] for dim in dims), tuple(self.stride[dim] for dim in dims)
        return tuple(dims) if replace(self, size=size, stride=stride).contiguous else None

    @cached_property
    def contiguous(self) -> bool:
        """Whether the last dimension is the innermost, without gaps; of symbols as far as their expressions show."""
        step: Any = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if type(size) is int and size == 1:
                continue
            if _hashable(stride) != _hashable(step):
                return False
            step = step * size
        return not (self.conj or self.neg)


@lru_cache(20_000)
def plain_layout(size: Sequence[int], *rest: Any) -> Layout:
    """The layout of plain sizes: one object for each, so that its cached properties are computed once."""
    return Layout(tuple(size), *rest)


def _has_equal_offsets(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether two positions have one offset, for the (stride, size) of each dimension: tries all positions."""
    if dims[0][0] == 0:
        return True
    offsets = [0]
    for stride, size in dims:
        offsets = [offset + step * stride for offset in offsets for step in range(size)]
    return len(set(offsets)) < len(offsets)


def hinted_span(layout: Layout) -> tuple[int, int]:
    """The first byte and one past the last, for the sizes of this trace; an empty tensor spans nothing."""
    size, item, first = tuple(map(hint, layout.size)), layout.dtype.itemsize, hint(layout.offset)
    if 0 in size:
        return first * item, first * item
    last = first + sum((n - 1) * s for n, s in zip(size, map(hint, layout.stride), strict=True))
    return first * item, (last + 1) * item


def is_empty(layout: Layout) -> bool:
    """Whether there are no elements, for the sizes of this trace; data-dependent sizes count as more than zero."""
    return not unbacked(layout.size) and 0 in map(hint, layout.size)


def fits(layout: Layout, capacity: Any) -> bool:
    """Whether a storage of ``capacity`` bytes holds a layout, for the sizes of this trace."""
    return hinted_span(layout)[1] <= hint(capacity)


def stop(layout: Layout) -> Any:
    """The index of one past the last element; the offset of an empty layout."""
    if is_empty(layout):
        return layout.offset
    if layout.order is not None:
        return layout.offset + math.prod(layout.size)
    last = layout.offset
    for size, stride in zip(layout.size, layout.stride, strict=True):
        last = last + (size - 1) * stride
    return last + 1
