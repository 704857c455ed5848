"""Guards on the nesting of a call's arguments and on their plain values, and the sources of a program's inputs.

Invariant: arguments that pass have leaves wherever the program takes an input. Limits: tensors are compared by other
guards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from functionalize._torch.subclasses.wrappers import plain_part
from functionalize.errors import InputMismatchError
from functionalize.python_state.snapshot import frozen, same
from functionalize.runtime.arguments import CallArguments, base_of
from functionalize.runtime.guards.guard import CallInputs, FastCode, Guard, GuardKind, mismatch
from functionalize.runtime.metadata import GraphInput


class ArgumentStructure(GuardKind):
    """The nesting of arguments, and their types."""

    def __init__(self, arguments: CallArguments, inputs: Sequence[GraphInput]) -> None:
        self._expected = arguments.structure
        self._taken = {entry.argument for entry in inputs}

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        if call.arguments.structure == self._expected:
            return None
        return InputMismatchError(
            "the arguments are nested differently than when the program was captured",
            hint="pass containers of the same types and lengths, or capture again",
        )

    def write(self, code: FastCode) -> None:
        arguments = code.call.arguments
        if not arguments.flat:
            code.head.refuse("arguments.kinds != kinds", kinds=arguments.kinds)
            code.head.refuse("arguments.structure != structure", structure=arguments.structure)
        for index, leaf in enumerate(arguments.leaves):
            # Other guards compare the properties of inputs and the values of plain arguments.
            if isinstance(leaf, torch.Tensor) and index not in self._taken:
                code.body.refuse(f"type(leaves[{index}]) is not {code.body.name('type', type(leaf))}")


class ArgumentValues(GuardKind):
    """The plain values among the arguments."""

    def __init__(self, arguments: CallArguments) -> None:
        self._expected = [(slot.path, frozen(slot.get(), {})) for slot in arguments.walk.constants]

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for slot, (path, before) in zip(call.arguments.walk.constants, self._expected, strict=True):
            now = slot.get()
            if not same(frozen(now, {}), before):
                return mismatch(f"the argument `{path}`", now, before)
        return None

    def write(self, code: FastCode) -> None:
        for index, leaf in enumerate(code.call.arguments.leaves):
            if not isinstance(leaf, torch.Tensor):
                now, before = f"leaves[{index}]", code.body.name("leaf", leaf)
                code.body.refuse(f"{now} is not {before} and not equal({now}, {before})", equal=_equal)

    def listed(self) -> Iterator[Guard]:
        return (Guard(f"the argument `{path}`", "value", value) for path, value in self._expected)


class InputSources:
    """Where a program finds its inputs in a call: among arguments, in objects, as gradients or bases of inputs."""

    def __init__(self, inputs: Sequence[GraphInput]) -> None:
        self._inputs = inputs
        self._state = [(n, entry.slot) for n, entry in enumerate(inputs) if entry.slot is not None]
        self._arguments = [(n, entry.argument) for n, entry in enumerate(inputs) if entry.argument is not None]
        self.gradients = {n: entry.gradient_of for n, entry in enumerate(inputs) if entry.gradient_of is not None}
        self.bases = {n: entry.base_of for n, entry in enumerate(inputs) if entry.base_of is not None}
        self._constants = [entry.constant for entry in inputs]
        self._parts = {n: entry.part for n, entry in enumerate(inputs) if entry.part is not None}

    def values(self, arguments: CallArguments) -> list[Any]:
        """The inputs, in order; None for inputs that are missing."""
        leaves, values = arguments.leaves, self._constants.copy()
        for number, leaf in self._arguments:
            values[number] = leaves[leaf]
        for number, slot in self._state:
            with contextlib.suppress(LookupError, TypeError):
                values[number] = slot.get()
        for number, source in self.gradients.items():
            values[number] = getattr(values[source], "grad", None)
        for number, view in self.bases.items():
            values[number] = base_of(values[view])
        for number, part in self._parts.items():
            values[number] = plain_part(values[part.wrapper], part.path)
        return values

    def write(self, code: FastCode) -> None:
        """Have the fast function read the inputs, without gradients."""
        body = code.body
        taken = [
            f"leaves[{entry.argument}]"
            if entry.argument is not None
            else body.name("constant", entry.constant)
            if entry.slot is None
            else body.place(entry.slot)
            for entry in self._inputs
        ]
        body.attempt([f"inputs = [{', '.join(taken)}]"], "LookupError", "TypeError")
        for number, view in self.bases.items():
            body.lines.append(f"inputs[{number}] = base(inputs[{view}])")
            body.names["base"] = base_of

    def write_gradients(self, code: FastCode) -> None:
        """Have it read the gradients too, once other inputs are known to be tensors."""
        code.body.lines += [f"inputs[{number}] = inputs[{source}].grad" for number, source in self.gradients.items()]


def _equal(now: Any, before: Any) -> bool:
    """Whether two plain values are certainly the same to a program."""
    plain = type(now) in (int, str) or (type(now) is float and now)  # zeros have a sign
    return bool(plain and type(now) is type(before) and now == before)
