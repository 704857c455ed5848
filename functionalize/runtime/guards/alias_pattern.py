"""How tensors share memory, as a pattern that can be compared between calls, and the guard on it.

Invariant: patterns are equal if each pair of tensors shares memory in the same way; a gradient that shares no memory
counts as missing. Limits: a pattern does not contain sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from functionalize._torch import share_storages, storage_key
from functionalize._torch.tensors import autograd_base
from functionalize.aliasing.geometry import hint
from functionalize.errors import GradientMismatchError, InputMismatchError
from functionalize.runtime.guards.compiled import items_of
from functionalize.runtime.guards.guard import WHEN, CallInputs, FastCode, Guard, GuardKind, containers_of
from functionalize.runtime.metadata import ProgramMetadata

Pattern = tuple[Any, ...]


class Shared(NamedTuple):
    """How a tensor shares a storage with the first tensor that has it."""

    first: int  # the position of that first tensor
    distance: int  # bytes between their offsets
    strides: tuple[int, ...]
    first_strides: tuple[int, ...]
    same: int | None  # the position of the same tensor object, if it came before
    base: int | None  # the position of the first tensor that autograd takes for a view of the same base


def alias_pattern(values: Sequence[Any], gradients: Collection[int] = ()) -> Pattern:
    """How tensors share memory: for each tensor its own position, or how it shares a storage with an earlier one.

    The pattern also says which of them are one object, and which autograd takes for views of one tensor: a write to
    one such view changes the gradients of the others. ``gradients``: the positions of gradients, which come after all
    other tensors, and have an entry only if they share memory.
    """
    storages = {n: storage_key(value) for n, value in enumerate(values) if isinstance(value, torch.Tensor)}
    if len({*storages.values()}) == len(storages):  # as in most programs
        return tuple(n if n in storages and n not in gradients else None for n in range(len(values)))
    first: dict[int, int] = {}
    same: dict[int, int] = {}
    based: dict[int, int] = {}
    pattern: list[Any] = [None] * len(values)
    for position in (*(n for n in storages if n not in gradients), *sorted(storages.keys() & gradients)):
        value = values[position]
        other, itself = first.setdefault(storages[position], position), same.setdefault(id(value), position)
        if other == position:
            pattern[position] = None if position in gradients else position
            based.setdefault(id(autograd_base(value)), position)
        else:
            before = values[other]
            start, first_start = (hint(t.storage_offset()) * t.itemsize for t in (value, before))
            own, others = (tuple(map(hint, t.stride())) for t in (value, before))
            of = based.setdefault(id(autograd_base(value)), position)
            same_as, viewed = (n if n != position else None for n in (itself, of))
            pattern[position] = Shared(other, start - first_start, own, others, same_as, viewed)
    return tuple(pattern)


class Sharing(GuardKind):
    """How the inputs of a program share memory."""

    def __init__(self, metadata: ProgramMetadata, values: Sequence[Any], gradients: Mapping[int, int]) -> None:
        """``gradients``: their positions, each with that of its tensor, which is also the value of a missing gradient.

        If memory is shared, the graph may read an input that it does not use through another one.
        """
        self._metadata, inputs = metadata, metadata.inputs
        present = [
            None if n in gradients and value is values[gradients[n]] else value for n, value in enumerate(values)
        ]
        pattern = alias_pattern(present, gradients)
        shared = {n for pair in enumerate(pattern) if isinstance(pair[1], Shared) for n in (pair[0], pair[1].first)}
        self._gradients = {number for number in gradients if number in shared or number not in metadata.unused}
        self._unseen = gradients.keys() - self._gradients
        # Gradients come last: for another one, a call is captured again.
        self._order = sorted(range(len(inputs)), key=self._gradients.__contains__)
        self.pattern = self._now(present) if self._unseen else pattern

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        pattern = self._now(call.values)
        if pattern == self.pattern:
            return None
        for number in self._order:
            now, before = pattern[number], self.pattern[number]
            if now != before:
                first = (now if isinstance(now, Shared) else before).first
                if call.examples.isdisjoint((number, first)):
                    return self._mismatch(number, first, now, before)
        return None

    def write(self, code: FastCode) -> None:
        values = code.call.values
        tensors = {n for n, entry in enumerate(self._metadata.inputs) if entry.gradient_of is None}
        numbers = sorted({*(n for n in tensors if isinstance(values[n], torch.Tensor)), *self._gradients})
        present = [values[number] for number in numbers if values[number] is not None]
        if len(set(map(storage_key, present))) < len(present):
            code.body.refuse("sharing(inputs) != pattern", sharing=self._now, pattern=self.pattern)
        elif len(numbers) > 1:  # a gradient that is missing shares no memory
            compared = items_of("inputs", numbers, len(self._metadata.inputs))
            code.body.refuse(f"share((), {{}}, ({compared},))", share=share_storages)

    def listed(self) -> Iterator[Guard]:
        labels = [entry.label for entry in self._metadata.inputs]
        for number, entry in enumerate(self.pattern):
            if isinstance(entry, Shared):
                yield Guard(labels[number], f"shares memory with {labels[entry.first]}", entry[1:])

    def _now(self, values: Sequence[Any]) -> Pattern:
        """How the inputs of a call share memory, without gradients that the program does not see."""
        seen = [None if number in self._unseen else value for number, value in enumerate(values)]
        return alias_pattern(seen, self._gradients)

    def _mismatch(self, number: int, first: int, now: Any, before: Any) -> InputMismatchError:
        inputs = self._metadata.inputs
        error = GradientMismatchError if number in self._gradients else InputMismatchError
        return error(
            f"{inputs[number].label} and {inputs[first].label} {relation(now)}, and {relation(before)} {WHEN}",
            hint="pass tensors that share memory in the same way, or capture with on_guard_failure='recapture'",
            containers=containers_of(inputs[number].slot, inputs[first].slot),
        )


def same_tensors(pattern: Pattern) -> dict[int, int]:
    """For each tensor that is the same object as an earlier one, the position of that."""
    shared = ((number, entry.same) for number, entry in enumerate(pattern) if isinstance(entry, Shared))
    return {number: first for number, first in shared if first is not None}


def relation(entry: Any) -> str:
    """How a tensor shares memory with another one, in words."""
    if not isinstance(entry, Shared):
        return "share no memory"
    if entry.same is not None:
        return "are the same tensor"
    views = "" if entry.base is None else ", views of one tensor"
    strides = f"{list(entry.strides)} and {list(entry.first_strides)}"
    return f"share memory ({entry.distance} bytes apart, strides {strides}{views})"
