"""The inputs of an exported graph: which are state, under which names, with which values.

Invariant: the order is that of ``torch.export``: parameters, buffers, constants, arguments. Limits: hyperparameters
that are numbers are constants of the graph, unless the program changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from functionalize._torch.exporting import STATE_KINDS
from functionalize.backends.export.signature.state import Arguments, ExportInput, attribute_paths, copied
from functionalize.backends.export.signature.steady import Exportable
from functionalize.backends.preparation.shared_memory import passed_state
from functionalize.graph_capture.inputs.inputs import fresh_name
from functionalize.python_state.slots import NumberSlot
from functionalize.runtime.metadata import GraphInput


class ExportInputs:
    """All inputs of one exported graph."""

    def __init__(self, found: Exportable, arguments: Arguments) -> None:
        self._found, self._metadata = found, found.program.metadata
        self._arguments, self._bound = arguments, arguments.objects
        self._taken = {entry.name for entry in self._metadata.inputs}
        self.numbers: dict[int, Any] = {}  # inputs of the program that are constants here
        changing = {one.input for one in found.effects.rebindings} | {one.input for one in self._metadata.mutations}
        self.passed = passed_state(found.program.capture.guards.aliasing, self._metadata, self._bound)
        taken = [number for number in sorted({*self._metadata.taken, *changing}) if number not in self.passed]
        state = [one for n in taken if (one := self._state(n, n in changing)) is not None]
        state += self._new_gradients({one.number for one in state})
        paths = attribute_paths([one.target or one.name for one in state])
        for one, path in zip(state, paths, strict=True):
            one.target = path
        state.sort(key=lambda one: STATE_KINDS.index(one.kind))
        user = arguments.inputs(lambda path: fresh_name(path, self._taken), self._metadata.inputs)
        self.all = [*state, *user]
        self.by_number = {one.number: one for one in self.all if one.number is not None}
        self.by_number |= {state: self.by_number[argument] for state, argument in self.passed.items()}

    def _state(self, number: int, changes: bool) -> ExportInput | None:
        entry, value = self._metadata.inputs[number], self._found.inputs[number]
        if entry.argument is not None:
            if number not in self._bound:
                return None
            path = entry.name
            return ExportInput(InputKind.BUFFER, entry.name, path, self._bound[number], True, number)
        if isinstance(entry.slot, NumberSlot) and not changes:
            self.numbers[number] = value
            return None
        if not entry.is_tensor:
            self.numbers[number] = entry.constant
            return None
        if entry.gradient_of is not None:
            of = self._metadata.inputs[entry.gradient_of]
            value = torch.zeros_like(self._found.inputs[entry.gradient_of]) if value is None else value
            return ExportInput(InputKind.BUFFER, entry.name, gradient_target(of), value.detach(), False, number)
        kind = InputKind.BUFFER if changes and entry.kind is InputKind.CONSTANT_TENSOR else entry.kind
        persistent = (entry.persistent is None or entry.persistent) if kind is InputKind.BUFFER else None
        if kind is InputKind.BUFFER and number in self._found.made:
            persistent = True
        if kind is InputKind.PARAMETER and entry.part is not None:
            trained = self._found.inputs[entry.part.wrapper].requires_grad and value.is_floating_point()
            value = torch.nn.Parameter(value, trained)
        return ExportInput(kind, entry.name, entry.target, value, persistent, number)

    def _new_gradients(self, known: set[int | None]) -> list[ExportInput]:
        """Buffers for gradients that the program leaves and never reads."""
        inputs, found = self._metadata.inputs, []
        read = {inputs[n].gradient_of for n in known if n is not None}
        for number, gradient in self._metadata.gradients.items():
            entry = inputs[number]
            if gradient is None or number in read or entry.argument is not None:
                continue
            name = fresh_name(f"b_{gradient_target(entry)}", self._taken)
            value = torch.zeros_like(self._found.inputs[number]).detach()
            found.append(ExportInput(InputKind.BUFFER, name, gradient_target(entry), value, False))
        return found

    def is_argument(self, name: str) -> bool:
        """Whether an input is an argument here as well: objects are bound."""
        return any(one.name == name and one.kind is InputKind.USER_INPUT for one in self.all)

    def gradient(self, number: int) -> ExportInput | None:
        """The buffer of an input's gradient."""
        entries = enumerate(self._metadata.inputs)
        taken = next((n for n, e in entries if e.gradient_of == number and n in self.by_number), None)
        if taken is not None:
            return self.by_number[taken]
        (path,) = attribute_paths([gradient_target(self._metadata.inputs[number])])
        named = (one for one in self.all if one.number is None and one.name.startswith("b_"))
        return next((one for one in named if one.target == path), None)

    def settle(self, written: Mapping[str, Any], *, trains: bool) -> None:
        """Copy the values of what is written; ``trains``: no parameter requires gradients, as these are taken inside.

        ``written``: by the names of inputs.
        """
        state = [one for one in self.all if one.target is not None]
        changing = [one for one in state if one.name in written and one.number not in self._found.made]
        replaced = {one.input for one in self._found.effects.rebindings} - {m.input for m in self._metadata.mutations}
        for one in changing:
            if one.number in replaced:  # by another tensor: what shares memory with the old one keeps it
                one.value = one.value.detach().clone()
        keys = {_storage(one.value) for one in changing}
        moved = [one for one in state if _storage(one.value) in keys]  # with those that share memory with one
        for one, value in zip(moved, copied(one.value for one in moved), strict=True):
            one.value = torch.nn.Parameter(value, False) if one.kind is InputKind.PARAMETER else value
        for one in state:
            if one.kind is InputKind.PARAMETER and not isinstance(one.value, torch.nn.Parameter):
                one.value = torch.nn.Parameter(one.value.detach(), one.value.requires_grad)
            if one.kind is InputKind.PARAMETER and trains and one.value.requires_grad:
                one.value = torch.nn.Parameter(one.value.detach(), False)
            elif one.kind is not InputKind.PARAMETER:
                one.value = one.value.detach()


def gradient_target(entry: GraphInput) -> str:
    """The path of the buffer for the gradient that a call leaves at a parameter."""
    return f"{entry.target or entry.name}_grad"


def _storage(value: torch.Tensor) -> int:
    key = value.untyped_storage().data_ptr() if value.layout is torch.strided else 0
    return key or id(value)
