"""Whether the inputs of a call are such as the program was captured for.

Invariant: what passes here is computed as the original would. Limits: strides count only where tensors share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize.aliasing.geometry import hint
from functionalize.errors import InputMismatchError, StateMismatchError
from functionalize.runtime.metadata import GraphInput, OutputAlias, ProgramMetadata
from functionalize.runtime.refused_objects import refuse_tensor
from functionalize.runtime.side_effects import ABSENT, TensorRef
from functionalize.runtime.size_guards import SizeGuards
from functionalize.runtime.state_walk import StateWalk, joined

_COMPARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
Pattern = tuple[Any, ...]


class Guards:
    """What a program expects of its inputs, and where it finds them."""

    def __init__(
        self,
        metadata: ProgramMetadata,
        state: StateWalk,
        arguments: StateWalk,
        values: Sequence[Any],
        *,
        sizes: SizeGuards | None,
        gradients_matter: bool,
    ) -> None:
        """``values``: the inputs of the capture; ``gradients_matter``: whether it matters which of them have one."""
        self._metadata, self._inputs, self._state, self._sizes = metadata, metadata.inputs, state, sizes
        self._structure = arguments.shape
        changed = {(effect.state, effect.container) for effect in metadata.side_effects}
        numbers = {identity: number for number, identity in enumerate(state.containers)}
        self._settings = [
            (slot, slot.get())
            for slot in state.constants
            if isinstance(slot.get(), _COMPARED) and (0, numbers[id(slot.container)]) not in changed
        ]
        self._constants = [(slot.path, slot.get()) for slot in arguments.constants]
        self._dynamic = frozenset() if sizes is None else sizes.inputs
        self._expected = [self._look(number, value) for number, value in enumerate(values)]
        self._had_gradient = {
            number: value.grad is not None
            for number, value in enumerate(values)
            if gradients_matter and isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        }
        differentiable = torch.is_grad_enabled()
        self._without_gradient = [
            number
            for number, value in enumerate(values)
            if isinstance(value, torch.Tensor)
            and not (value.requires_grad and differentiable)
            and self._inputs[number].gradient_of is None
        ]
        self._aliasing = alias_pattern([None if i.gradient_of is not None else values[n] for n, i in self._numbered()])

    def _numbered(self) -> Sequence[tuple[int, GraphInput]]:
        return list(enumerate(self._inputs))

    @property
    def inputs_are_disjoint(self) -> bool:
        """Whether no two inputs share memory."""
        return not any(isinstance(entry, tuple) for entry in self._aliasing)

    def inputs(self, arguments: StateWalk) -> list[Any]:
        """The program's inputs for a call, once they have been checked.

        Raises:
            InputMismatchError: the call's inputs differ from those that the program was captured for.
        """
        if arguments.shape != self._structure:
            raise InputMismatchError(
                "the arguments are nested otherwise than those that the program was captured with",
                hint="pass containers of the same types and lengths, or capture again",
            )
        self._check_constants(arguments)
        values = [self._value(entry, arguments) for entry in self._inputs]
        self._find_gradients(values)
        for number, (entry, value, expected) in enumerate(zip(self._inputs, values, self._expected, strict=True)):
            if isinstance(value, torch.Tensor):
                refuse_tensor(value, entry.label)
            if self._look(number, value) != expected and (entry.gradient_of is None or value is not None):
                raise InputMismatchError(
                    f"{entry.label} is {_words(_look(value))}, and was {_words(expected)} when the program was "
                    "captured",
                    hint="pass inputs of the same shapes, dtypes and devices, or capture again",
                )
        self._check_side_effects([self._state, arguments], values)
        if self._sizes is not None:
            self._sizes.check(values)
        pattern = alias_pattern([None if i.gradient_of is not None else values[n] for n, i in self._numbered()])
        if pattern != self._aliasing:
            self._refuse_aliasing(pattern)
        return values

    def _look(self, number: int, value: Any) -> Any:
        """What an input looks like, its sizes left out where they may differ."""
        look = _look(value)
        return (*look[:2], len(look[2])) if number in self._dynamic and look is not None else look

    def _find_gradients(self, values: list[Any]) -> None:
        """Look the gradients up, and whether there are as many as there were."""
        for number, entry in enumerate(self._inputs):
            if entry.gradient_of is not None:
                values[number] = values[entry.gradient_of].grad
        for number, had in self._had_gradient.items():
            if (values[number].grad is not None) != had:
                raise InputMismatchError(
                    f"the gradient of {self._inputs[number].label} is {'not ' if had else ''}there, and was "
                    f"{'' if had else 'not '}when the program was captured",
                    hint="set gradients to None first, as optimizer.zero_grad() does, or capture again",
                )

    def missing_gradients(self, values: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Zeros for the gradients that will be added to and are not there, by input."""
        return {
            number: torch.zeros_like(values[entry.gradient_of])
            for number, entry in enumerate(self._inputs)
            if entry.gradient_of is not None and values[number] is None and number not in self._metadata.unused
        }

    def new_gradients(self, values: Sequence[Any]) -> tuple[bool, ...] | None:
        """Which inputs require gradients, if one does that did not when the program was captured."""
        if not any(values[number].requires_grad for number in self._without_gradient):
            return None
        return tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    def _value(self, entry: GraphInput, arguments: StateWalk) -> Any:
        if entry.argument is not None:
            return arguments.leaves[entry.argument].get()
        return entry.constant if entry.slot is None else entry.slot.get()

    def _check_constants(self, arguments: StateWalk) -> None:
        for slot, wanted in self._settings:
            if slot.get() != wanted:
                raise StateMismatchError(
                    f"`{slot.path}` is {_short(slot.get())}, and was {_short(wanted)} when the program was captured",
                    hint="what is no tensor is part of the program: make it a tensor, or capture again",
                )
        for slot, (path, wanted) in zip(arguments.constants, self._constants, strict=True):
            value = slot.get()
            if isinstance(wanted, _COMPARED) and not (value == wanted or (value != value and wanted != wanted)):
                raise InputMismatchError(
                    f"the argument `{path}` is {value!r}, and was {wanted!r} when the program was captured",
                    hint="what is no tensor is part of the program: pass the same, pass a tensor, or capture again",
                )

    def _check_side_effects(self, states: Sequence[StateWalk], values: Sequence[Any]) -> None:
        """What the program changes must be found as the capture found it."""
        for effect in self._metadata.side_effects:
            container = list(states[effect.state].containers.values())[effect.container][0]
            for name, before in effect.before.items():
                key = values[self._input_of(name)] if isinstance(name, TensorRef) else name
                now = _entry(container, key)
                if now is not before and (not isinstance(before, _COMPARED) or now != before):
                    label = self._inputs[self._input_of(name)].target if isinstance(name, TensorRef) else name
                    raise StateMismatchError(
                        f"`{joined(effect.path, label)}` is {_short(now)}, and was {_short(before)} when captured",
                        hint="the program changes it, and is right for that value only: set it back, or capture again",
                    )

    def _input_of(self, name: TensorRef) -> int:
        alias: OutputAlias = self._metadata.outputs[name.number]
        assert alias.input is not None
        return alias.input

    def _refuse_aliasing(self, pattern: Pattern) -> None:
        for number, (now, before) in enumerate(zip(pattern, self._aliasing, strict=True)):
            if now != before:
                other = self._inputs[(now if isinstance(now, tuple) else before)[0]]
                raise InputMismatchError(
                    f"{self._inputs[number].label} and {other.label} {_relation(now)}, and {_relation(before)} "
                    "when the program was captured",
                    hint="pass tensors that share memory in the same way, or capture with on_guard_failure='recapture'",
                )


