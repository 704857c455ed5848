"""Whether two layouts of one storage share elements, which layout reaches another, and by which plain views.

Invariant: answers are exact for plain sizes, else conservative: "disjoint" is only said when proved.
Limits: proofs need sizes known as plain integers; symbolic layouts are equal if their expressions are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize._torch import unbacked
from functionalize.aliasing.geometry import Layout, hint, hinted_span, plain, same, stop

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RouteStep:
    """A view op, its arguments after the source, and the layout that it gives."""

    op: Any
    args: tuple[Any, ...]
    layout: Layout


@dataclass(frozen=True)
class Axis:
    """The positions along one dimension of a root: an arithmetic progression."""

    start: int
    step: int
    count: int


@dataclass(frozen=True)
class Box:
    """A view as one arithmetic progression for each dimension of its root.

    ``axes[i]`` is that of root dimension i; ``dims[d]`` is the root dimension that dimension d of the view walks along,
    None where it has size 1 or stride 0.
    """

    axes: tuple[Axis, ...]
    dims: tuple[int | None, ...]


def box_of(root: Layout, view: Layout) -> Box | None:
    """The view as a Box of the root, or None when it is not one (or nothing can be proved)."""
    if not (root.static and view.static) or root.dtype != view.dtype or 0 in view.size or 0 in root.size:
        return None
    if not root.strides_nest:
        return None
    starts = _starts(root, view.offset - root.offset)
    if starts is None:
        return None
    axes = [Axis(start, 1, 1) for start in starts]
    dims: list[int | None] = []
    for size, stride in zip(view.size, view.stride, strict=True):
        if size == 1 or stride == 0:
            dims.append(None)
            continue
        dim = _axis(root, axes, size, stride)
        if dim is None:
            return None
        axes[dim] = Axis(axes[dim].start, stride // root.stride[dim], size)
        dims.append(dim)
    return Box(tuple(axes), tuple(dims))


def _starts(root: Layout, delta: int) -> list[int] | None:
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


def _axis(root: Layout, axes: list[Axis], size: int, stride: int) -> int | None:
    for dim in root.outermost_first:
        if root.size[dim] == 1 or axes[dim].count != 1 or stride % root.stride[dim]:
            continue
        if axes[dim].start + (size - 1) * (stride // root.stride[dim]) < root.size[dim]:
            return dim
    return None


def route(root: Layout, out: Layout) -> list[RouteStep] | None:
    """Plain views that lead from a root to a layout, to the same elements in the same order; else None."""
    box = box_of(root, out)
    return None if box is None or (out.conj, out.neg) != (root.conj, root.neg) else _steps(root, box, out)


def _steps(root: Layout, box: Box, out: Layout) -> list[RouteStep]:
    """The shortest way: select, slice, permute, unsqueeze, expand."""
    result: list[RouteStep] = []
    size, stride, offset = list(root.size), list(root.stride), root.offset

    def go(op: Any, *args: Any) -> None:
        result.append(RouteStep(op, args, replace(root, size=tuple(size), stride=tuple(stride), offset=offset)))

    kept = [dim for dim in box.dims if dim is not None]
    for dim in reversed(range(len(root.size))):
        if dim not in kept:
            start = box.axes[dim].start
            offset += start * stride[dim]
            del size[dim], stride[dim]
            go(aten.select.int, dim, start)
    for axis, dim in enumerate(sorted(kept)):
        start, step, count = box.axes[dim].start, box.axes[dim].step, box.axes[dim].count
        if start != 0 or step != 1 or count != size[axis]:
            offset += start * stride[axis]
            size[axis], stride[axis] = count, stride[axis] * step
            go(aten.slice.Tensor, axis, start, start + (count - 1) * step + 1, step)
    order = [sorted(kept).index(dim) for dim in kept]
    if order != sorted(order):
        size, stride = [size[axis] for axis in order], [stride[axis] for axis in order]
        go(aten.permute.default, order)
    for axis, walked in enumerate(box.dims):
        if walked is None:
            size.insert(axis, 1)
            stride.insert(axis, 0)
            go(aten.unsqueeze.default, axis)
    if tuple(size) != out.size:
        size, stride = list(out.size), list(out.stride)
        go(aten.expand.default, size)
    return [*result[:-1], replace(result[-1], layout=out)] if result else []


def boxes_disjoint(first: Box, second: Box) -> bool:
    """Whether two boxes of one root share no element: some root dimension separates them."""
    return any(_progressions_disjoint(a, b) for a, b in zip(first.axes, second.axes, strict=True))


def _progressions_disjoint(a: Axis, b: Axis) -> bool:
    if a.start + (a.count - 1) * a.step < b.start or b.start + (b.count - 1) * b.step < a.start:
        return True
    return (a.start - b.start) % math.gcd(a.step, b.step) != 0


def disjoint_guarded(first: Layout, second: Layout) -> bool:
    """Whether two layouts share no element, for the sizes of this trace: guards their symbols.

    It guards only what holds. False, without a guard, if sizes are data-dependent or if no condition shows it.
    """
    if any(unbacked(layout.symbols) for layout in (first, second)):
        return False
    for conditions in _separations(first, second):
        if all(hint(small) <= hint(large) for small, large in conditions):
            return all(bool(small <= large) for small, large in conditions)
    return False


def _separations(a: Layout, b: Layout) -> Iterator[list[tuple[Any, Any]]]:
    """Sufficient conditions for two layouts to share no element: pairs of numbers, the first at most the second."""
    places = [(layout.offset * layout.dtype.itemsize, stop(layout) * layout.dtype.itemsize) for layout in (a, b)]
    (low_1, high_1), (low_2, high_2) = places
    yield [(high_1, low_2)]
    yield [(high_2, low_1)]
    for period in [step for step, size in a.byte_steps if hint(size) > 1 and hint(step)]:
        # If all longer strides are multiples of a period, each layout's addresses are in one part of every period.
        multiples = [
            (step % period, 0) for layout in (a, b) for step, _ in layout.byte_steps if hint(step) > hint(period)
        ]
        distance = low_2 - low_1
        distance = distance - hint(distance) // hint(period) * period
        yield [*multiples, (_within(a, period), distance), (distance + _within(b, period), period)]


def _within(layout: Layout, period: Any) -> Any:
    """The bytes that a layout reaches along the dimensions whose strides are shorter than a period."""
    shorter = [(step, size) for step, size in layout.byte_steps if hint(step) < hint(period)]
    return layout.dtype.itemsize + sum((size - 1) * step for step, size in shorter)


def spans_disjoint(first: Layout, second: Layout) -> bool:
    """Whether the byte ranges do not meet. Unknown (symbolic) counts as meeting."""
    if not (first.static and second.static):
        return False
    (low_1, high_1), (low_2, high_2) = first.span, second.span
    return low_1 == high_1 or low_2 == high_2 or high_1 <= low_2 or high_2 <= low_1


def disjoint(first: Layout, second: Layout) -> bool:
    """Whether two layouts of a storage share no element, also where their spans meet (columns of a matrix)."""
    if spans_disjoint(first, second):
        return True
    if not (first.static and second.static):
        return False
    counts: dict[int, list[int]] = {}  # by step: the least and the greatest
    for step, size in first.byte_steps:
        counts.setdefault(step, [0, 0])[1] += size - 1
    for step, size in second.byte_steps:
        counts.setdefault(step, [0, 0])[0] -= size - 1
    steps = sorted(((step, least, greatest) for step, (least, greatest) in counts.items() if step), reverse=True)
    return next(_sums(steps, *_distances(first, second)), None) is None


def meets_elsewhere(target: Layout, source: Layout) -> bool:
    """Whether an element at one position of a layout overlaps what another, of the same size, has at another position.

    Both are static.
    """
    if disjoint(target, source):
        return False
    walks = [
        (size, step, other)
        for (step, size), (other, _) in zip(target.byte_steps, source.byte_steps, strict=True)
        if size != 1
    ]
    if any(step == 0 or other == 0 for _, step, other in walks):  # all positions along a dimension share an element
        return True
    steps: list[tuple[tuple[int, int, int], int]] = []  # each with its dimension
    for dim, (size, step, other) in enumerate(walks):
        if step == other:
            steps.append(((step, 1 - size, size - 1), dim))
        else:
            steps += [((step, 0, size - 1), dim), ((other, 1 - size, 0), dim)]
    steps.sort(reverse=True)
    for counts in _sums([step for step, _ in steps], *_distances(target, source)):
        moved = [0] * len(walks)
        for count, (_, dim) in zip(counts, steps, strict=True):
            moved[dim] += count
        if any(moved):
            return True
    return False


def repeats_part(target: Layout, source: Layout) -> bool:
    """Whether a source of the target's size has, along each dimension, the target's elements in their places or one
    position repeated.
    """
    if same([target.offset], [source.offset]) and target.dtype is source.dtype:
        steps = zip(source.stride, target.stride, strict=True)
        return target.strides_nest and all(
            (type(step) is int and step == 0) or same([step], [own]) for step, own in steps
        )
    box = box_of(target, source)
    return box is not None and all(
        walked is None or (walked == dim and box.axes[dim].count == size)
        for dim, (walked, size) in enumerate(zip(box.dims, target.size, strict=True))
    )


def _distances(first: Layout, second: Layout) -> tuple[int, int]:
    """The least and the greatest sum of steps, in bytes, by which elements of two layouts overlap."""
    distance = second.offset * second.dtype.itemsize - first.offset * first.dtype.itemsize
    return distance - first.dtype.itemsize + 1, distance + second.dtype.itemsize - 1


def _sums(steps: Sequence[tuple[int, int, int]], low: int, high: int) -> Iterator[tuple[int, ...]]:
    """How often to take each step so that the sum is between two bounds: all ways.

    ``steps``: the longest first, each with the least and the greatest count.
    """
    if not steps:
        if low <= 0 <= high:
            yield ()
        return
    unit = math.gcd(*(step for step, _, _ in steps))
    if high // unit * unit < low:
        return
    (step, fewest, most), *rest = steps
    least, greatest = sum(step * count for step, count, _ in rest), sum(step * count for step, _, count in rest)
    fewest, most = max(fewest, -((greatest - low) // step)), min(most, (high - least) // step)
    for count in range(fewest, most + 1):
        for counts in _sums(rest, low - count * step, high - count * step):
            yield (count, *counts)


def reaches(source: Layout, layout: Layout) -> bool:
    """Whether ``as_strided`` of a contiguous source can address a layout."""
    if not source.contiguous:
        return False
    if unbacked(source.size):
        return source.dtype == layout.dtype  # the op checks its bounds
    (low, high), (first, last) = hinted_span(source), hinted_span(layout)
    if unbacked(layout.size) and not low <= first < high:
        return False
    if source.dtype != layout.dtype and (len(source.size) != 1 or not _aligned((low, high), layout.dtype)):
        return False
    return first == last or (low <= first and last <= high)


def as_dtype(source: Layout, dtype: torch.dtype) -> Layout:
    """A one-dimensional contiguous source read as another dtype."""
    have, want = source.dtype.itemsize, dtype.itemsize
    return Layout((_in_units(source.size[0], have, want),), (1,), _in_units(source.offset, have, want), dtype)


def _in_units(count: Any, have: int, want: int) -> Any:
    """A number of units of ``have`` bytes as one of units of ``want``; one of the two divides the other."""
    return count * (have // want) if have >= want else count // (want // have)


def flat_base_layout(old: Layout, layout: Layout) -> Layout | None:
    """The flat base below two layouts: all elements from the first to the last that either addresses, in order.

    Its dtype is the old top's. For symbolic layouts the ends are those of this trace's sizes; the ops check their
    bounds. None where symbols would have to be rounded.
    """
    if unbacked(old.size):  # all of the old layout: the elements beyond it are unknown
        whole = old.order is not None and old.dtype == layout.dtype
        return Layout((math.prod(old.size),), (1,), old.offset, old.dtype) if whole else None
    item, unit = old.dtype.itemsize, min(old.dtype.itemsize, layout.dtype.itemsize)
    layouts = [g for g in (old, layout) if 0 not in map(hint, g.size)]
    if unbacked(layout.size):
        if layouts and not hinted_span(old)[0] <= hinted_span(layout)[0] < hinted_span(old)[1]:
            return None  # beyond the old layout, to a data-dependent end
        layouts = layouts or [layout]
    layouts = layouts or [old]
    first = min(layouts, key=lambda g: hinted_span(g)[0])
    last = max(layouts, key=lambda g: hinted_span(g)[1])
    if first is last is old and old.order is not None and _aligned(hinted_span(old), layout.dtype):
        return Layout((math.prod(old.size),), (1,), old.offset, old.dtype)
    low, high = _in_units(first.offset, first.dtype.itemsize, unit), _in_units(stop(last), last.dtype.itemsize, unit)
    step = max(item, layout.dtype.itemsize) // unit
    if type(low) is int and type(high) is int:
        low, high = low // step * step, -(-high // step) * step
    elif hint(low) % step or hint(high) % step:
        return None
    length = high if type(low) is int and low == 0 else high - low
    return Layout((plain(_in_units(length, unit, item)),), (1,), plain(_in_units(low, unit, item)), old.dtype)


def _aligned(span: tuple[int, int], dtype: torch.dtype) -> bool:
    return all(byte % dtype.itemsize == 0 for byte in span)
