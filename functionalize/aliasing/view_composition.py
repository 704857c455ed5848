"""Shorter routes: from a root straight to a view far down a chain, from many parts at once to the whole.

Invariant: a route reaches the same elements, in the same order, as the chain that it stands for.
Limits: layouts that are boxes of the root (:class:`functionalize.aliasing.overlap.Box`), parts along one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.overlap import Box
from functionalize.aliasing.view_rules import Progression

aten = torch.ops.aten


def tile_runs(parts: Sequence[tuple[Any, Progression | None]]) -> list[list[Any]]:
    """Groups of two or more views that are adjacent along one dimension of their common source, in order."""
    known = [(part.dim, part.drops, part.start, part.stop, view) for view, part in parts if part is not None]
    runs: list[list[Any]] = []
    end: tuple[Any, ...] | None = None
    for dim, drops, start, stop, view in sorted(known, key=lambda row: row[:4]):
        if end == (dim, drops, start):
            runs[-1].append(view)
        else:
            runs.append([view])
        end = (dim, drops, stop)
    return [run for run in runs if len(run) > 1]


RouteStep = tuple[Any, tuple[Any, ...], Layout]  # a view op, its arguments, and the layout that it gives


def steps(root: Layout, box: Box, out: Layout) -> list[RouteStep]:
    """The shortest plain way from a root to a layout that is a box of it: select, slice, permute, unsqueeze, expand."""
    result: list[RouteStep] = []
    kept = [dim for dim in box.dims if dim is not None]
    here, names = root, list(range(len(root.size)))

    def go(op: Any, args: tuple[Any, ...], size: list[Any], stride: list[Any], offset: int = 0) -> None:
        nonlocal here
        here = replace(here, size=tuple(size), stride=tuple(stride), offset=here.offset + offset)
        result.append((op, args, here))

    for dim in reversed(range(len(root.size))):
        if dim not in kept:
            start, size, stride = box.axes[dim][0], list(here.size), list(here.stride)
            del size[dim], names[dim]
            go(aten.select.int, (dim, start), size, stride[:dim] + stride[dim + 1 :], start * stride[dim])
    for axis, dim in enumerate(names):
        start, step, count = box.axes[dim]
        if (start, step, count) != (0, 1, root.size[dim]):
            size, stride = list(here.size), list(here.stride)
            size[axis], stride[axis] = count, stride[axis] * step
            stop = start + (count - 1) * step + 1
            go(aten.slice.Tensor, (axis, start, stop, step), size, stride, start * root.stride[dim])
    order = [names.index(dim) for dim in kept]
    if order != sorted(order):
        go(aten.permute.default, (order,), [here.size[i] for i in order], [here.stride[i] for i in order])
    for axis, dim_or_none in enumerate(box.dims):
        if dim_or_none is None:
            size, stride = list(here.size), list(here.stride)
            go(aten.unsqueeze.default, (axis,), [*size[:axis], 1, *size[axis:]], [*stride[:axis], 0, *stride[axis:]])
    if here.size != out.size:
        go(aten.expand.default, (list(out.size),), list(out.size), list(out.stride))
    return [*result[:-1], (*result[-1][:2], out)] if result else []
