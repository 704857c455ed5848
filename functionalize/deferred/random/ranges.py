"""A part of a tensor that random numbers fill, drawn alone.

Invariant: each element is the one that the whole has there. Limits: fills that take their elements one after another,
and normal numbers, of which a kernel makes sixteen at a time, and the last sixteen again where they are no whole block.
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

_ROOM = 1 << 20  # elements that are drawn at once where only a part of them is kept


def fill_part(
    fill: Fill,
    node: Node,
    window: Any,
    draws: Draws,
    run: Callable[[Node], None],
    place: Callable[[torch.device], torch.device],
    given: list[Any],
) -> torch.Tensor:
    """What a fill puts into a window of its tensor."""
    (stream, index), per_element = node.meta["draw"], fill.per_element or 0
    size, generator = fill.spec.size, stream.generator
    made = torch.empty(window.size(size), dtype=fill.spec.dtype, device=place(fill.spec.device))
    known: tuple[int, State] | None = None  # an element that was begun with, and the state then
    for first, last, target, put in _ranges(size, window, made):
        for low, high in _pieces(fill, first, last):
            if known is None or low < known[0]:
                draws.leave(stream, index, run, low * per_element)
            else:
                generator.set_state(skipped(known[1], (low - known[0]) * per_element))
            known = low, generator.get_state()
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
    """Ranges of the elements in order that cover a window; where to draw each, and what puts it into the window."""
    if not made.numel():
        return
    inner = math.prod(size[window.dim + 1 :])
    row, part, offset = size[window.dim] * inner, (window.stop - window.start) * inner, window.start * inner
    flat = made.view(-1, part)
    if len(flat) == 1 or part >= _ROOM:
        for number, target in enumerate(flat):
            yield number * row + offset, number * row + offset + part, target, lambda: None
        return
    rows = max(1, _ROOM // row)  # whole ones, of which some columns are kept
    room = torch.empty(min(rows, len(flat)) * row, dtype=made.dtype, device=made.device)
    for number, targets in enumerate(flat.split(rows)):
        drawn = room[: len(targets) * row]
        kept = drawn.view(-1, row)[:, offset : offset + part]
        yield number * rows * row, number * rows * row + drawn.numel(), drawn, partial(targets.copy_, kept)


def _pieces(fill: Fill, first: int, last: int) -> list[tuple[int, int]]:
    """What to draw for a range of the elements, each piece as the kernel would draw it among all."""
    count = fill.spec.numel
    if not fill.in_blocks:
        return [(first, last)]
    low, high = first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
    tail = (count // BLOCK - 1) * BLOCK if count % BLOCK else count  # from here on all is drawn together
    if last > count - BLOCK and count % BLOCK:
        return [*_apart(low, min(tail, high), first, last), (tail, count)] if low < tail else [(tail, count)]
    return _apart(low, high, first, last)


def _apart(low: int, high: int, first: int, last: int) -> list[tuple[int, int]]:
    """A range of whole blocks: those at its ends, of which a part is wanted, alone."""
    found = []
    if low < first and high - low > BLOCK:
        found.append((low, low + BLOCK))
        low += BLOCK
    rest = (high - BLOCK, high) if high > last and high - low > BLOCK else None
    return [*found, (low, high - BLOCK if rest else high), *([rest] if rest else [])]
