"""Places of state that share memory with one another: before a call, and after it.

An exported program has a tensor for each input, and writes to each by itself. Where a call puts other tensors into
places, these may share memory with others, or no longer do so; that is seen where the program writes to such memory.

Invariant: without causes, a later call finds places that share memory as the program was captured for, or writes to
none of these. Limits: memory that arguments of several calls share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.backends.preparation.example_call import ExampleCall
from functionalize.errors import UnsupportedExportError
from functionalize.python_state.containers import place_of
from functionalize.python_state.slots import Slot
from functionalize.runtime.guards.alias_pattern import Shared

Place = tuple[int, Any, tuple[int, ...]]  # the identity of a container, a key, steps into tuples


@dataclass(frozen=True)
class GraphValue:
    """Stands for what a call makes: a tensor that the caller gets, or a number that the graph gives; by its number."""

    alias: int | None = None
    result: int | None = None


def place_in(container: Any, key: Any, steps: tuple[int, ...]) -> Place:
    """What tells one place from another."""
    container, key = place_of(container, key)
    return id(container), key, steps


class SharedPlaces:
    """The places of a program's state, each with its tensor before a call and after it."""

    def __init__(self, call: ExampleCall, left: Mapping[Place, torch.Tensor], values: Mapping[int, GraphValue]) -> None:
        """``left``: what a call leaves at places; ``values``: what tensors among these stand for, by identity."""
        self._metadata, self._values = call.program.metadata, values
        self._numbers = call.numbers
        pattern = call.program.capture.guards.aliasing
        self._first = [one.first if isinstance(one, Shared) else one for one in pattern]
        self._slots = call.program.capture.state.tensors
        self._before = [slot.get() for slot in self._slots]
        places = (place_in(slot.container, slot.key, slot.steps) for slot in self._slots)
        self._after = [left.get(place, tensor) for place, tensor in zip(places, self._before, strict=True)]
        self.parted = self._parted()
        self.causes = self._mixed()

    def _parted(self) -> list[Slot]:
        """Those that hold one tensor with others, and after a call another one than these."""
        groups = _alike(list(map(id, self._before)))
        parting = [group for group in groups.values() if len({id(self._after[n]) for n in group}) > 1]
        return [self._slots[n] for group in parting for n in group if self._after[n] is not self._before[n]]

    def _mixed(self) -> list[str]:
        """What stands in the way of a tensor for each place."""
        before, after = ([self._memory(value) for value in values] for values in (self._before, self._after))
        together = _alike(before), _alike(after)
        written = {before[n] for n in self._written()}
        causes = []
        for n, slot in enumerate(self._slots):
            if before[n] in written and together[0][before[n]] != together[1][after[n]]:
                causes.append(
                    _cause(slot, ("the program writes to it, and a write changes all tensors that share the memory"))
                )
        gradients = [slot for slot in self.parted if slot.get().requires_grad]
        return causes + [_cause(slot, "gradients flow to the tensor from before the call") for slot in gradients]

    def _written(self) -> list[int]:
        numbers = {one.input for one in self._metadata.mutations}
        return [n for n, tensor in enumerate(self._before) if self._numbers.get(id(tensor)) in numbers]

    def _memory(self, tensor: torch.Tensor) -> Any:
        """Whose memory a tensor lies in: of which input, or of which result."""
        value = self._values.get(id(tensor))
        if value is None or value.alias is None:
            number = self._numbers.get(id(tensor))
            return id(tensor) if number is None else ("input", self._first[number])
        alias = self._metadata.outputs[value.alias]
        if alias.input is not None:
            return "input", self._first[alias.input]
        if alias.base is not None:
            return "base", alias.base
        return ("result", value.alias) if alias.group is None else ("group", alias.group)


def _alike(values: Sequence[Any]) -> dict[Any, list[int]]:
    """The positions of each value."""
    found: dict[Any, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return found


def _cause(slot: Slot, why: str) -> str:
    return UnsupportedExportError.cause(
        f"`{slot.path}` shares memory with other tensors of the state after a call than before it",
        why=why,
        hint="begin with separate tensors (clone) and assign separate tensors, or call the program once before the "
        "export",
    )
