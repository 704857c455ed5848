"""How tensors share memory, as a value that two calls can be compared by.

Invariant: patterns are equal where each pair of tensors shares memory in the same way; a gradient that shares none is
as one that is missing. Limits: sizes are no part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from functionalize._torch import storage_key
from functionalize._torch.tensors import autograd_base
from functionalize.aliasing.geometry import hint

Pattern = tuple[Any, ...]


class Shared(NamedTuple):
    """How a tensor lies to the first one that has its storage."""

    first: int  # the position of that
    distance: int  # bytes
    strides: tuple[int, ...]
    first_strides: tuple[int, ...]
    same: int | None  # the position of the tensor itself, where it came before
    base: int | None  # the first that is to autograd a view of the same tensor


def alias_pattern(values: Sequence[Any], gradients: Collection[int] = ()) -> Pattern:
    """How tensors share memory: for each its own position, or the first that shares its storage and how they lie.

    Also which of them are one object, and which are to autograd views of one tensor: writes to one of these change the
    gradients of the others. ``gradients``: the positions of gradients, which come after all others, and have an entry
    only where they share memory.
    """
    first: dict[int, int] = {}
    same: dict[int, int] = {}
    based: dict[int, int] = {}
    pattern: list[Any] = [None] * len(values)
    for position in (*(n for n in range(len(values)) if n not in gradients), *sorted(gradients)):
        value = values[position]
        if not isinstance(value, torch.Tensor):
            continue
        other, itself = first.setdefault(storage_key(value), position), same.setdefault(id(value), position)
        if other == position:
            pattern[position] = None if position in gradients else position
            based.setdefault(id(autograd_base(value)), position)
        else:
            before = values[other]
            start, first_start = (hint(one.storage_offset()) * one.itemsize for one in (value, before))
            own, others = (tuple(map(hint, one.stride())) for one in (value, before))
            of = based.setdefault(id(autograd_base(value)), position)
            same_as, viewed = (n if n != position else None for n in (itself, of))
            pattern[position] = Shared(other, start - first_start, own, others, same_as, viewed)
    return tuple(pattern)


class Sharing:
    """How the inputs of a program shared memory when it was captured, and what is compared of each call."""

    def __init__(self, values: Sequence[Any], gradients: Mapping[int, int], unused: Collection[int]) -> None:
        """``gradients``: their positions, each with that of its tensor, which stands where there is none.

        ``unused``: what the graph does not take. Where memory is shared, it may take that as another input.
        """
        given = [None if n in gradients and value is values[gradients[n]] else value for n, value in enumerate(values)]
        pattern = alias_pattern(given, gradients)
        shared = {n for pair in enumerate(pattern) if isinstance(pair[1], Shared) for n in (pair[0], pair[1].first)}
        self.gradients = {number for number in gradients if number in shared or number not in unused}
        self._unseen = gradients.keys() - self.gradients
        self.pattern = self.now(given)

    def now(self, values: Sequence[Any]) -> Pattern:
        """How the inputs of a call share memory, but for gradients that the program does not see."""
        seen = [None if number in self._unseen else value for number, value in enumerate(values)]
        return alias_pattern(seen, self.gradients)


def same_tensors(pattern: Pattern) -> dict[int, int]:
    """Of tensors that are one with an earlier one, which that is."""
    shared = ((number, entry.same) for number, entry in enumerate(pattern) if isinstance(entry, Shared))
    return {number: first for number, first in shared if first is not None}


def relation(entry: Any) -> str:
    """How a tensor lies to another one, in words."""
    if not isinstance(entry, Shared):
        return "share no memory"
    if entry.same is not None:
        return "are the same tensor"
    known = "" if entry.base is None else ", views of one tensor"
    strides = f"{list(entry.strides)} and {list(entry.first_strides)}"
    return f"share memory ({entry.distance} bytes apart, strides {strides}{known})"
