"""Whether a call is, for sure, like one that passed the guards: what torch and Python compare fast.

Invariant: what passes here would pass the guards. Limits: what does not may pass them nevertheless; calls whose
tensors are not strided, or whose sizes are new, always ask the guards themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize._torch.dispatch import TensorGuards
from functionalize.errors import InputMismatchError
from functionalize.runtime.call_arguments import CallArguments
from functionalize.runtime.guards import Guards
from functionalize.runtime.modes import ModeCheck
from functionalize.runtime.settings import SettingsCheck


class FastGuards:
    """Compares calls with one that passed."""

    def __init__(self, guards: Guards, arguments: CallArguments, values: Sequence[Any]) -> None:
        """``values``: the inputs of the call that passed."""
        self._guards, self._kinds = guards, arguments.kinds
        self._structure = None if arguments.flat else arguments.structure
        self._modes, self._settings = ModeCheck(), SettingsCheck(guards.settings)
        self._constants = [
            (place, leaf) for place, leaf in enumerate(arguments.leaves) if not isinstance(leaf, torch.Tensor)
        ]
        entries = list(enumerate(guards.inputs))
        self._numbers = [n for n, e in entries if e.gradient_of is None and isinstance(values[n], torch.Tensor)]
        self._gradients = [n for n, e in entries if e.gradient_of is not None]
        tensors = [values[number] for number in self._numbers]
        self._usable = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)
        self._looks = TensorGuards(*tensors, **self._sizes(tensors)) if self._usable and tensors else None
        self._apart = len({storage_key(tensor) for tensor in tensors}) == len(tensors)
        self._dynamic = [number for number in self._numbers if number in guards.dynamic]
        self._known_sizes = self._dynamic_sizes(values)
        self._more = bool(
            self._gradients
            or self._dynamic
            or guards.offsets
            or guards.leaves
            or guards.had_gradient
            or guards.metadata.side_effects
        )

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        pairs = list(zip(self._numbers, tensors, strict=True))
        sizes = [[None] * t.dim() if n in self._guards.dynamic else list(t.size()) for n, t in pairs]
        strides = [[None] * t.dim() if n in self._guards.dynamic else list(t.stride()) for n, t in pairs]
        return {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}

    def _dynamic_sizes(self, values: Sequence[Any]) -> list[Any]:
        return [(values[number].size(), values[number].stride()) for number in self._dynamic]

    def passes(self, arguments: CallArguments) -> list[Any] | None:
        """The program's inputs for a call; None where the guards must be asked."""
        if not (self._usable and arguments.kinds == self._kinds and self._modes.passes()):
            return None
        if self._structure is not None and arguments.structure != self._structure:
            return None
        if self._constants:
            leaves = arguments.leaves
            for place, value in self._constants:
                if leaves[place] is not value and not _equal(leaves[place], value):
                    return None
        if not self._settings.passes():
            return None
        values = self._guards.values(arguments)
        tensors = [values[number] for number in self._numbers]
        if self._looks is not None and not self._looks.check(*tensors):
            return None
        if self._apart:
            alike = len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)
        else:
            alike = self._guards.pattern(values) == self._guards.aliasing
        return values if alike and not (self._more and self._differs(arguments, values)) else None

    def _differs(self, arguments: CallArguments, values: Sequence[Any]) -> bool:
        """Whether it may be another call by what few programs look at."""
        guards = self._guards
        if self._dynamic and self._dynamic_sizes(values) != self._known_sizes:
            return True
        if any(values[number].storage_offset() != offset for number, offset in guards.offsets.items()):
            return True
        if any(values[number].is_leaf != leaf for number, leaf in guards.leaves.items() if values[number] is not None):
            return True
        if any((values[number].grad is not None) != had for number, had in guards.had_gradient.items()):
            return True
        if not guards.agree(self._gradients, values):
            return True
        try:
            guards.check_side_effects(arguments, values)
        except InputMismatchError:
            return True
        return False


def _equal(now: Any, before: Any) -> bool:
    """Whether two values of one type are the same to a program."""
    return type(now) in (int, str) and bool(now == before)
