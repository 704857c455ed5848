"""Draws a part of a tensor that an operator fills with random numbers, without the rest.

Invariant: each element is that of the whole tensor. Limits: fills that draw element by element, and normal numbers.
The kernel of these makes sixteen at a time, and the last sixteen again unless the tensor ends with a whole block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from functionalize.deferred.random.draws import Draws
from functionalize.deferred.random.fills import BLOCK, Fill
from functionalize.deferred.random.mersenne import State, skipped

_ROOM = 1 << 20  # elements that are drawn at once if only a part of them is kept


def fill_part(
    fill: Fill,
    node: Node,
    window: Any,
    draws: Draws,
    run: Callable[[Node], None],
    place: Callable[[torch.device], torch.device],
    inputs: list[Any],
) -> torch.Tensor:
    """The part of a filled tensor in a window."""
    (stream, index), per_element = node.meta["draw"], fill.per_element or 0
    size, generator = fill.spec.size, stream.generator
    made = torch.empty(window.size(size), dtype=fill.spec.dtype, device=place(fill.spec.device))
    begun: tuple[int, State] | None = None  # the element that was drawn from last, and the state before it
    for first, last, target, put in _ranges(size, window, made):
        for low, high in _pieces(fill, first, last):
            if begun is None or low < begun[0]:
                draws.seek(stream, index, run, low * per_element)
            else:
                generator.set_state(skipped(begun[1], (low - begun[0]) * per_element))
            begun = low, generator.get_state()
            if first <= low and high <= last:
                fill.run(target[low - first : high - first], generator)
                continue
            drawn = fill.run(torch.empty(high - low, dtype=made.dtype, device=made.device), generator)
            begin, end = max(low, first), min(high, last)
            target[begin - first : end - first] = drawn[begin - low : end - low]
        put()
    return made


Range = tuple[int, int, torch.Tensor, Callable[[], object]]


def _ranges(size: tuple[int, ...], window: Any, made: torch.Tensor) -> Iterator[Range]:
    """Ranges of the flat elements that cover a window; where to draw each, and a function that copies it there."""
    if not made.numel():
        return
    inner = math.prod(size[window.dim + 1 :])
    row, part, offset = size[window.dim] * inner, (window.stop - window.start) * inner, window.start * inner
    flat = made.view(-1, part)
    if len(flat) == 1 or part >= _ROOM:
        for number, target in enumerate(flat):
            yield number * row + offset, number * row + offset + part, target, lambda: None
        return
    rows = max(1, _ROOM // row)  # whole rows are drawn, and some of their columns kept
    room = torch.empty(min(rows, len(flat)) * row, dtype=made.dtype, device=made.device)
    for number, targets in enumerate(flat.split(rows)):
        drawn = room[: len(targets) * row]
        kept = drawn.view(-1, row)[:, offset : offset + part]
        yield number * rows * row, number * rows * row + drawn.numel(), drawn, partial(targets.copy_, kept)


def _pieces(fill: Fill, first: int, last: int) -> list[tuple[int, int]]:
    """What to draw for a range of the elements, in pieces that the kernel draws as it would in the whole tensor."""
    count = fill.spec.numel
    if not fill.in_blocks:
        return [(first, last)]
    low, high = first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
    tail = (count // BLOCK - 1) * BLOCK if count % BLOCK else count  # the elements from here on are drawn together
    if last > count - BLOCK and count % BLOCK:
        return [*_split_ends(low, min(tail, high), first, last), (tail, count)] if low < tail else [(tail, count)]
    return _split_ends(low, high, first, last)


def _split_ends(low: int, high: int, first: int, last: int) -> list[tuple[int, int]]:
    """A range of whole blocks, with a block at an end split off if only a part of it is wanted."""
    pieces = []
    if low < first and high - low > BLOCK:
        pieces.append((low, low + BLOCK))
        low += BLOCK
    rest = (high - BLOCK, high) if high > last and high - low > BLOCK else None
    return [*pieces, (low, high - BLOCK if rest else high), *([rest] if rest else [])]
