"""The program of later calls: what the first call makes (the state of an optimizer, a cache) is there from the start.

A first call and a later one are two programs, and an exported one is called again and again. So the program is captured
as it is when its state is there, and begins with zeros in its place; where the first call does another thing with
nothing than a later one with zeros, it is refused.

Invariant: objects are afterwards as they were. Limits: what is made is zeros, as far as later calls can tell.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize._torch.autograd import leave_gradient
from functionalize.backends.export.effects import EffectReader, changed_entries
from functionalize.backends.export.example_call import ExampleCall, concrete, with_arguments_apart, with_steps_followed
from functionalize.runtime.captured_program import CapturedProgram
from functionalize.runtime.capturing import CAPTURING
from functionalize.runtime.containers import assign, copy_of, unchanged
from functionalize.runtime.metadata import AliasKind, ProgramMetadata
from functionalize.runtime.objects import Maker
from functionalize.runtime.slots import NumberSlot
from functionalize.runtime.specialization import Specialization


@dataclass(eq=False)
class Exportable:
    """A program for each call from now on."""

    call: ExampleCall
    inputs: list[Any]  # what its graph begins with
    effects: EffectReader
    made: Mapping[int, int] = field(default_factory=dict)  # inputs that the first call makes: as which of its outputs
    first: ExampleCall | None = None  # the program of the first call, if that is another one

    @property
    def program(self) -> Specialization:
        """What was captured."""
        return self.call.program


def exportable(program: CapturedProgram) -> Exportable:
    """What is to be exported of a program."""
    program = with_steps_followed(program)
    program = with_arguments_apart(program, program.current)
    call = ExampleCall(program.current)
    moved = any(changed_entries(call)) or _got_gradients(call)  # by a call
    begins = call.program.guards.changes_gradients
    if not (call.program.metadata.side_effects or begins or moved):
        return Exportable(call, call.inputs, EffectReader(call))
    if not (moved or begins):
        effects = EffectReader(call)
        if not effects.causes:
            return Exportable(call, call.inputs, effects)
    simulated = contextlib.nullcontext(dict[int, int]()) if moved else _after_first(call)
    with CAPTURING, simulated as made:
        later = ExampleCall(program.captured_like(call.args, call.kwargs))
        later_inputs = later.inputs
        found = EffectReader(later)
    fresh = {number: made[id(value)] for number, value in enumerate(later_inputs) if id(value) in made}
    if not moved:
        later_inputs = _numbers_as_before(later, later_inputs)
    return Exportable(later, later_inputs, found, fresh, None if moved else call)


def _got_gradients(call: ExampleCall) -> bool:
    """Whether other tensors have gradients now than when the program was captured, and it is another one then."""
    had = call.program.guards.had_gradient
    return any((call.inputs[number].grad is not None) is not given for number, given in had.items())


def _numbers_as_before(call: ExampleCall, inputs: list[Any]) -> list[Any]:
    """Numbers of state as they are now that what the first call does to them is undone."""
    slots = [entry.slot for entry in call.program.metadata.inputs]
    pairs = zip(slots, inputs, strict=True)
    return [slot.get() if isinstance(slot, NumberSlot) else value for slot, value in pairs]


@contextlib.contextmanager
def _after_first(call: ExampleCall) -> Iterator[dict[int, int]]:
    """While objects are as a first call leaves them, with zeros for the tensors that it makes: whose these are, by
    identity.
    """
    metadata: ProgramMetadata = call.program.metadata
    states: list[Any] = [call.program.capture.state, call.arguments]
    made: dict[int, int] = {}
    values, looks = call.inputs, _results(call)
    results = list(map(_number, looks))

    @functools.cache
    def tensor(number: int) -> torch.Tensor:
        alias = metadata.outputs[number]
        if alias.kind is AliasKind.INPUT and alias.input is not None:
            found: torch.Tensor = values[alias.input]
            return found
        look = looks[alias.result].meta["val"]  # type: ignore[index]
        zeros = torch.zeros(list(map(concrete, look.size())), dtype=look.dtype, device=look.device)
        made[id(zeros)] = number
        return zeros

    containers = [container for state in states for container, _ in state.containers.values()]
    before = [(container, copy_of(container)) for container in containers]
    gradients = [(values[number], values[number].grad) for number in metadata.gradients]
    maker = Maker(states, tensor, results, metadata.graph.numbers)
    try:
        for effect in metadata.side_effects:
            effect.apply(states, maker)
        for number, output in metadata.gradients.items():
            leave_gradient(values[number], None if output is None else tensor(output))
        yield made
    finally:
        for value, gradient in gradients:
            leave_gradient(value, gradient)
        for container, content in before:
            if not unchanged(container, content):
                assign(container, content)


def _results(call: ExampleCall) -> list[Any]:
    results: Any = call.program.recorded.graph.output_node().args[0]
    return list(results)


def _number(node: Any) -> Any:
    """A number that is left: any other than before will do, so that it counts as one that changes."""
    value = node.meta.get("val") if hasattr(node, "meta") else node
    if isinstance(value, torch.SymFloat):
        return 0.5
    return 1 if isinstance(value, torch.SymInt) else value
