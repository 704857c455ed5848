"""The slow, obvious oracle of places: the address of each element, one by one."""

from __future__ import annotations

import itertools

from functionalize.aliasing.geometry import Layout


def addresses(place: Layout) -> list[int]:
    """The element of its storage that each position of a place is, in the order of positions."""
    ranges = [range(size) for size in place.size]
    return [
        place.offset + sum(i * stride for i, stride in zip(index, place.stride, strict=True))
        for index in itertools.product(*ranges)
    ]


def distinct(place: Layout) -> bool:
    """Whether no two positions are the same element."""
    found = addresses(place)
    return len(set(found)) == len(found)
