"""Where a tensor lies in its storage, and whether two such places meet.

Invariant: answers are exact or conservative: "disjoint" and "covers" are only said when proved.
Limits: proofs need sizes known as plain integers; symbolic places compare equal by expression, nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from functionalize._torch import hint_of, is_symbolic, unbacked

Size = tuple[Any, ...]  # of int or SymInt


def _hashable(number: Any) -> Any:
    # Note [Symbolic sizes as keys]: a SymInt has no hash, the sympy expression that it stands for has one.
    return number if type(number) is int else number.node.expr


def same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether two lists of sizes are known to be equal, without asking anything of a symbol."""
    return len(one) == len(two) and all(_hashable(a) == _hashable(b) for a, b in zip(one, two, strict=True))


def differ(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether two sizes differ. Asks the symbols, which become guards; what data decide differs unless known equal."""
    return not same(one, two) and (unbacked((*one, *two)) or tuple(one) != tuple(two))


def hint(number: Any) -> int:
    """A number's size for ordering: of a symbol the one that it has in this trace, without a guard."""
    return number if type(number) is int else hint_of(number) or 0


_MANY = 61  # elements supposed where only the data tell: a prime, so that they fill rows of no other size


def supposed(number: Any) -> int:
    """A number's size in this trace, or what it would be if each size that comes from data were a large one."""
    return number if type(number) is int else hint_of(number, _MANY)


def plain(number: Any) -> Any:
    """An integer as int, also where it is a symbol that a guard has pinned."""
    if type(number) is int or not number.node.expr.is_number:
        return number
    return int(number.node.expr)


@dataclass(frozen=True, eq=False)
class Geometry:
    """How a tensor addresses its storage. Sizes, strides and offset count elements of ``dtype``."""

    size: Size
    stride: Size
    offset: Any
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        if tensor.layout is not torch.strided or tensor.is_nested:  # no storage to address, nothing to view
            return cls(() if tensor.is_nested else tuple(tensor.size()), (), 0, tensor.dtype)
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        dtype, conj, neg = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        if is_symbolic(tensor):
            return cls(tuple(map(plain, size)), tuple(map(plain, stride)), plain(offset), dtype, conj, neg)
        key = (size, stride, offset, dtype, conj, neg)
        return _PLACES.get(key) or cls._known(key)

    @classmethod
    def _known(cls, key: tuple[Any, ...]) -> Geometry:
        """A place of plain sizes: one object for each, so that what was worked out for it stays known."""
        if len(_PLACES) >= _PLACES_KEPT:
            _PLACES.clear()
        key = (tuple(key[0]), *key[1:])
        place = _PLACES[key] = cls(*key)
        place.__dict__.update(static=True, key=key)
        return place

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for geometries that are the same place read the same way."""
        if self.static:
            return (self.size, self.stride, self.offset, self.dtype, self.conj, self.neg)
        size, stride = tuple(map(_hashable, self.size)), tuple(map(_hashable, self.stride))
        return (size, stride, _hashable(self.offset), self.dtype, self.conj, self.neg)

    @cached_property
    def static(self) -> bool:
        return not self.symbols

    @property
    def symbols(self) -> list[torch.SymInt]:
        """The numbers of the place that are not plain."""
        return [n for n in (*self.size, *self.stride, self.offset) if type(n) is not int]

    def simplified(self) -> Geometry:
        """The same place, written in the symbols that guards have left."""
        size, stride = tuple(map(plain, self.size)), tuple(map(plain, self.stride))
        return replace(self, size=size, stride=stride, offset=plain(self.offset))

    @cached_property
    def reach(self) -> tuple[bool, int, int]:
        """Sorts the place that others are addressed through last: contiguous, starting early, reaching far."""
        low, high = hinted_span(self)
        return (self.contiguous, -low, high)

    @cached_property
    def elements(self) -> Any:
        """How many elements, as a number or an expression of symbols."""
        return _hashable(math.prod(self.size))

    @cached_property
    def span(self) -> tuple[int, int]:
        """Bytes from first to one past the last; an empty tensor spans nothing. Needs ``static``."""
        if 0 in self.size:
            return (0, 0)
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        item = self.dtype.itemsize
        return (self.offset * item, (self.offset + last + 1) * item)

    @cached_property
    def extent(self) -> int:
        """Elements from first to one past the last. Needs ``static``."""
        low, high = self.span
        return (high - low) // self.dtype.itemsize

    @cached_property
    def dense(self) -> bool:
        """Each element between first and last is addressed exactly once."""
        return self.static and self.extent == math.prod(self.size) and _nested(self)

    @cached_property
    def shares(self) -> bool:
        """Whether two positions share an element, for the sizes of this trace; those that data decide are supposed."""
        if len(self.stride) < len(self.size) or (self.static and self.contiguous):
            return False  # sparse, or all apart
        dims = [(supposed(stride), supposed(size)) for size, stride in zip(self.size, self.stride, strict=True)]
        dims = sorted((stride, size) for stride, size in dims if size != 1)
        reach = 0
        for stride, size in dims:
            if stride <= reach:
                break
            reach += (size - 1) * stride
        else:
            return False
        return all(size for _, size in dims) and _meet(dims)

    @cached_property
    def overlapping(self) -> bool:
        """Whether two positions share an element though no stride is zero."""
        zero = any(
            supposed(stride) == 0 and supposed(size) > 1 for size, stride in zip(self.size, self.stride, strict=True)
        )
        return self.shares and not zero

    @cached_property
    def outermost_first(self) -> list[int]:
        """The dimensions in the order of their strides, for the sizes of this trace."""
        return sorted(range(len(self.size)), key=lambda dim: (-hint(self.stride[dim]), -hint(self.size[dim])))

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The dimensions in the order of a contiguous storage, outermost first; None where there is no such order."""
        dims = self.outermost_first
        size, stride = tuple(self.size[dim] for dim in dims), tuple(self.stride[dim] for dim in dims)
        return tuple(dims) if replace(self, size=size, stride=stride).contiguous else None

    @cached_property
    def contiguous(self) -> bool:
        """The last dimension is the innermost, without gaps. Of symbols only what their expressions show."""
        step: Any = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if type(size) is int and size == 1:
                continue
            if _hashable(stride) != _hashable(step):
                return False
            step = step * size
        return not (self.conj or self.neg)


_PLACES: dict[tuple[Any, ...], Geometry] = {}
_PLACES_KEPT = 20_000


def _meet(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether two positions of so many (stride, size) have one offset: tried one by one."""
    if dims[0][0] == 0:
        return True
    offsets = [0]
    for stride, size in dims:
        offsets = [offset + step * stride for offset in offsets for step in range(size)]
    return len(set(offsets)) < len(offsets)


def _nested(geometry: Geometry) -> bool:
    """Whether each stride steps over all that the smaller ones reach, so that offsets decompose in one way."""
    reach = 0
    for dim in reversed(geometry.outermost_first):
        if geometry.size[dim] == 1:
            continue
        if geometry.stride[dim] <= reach:
            return False
        reach += (geometry.size[dim] - 1) * geometry.stride[dim]
    return True


@dataclass(frozen=True)
class Box:
    """A view as one arithmetic progression for each dimension of its root.

    ``axes[i] = (start, step, count)`` for root dimension i; ``dims[d]`` is the root dimension that dimension d
    of the view walks along, None where it has size 1 or stride 0.
    """

    axes: tuple[tuple[int, int, int], ...]
    dims: tuple[int | None, ...]


def box(root: Geometry, view: Geometry) -> Box | None:
    """The view as a Box of the root, or None when it is not one (or nothing can be proved)."""
    if not (root.static and view.static) or root.dtype != view.dtype or 0 in view.size or 0 in root.size:
        return None
    if not _nested(root):
        return None
    starts = _starts(root, view.offset - root.offset)
    if starts is None:
        return None
    axes = [(start, 1, 1) for start in starts]
    dims: list[int | None] = []
    for size, stride in zip(view.size, view.stride, strict=True):
        if size == 1 or stride == 0:
            dims.append(None)
            continue
        dim = _axis(root, axes, size, stride)
        if dim is None:
            return None
        axes[dim] = (axes[dim][0], stride // root.stride[dim], size)
        dims.append(dim)
    return Box(tuple(axes), tuple(dims))


def _starts(root: Geometry, delta: int) -> list[int] | None:
    starts = [0] * len(root.size)
    if delta < 0:
        return None
    for dim in root.outermost_first:
        if root.size[dim] == 1:
            continue
        starts[dim], delta = divmod(delta, root.stride[dim])
        if starts[dim] >= root.size[dim]:
            return None
    return starts if delta == 0 else None


def _axis(root: Geometry, axes: list[tuple[int, int, int]], size: int, stride: int) -> int | None:
    for dim in root.outermost_first:
        start, _, count = axes[dim]
        if root.size[dim] == 1 or count != 1 or stride % root.stride[dim]:
            continue
        if start + (size - 1) * (stride // root.stride[dim]) < root.size[dim]:
            return dim
    return None


def boxes_disjoint(one: Box, two: Box) -> bool:
    """Whether some root dimension keeps the two apart."""
    return any(_progressions_disjoint(a, b) for a, b in zip(one.axes, two.axes, strict=True))


def _progressions_disjoint(one: tuple[int, int, int], two: tuple[int, int, int]) -> bool:
    (a, step_a, count_a), (b, step_b, count_b) = one, two
    if a + (count_a - 1) * step_a < b or b + (count_b - 1) * step_b < a:
        return True
    return (a - b) % math.gcd(step_a, step_b) != 0


def apart(one: Geometry, two: Geometry) -> bool:
    """Whether the byte ranges do not meet, for the sizes of this trace: asks the symbols, which become guards."""
    if any(unbacked(place.symbols) for place in (one, two)):
        return False
    ends = [(place.offset * place.dtype.itemsize, stop(place) * place.dtype.itemsize) for place in (one, two)]
    (low_1, high_1), (low_2, high_2) = ends
    return bool(high_1 <= low_2) or bool(high_2 <= low_1)


def spans_disjoint(one: Geometry, two: Geometry) -> bool:
    """Whether the byte ranges do not meet. Unknown (symbolic) counts as meeting."""
    if not (one.static and two.static):
        return False
    (low_1, high_1), (low_2, high_2) = one.span, two.span
    return low_1 == high_1 or low_2 == high_2 or high_1 <= low_2 or high_2 <= low_1


def reaches(source: Geometry, place: Geometry) -> bool:
    """Whether a place can be addressed as ``as_strided`` of a contiguous source."""
    if not source.contiguous:
        return False
    if unbacked(source.size):
        return source.dtype == place.dtype  # the op checks its bounds
    (low, high), (first, last) = hinted_span(source), hinted_span(place)
    if source.dtype != place.dtype and (len(source.size) != 1 or not _aligned((low, high), place.dtype)):
        return False
    return first == last or (low <= first and last <= high)


def hinted_span(place: Geometry) -> tuple[int, int]:
    """The first byte and one past the last, for the sizes of this trace; an empty tensor spans nothing."""
    size, item, first = tuple(map(hint, place.size)), place.dtype.itemsize, hint(place.offset)
    if 0 in size:
        return first * item, first * item
    last = first + sum((n - 1) * s for n, s in zip(size, map(hint, place.stride), strict=True))
    return first * item, (last + 1) * item


def empty(place: Geometry) -> bool:
    """Whether a place has no elements, for the sizes of this trace; sizes that data decide count as some."""
    return not unbacked(place.size) and 0 in map(hint, place.size)


def fits(place: Geometry, capacity: Any) -> bool:
    """Whether a storage of so many bytes holds a place, for the sizes of this trace."""
    return hinted_span(place)[1] <= hint(capacity)


def _aligned(span: tuple[int, int], dtype: torch.dtype) -> bool:
    return all(byte % dtype.itemsize == 0 for byte in span)


def as_dtype(source: Geometry, dtype: torch.dtype) -> Geometry:
    """A one-dimensional contiguous source read as another dtype."""
    have, want = source.dtype.itemsize, dtype.itemsize
    return Geometry((_in_units(source.size[0], have, want),), (1,), _in_units(source.offset, have, want), dtype)


def _in_units(count: Any, have: int, want: int) -> Any:
    """A number of units of ``have`` bytes as one of units of ``want``; one of the two divides the other."""
    return count * (have // want) if have >= want else count // (want // have)


def image(old: Geometry, place: Geometry) -> Geometry | None:
    """The elements of a storage in order, of the old top's dtype, from the first to the last that either addresses.

    Of symbolic places those are the ends that are it for the sizes of this trace; the ops check their bounds. None
    where symbols would have to be rounded.
    """
    if unbacked(old.size):  # all that is old: it cannot be told what lies beyond
        whole = old.order is not None and old.dtype == place.dtype
        return Geometry((math.prod(old.size),), (1,), old.offset, old.dtype) if whole else None
    item, unit = old.dtype.itemsize, min(old.dtype.itemsize, place.dtype.itemsize)
    places = [g for g in (old, place) if 0 not in map(hint, g.size)] or [old]
    first = min(places, key=lambda g: hinted_span(g)[0])
    last = max(places, key=lambda g: hinted_span(g)[1])
    if first is last is old and old.order is not None and _aligned(hinted_span(old), place.dtype):
        return Geometry((math.prod(old.size),), (1,), old.offset, old.dtype)
    low, high = _in_units(first.offset, first.dtype.itemsize, unit), _in_units(stop(last), last.dtype.itemsize, unit)
    step = max(item, place.dtype.itemsize) // unit
    if type(low) is int and type(high) is int:
        low, high = low // step * step, -(-high // step) * step
    elif hint(low) % step or hint(high) % step:
        return None
    length = high if type(low) is int and low == 0 else high - low
    return Geometry((plain(_in_units(length, unit, item)),), (1,), plain(_in_units(low, unit, item)), old.dtype)


def stop(place: Geometry) -> Any:
    """One past the last element of a place; where it starts if it is empty."""
    if 0 in map(hint, place.size):
        return place.offset
    if place.order is not None:
        return place.offset + math.prod(place.size)
    last = place.offset
    for size, stride in zip(place.size, place.stride, strict=True):
        last = last + (size - 1) * stride
    return last + 1
