"""The slow, obvious oracle of layouts: the address of each element, one by one."""

from __future__ import annotations

import itertools

from functionalize.aliasing.geometry import Layout


def addresses(layout: Layout) -> list[int]:
    """The element of its storage that each position of a layout is, in the order of positions."""
    ranges = [range(size) for size in layout.size]
    return [
        layout.offset + sum(i * stride for i, stride in zip(index, layout.stride, strict=True))
        for index in itertools.product(*ranges)
    ]


def distinct(layout: Layout) -> bool:
    """Whether no two positions are the same element."""
    found = addresses(layout)
    return len(set(found)) == len(found)
