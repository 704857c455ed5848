"""Guards on what autograd knows of the inputs: who requires gradients, who has one, who is a leaf, how gradients lie.

Invariant: what backward accumulates into is what the capture found. Limits: a gradient that is missing has no
properties; whether it may be missing is for :class:`GradientPresence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from functionalize._torch import LEAF
from functionalize.errors import GradientMismatchError, InputMismatchError
from functionalize.runtime.guards.guard import WHEN, CallInputs, FastCode, Guard, GuardKind
from functionalize.runtime.guards.tensors import REQUIRES_GRAD, STRIDES_AT, TensorProperties, property_mismatch
from functionalize.runtime.metadata import GraphInput


class GradientProperties(TensorProperties):
    """The properties of inputs that are gradients, where they are there; their strides are for another guard."""

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        absent = {number for number in self._expected if call.values[number] is None}
        if absent:
            call = CallInputs(call.arguments, call.values, call.examples | absent)
        return super().failure(call)

    def write(self, code: FastCode) -> None:
        code.refuse_failing(self)

    def listed(self) -> Iterator[Guard]:
        return iter(())

    def _read(self, number: int, value: Any) -> list[Any] | None:
        properties = super()._read(number, value)
        if properties is not None:
            properties[STRIDES_AT] = None
        return properties


class GradientPresence(GuardKind):
    """Which inputs have a gradient."""

    def __init__(self, inputs: Sequence[GraphInput], had_gradient: Mapping[int, bool]) -> None:
        self._inputs, self._had = inputs, had_gradient

    @property
    def is_empty(self) -> bool:
        return not self._had

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for number, had in self._had.items():
            if number not in call.examples and (call.values[number].grad is not None) != had:
                return GradientMismatchError(
                    f"{self._inputs[number].label} has {'no' if had else 'a'} gradient, and had "
                    f"{'one' if had else 'none'} {WHEN}",
                    hint="set gradients to None before the call, as optimizer.zero_grad() does, or capture again",
                )
        return None

    def listed(self) -> Iterator[Guard]:
        return (Guard(self._inputs[number].label, "has a gradient", had) for number, had in self._had.items())


class RequiresGrad(GuardKind):
    """Which inputs require gradients."""

    def __init__(self, inputs: Sequence[GraphInput], values: Sequence[Any]) -> None:
        self._inputs = inputs
        self._expected = {n: value.requires_grad for n, value in enumerate(values) if isinstance(value, torch.Tensor)}

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for number, before in self._expected.items():
            value = call.values[number]
            if value is not None and value.requires_grad != before and number not in call.examples:
                entry = self._inputs[number]
                return property_mismatch(entry, REQUIRES_GRAD, value.requires_grad, before, GradientMismatchError)
        return None

    def write(self, code: FastCode) -> None:
        if any(self._inputs[number].gradient_of is not None for number in self._expected):
            code.refuse_failing(self)  # of other inputs the lines of TensorProperties compare it

    def listed(self) -> Iterator[Guard]:
        for number, requires in self._expected.items():
            if self._inputs[number].gradient_of is None:
                yield Guard(self._inputs[number].label, REQUIRES_GRAD, requires)


class Leaves(GuardKind):
    """Which inputs are leaves, of those where it matters."""

    def __init__(self, inputs: Sequence[GraphInput], leaves: Mapping[int, bool]) -> None:
        self._inputs, self._leaves = inputs, leaves

    @property
    def is_empty(self) -> bool:
        return not self._leaves

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for number, before in self._leaves.items():
            value = call.values[number]
            if value is not None and value.is_leaf != before and number not in call.examples:
                return property_mismatch(self._inputs[number], LEAF, value.is_leaf, before, GradientMismatchError)
        return None

    def listed(self) -> Iterator[Guard]:
        return (Guard(self._inputs[number].label, LEAF, leaf) for number, leaf in self._leaves.items())


class GradientLayouts(GuardKind):
    """How gradients lie in memory. The stride of a dimension with one position does not count."""

    def __init__(self, inputs: Sequence[GraphInput], gradients: Mapping[int, torch.Tensor], offsets: Set[int]) -> None:
        """``offsets``: those of which it matters where they begin."""
        self._inputs, self._offsets = inputs, offsets
        self._expected = {number: self._layout(number, gradient) for number, gradient in gradients.items()}

    @property
    def is_empty(self) -> bool:
        return not self._expected

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for number, before in self._expected.items():
            now = before if call.values[number] is None else self._layout(number, call.values[number])
            if now != before and number not in call.examples:
                return property_mismatch(self._inputs[number], "memory layout", now, before, GradientMismatchError)
        return None

    def _layout(self, number: int, gradient: torch.Tensor) -> Any:
        if gradient.layout is not torch.strided or gradient.is_nested:
            return gradient.layout
        pairs = zip(gradient.stride(), gradient.size(), strict=True)
        strides = tuple(stride for stride, size in pairs if size > 1)
        return (strides, gradient.storage_offset()) if number in self._offsets else strides
