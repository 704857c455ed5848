"""How tensors share memory, as a value that two calls can be compared by.

Invariant: patterns are equal where each pair of tensors shares memory in the same way. Limits: sizes are no part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def alias_pattern(values: Sequence[Any]) -> Pattern:
    """How tensors share memory: for each its own position, or the first that shares its storage and how they lie.

    Also which of them are one object, and which are to autograd views of one tensor: writes to one of these change the
    gradients of the others.
    """
    first: dict[int, int] = {}
    same: dict[int, int] = {}
    based: dict[int, int] = {}
    pattern: list[Any] = []
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            pattern.append(None)
            continue
        other, itself = first.setdefault(storage_key(value), position), same.setdefault(id(value), position)
        if other == position:
            pattern.append(position)
            based.setdefault(id(autograd_base(value)), position)
        else:
            before = values[other]
            start, first_start = (hint(one.storage_offset()) * one.itemsize for one in (value, before))
            own, others = (tuple(map(hint, one.stride())) for one in (value, before))
            of = based.setdefault(id(autograd_base(value)), position)
            same_as, viewed = (n if n != position else None for n in (itself, of))
            pattern.append(Shared(other, start - first_start, own, others, same_as, viewed))
    return tuple(pattern)


def same_tensors(pattern: Pattern) -> dict[int, int]:
    """Of tensors that are one with an earlier one, which that is."""
    shared = ((number, entry.same) for number, entry in enumerate(pattern) if isinstance(entry, Shared))
    return {number: first for number, first in shared if first is not None}


def relation(entry: Any) -> str:
    """How a tensor lies to another one, in words."""
    if not isinstance(entry, Shared):
        return "share no memory"
    if entry.same is not None:
        return "are one tensor"
    known = "" if entry.base is None else ", views of one tensor"
    strides = f"{list(entry.strides)} and {list(entry.first_strides)}"
    return f"share memory ({entry.distance} bytes apart, strides {strides}{known})"
