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
        self._guards = guards
        self._kinds, self._structure = arguments.kinds, None if arguments.flat else arguments.structure
        self._modes, self._settings = ModeCheck(), SettingsCheck(guards.settings)
        self._constants = [
            (position, leaf) for position, leaf in enumerate(arguments.leaves) if not isinstance(leaf, torch.Tensor)
        ]
        entries = list(enumerate(guards.inputs))
        self._numbers = [n for n, e in entries if e.gradient_of is None and isinstance(values[n], torch.Tensor)]
        self._gradients = [n for n, e in entries if e.gradient_of is not None]
        tensors = [values[number] for number in self._numbers]
        strided = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)
        self._looks = TensorGuards(*tensors, **self._sizes(tensors)) if strided and tensors else None
        self._usable = strided
        self._storages = len({storage_key(tensor) for tensor in tensors})
        self._dynamic = [number for number in self._numbers if number in guards.dynamic]
        self._known_sizes = self._dynamic_sizes(values)

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
        leaves, guards = arguments.leaves, self._guards
        if self._constants and not all(leaves[position] is value for position, value in self._constants):
            return None
        if not self._settings.passes():
            return None
        values = guards.values(arguments)
        tensors = [values[number] for number in self._numbers]
        if self._looks is not None and not self._looks.check(*tensors):
            return None
        return values if self._lie_alike(tensors, values) and self._autograd_agrees(arguments, values) else None

    def _lie_alike(self, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> bool:
        if self._dynamic and self._dynamic_sizes(values) != self._known_sizes:
            return False
        if self._storages == len(tensors):
            return len({storage_key(tensor) for tensor in tensors}) == len(tensors)
        return self._guards.pattern(values) == self._guards.aliasing

    def _autograd_agrees(self, arguments: CallArguments, values: Sequence[Any]) -> bool:
        guards = self._guards
        if any(values[number].storage_offset() != offset for number, offset in guards.offsets.items()):
            return False
        if any(values[number].is_leaf != leaf for number, leaf in guards.leaves.items() if values[number] is not None):
            return False
        if any((values[number].grad is not None) != had for number, had in guards.had_gradient.items()):
            return False
        if not guards.agree(self._gradients, values):
            return False
        if guards.metadata.side_effects:
            try:
                guards.check_side_effects(arguments, values)
            except InputMismatchError:
                return False
        return True