def alias_pattern(values: Sequence[Any]) -> Pattern:
    """How tensors share memory: for each its own position, or the first that shares its storage and how they lie."""
    first: dict[int, int] = {}
    pattern: list[Any] = []
    for position, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            pattern.append(None)
            continue
        other = first.setdefault(storage_key(value), position)
        if other == position:
            pattern.append(position)
        else:
            before = values[other]
            start, first_start = (hint(one.storage_offset()) * one.itemsize for one in (value, before))
            strides = tuple(tuple(map(hint, one.stride())) for one in (value, before))
            pattern.append((other, start - first_start, *strides))
    return tuple(pattern)


def _entry(container: Any, key: Any) -> Any:
    if isinstance(container, dict):
        return container.get(key, ABSENT)
    return container[key] if key < len(container) else ABSENT


def _look(value: Any) -> Any:
    return (value.dtype, value.device, tuple(value.size())) if isinstance(value, torch.Tensor) else None


def _words(look: Any) -> str:
    if look is None:
        return "no tensor"
    size = f"of {look[2]} dimensions" if isinstance(look[2], int) else f"of size {list(look[2])}"
    return f"a tensor of {look[0]} on {look[1]} {size}"


def _relation(entry: Any) -> str:
    if not isinstance(entry, tuple):
        return "share no memory"
    return f"share memory ({entry[1]} bytes apart, strides {list(entry[2])} and {list(entry[3])})"


def _short(value: Any) -> str:
    return "not there" if value is ABSENT else repr(value)[:60]
