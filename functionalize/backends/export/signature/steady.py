"""The program of later calls: what the first call makes (the state of an optimizer, a cache) is there from the start.

A first call and a later one are two programs, and an exported one is called again and again. So the program is captured
as it is when its state is there. It begins with zeros in its place, or, where later calls leave it alone, with what the
first call makes of constants and of other state (a table of positions). Where the first call does another thing with
nothing than a later one with these, it is refused.

Invariant: objects are afterwards as they were. Limits: what is made is that, as far as later calls can tell.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from functionalize._torch.autograd import leave_gradient
from functionalize._torch.exporting import STATE_KINDS
from functionalize.backends.export.signature.effects import EffectReader, applied, changed_entries
from functionalize.backends.export.signature.returned import Returned, returned
from functionalize.backends.preparation.example_call import (
    ExampleCall,
    as_called_now,
    concrete,
    no_memory_beyond,
    refuse_schedules,
    with_arguments_apart,
)
from functionalize.errors import UnsupportedProgramError
from functionalize.python_state.containers import ABSENT, entry, write
from functionalize.python_state.reconstruct import Maker
from functionalize.python_state.slots import NumberSlot, Slot
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.capturing import CAPTURING
from functionalize.runtime.metadata import AliasKind, GraphInput, ProgramMetadata
from functionalize.runtime.outputs.side_effects import SideEffect
from functionalize.runtime.random_state import is_random
from functionalize.uninterrupted import uninterrupted


@dataclass(eq=False)
class Exportable:
    """A program for each call from now on."""

    call: ExampleCall
    inputs: list[Any]  # what its graph begins with
    effects: EffectReader
    returned: Returned | None  # where no effect is in the way
    made: Mapping[int, int] = field(default_factory=dict)  # inputs that the first call makes: as which of its outputs
    first: ExampleCall | None = None  # the program of the first call, if that is another one

    @property
    def program(self) -> Specialization:
        """What was captured."""
        return self.call.program


@no_memory_beyond()
def exportable(program: CapturedProgram, to: str) -> Exportable:
    """What is to be exported of a program; ``to``: what messages call the backend."""
    program = as_called_now(program)
    refuse_schedules(program, to)
    program = with_arguments_apart(program, program.current)
    call = ExampleCall(program.current)
    effects = EffectReader(call)
    if effects.mixed:
        return Exportable(call, call.inputs, effects, None)
    if not effects.parted:
        return _exportable(program, call, effects)
    with CAPTURING, _parted(effects.parted):
        apart = ExampleCall(program.captured_like(call.args, call.kwargs))
        return _exportable(program, apart, EffectReader(apart))


def _exportable(program: CapturedProgram, call: ExampleCall, effects: EffectReader) -> Exportable:
    moved = any(changed_entries(call)) or _got_gradients(call)  # by a call
    begins = call.program.guards.changes_gradients
    if not (moved or begins or effects.causes):
        return Exportable(call, call.inputs, effects, returned(call))
    simulated = contextlib.nullcontext(dict[int, int]()) if moved else _after_first(call)
    with CAPTURING, simulated as made:
        later = ExampleCall(call.program.again(call.arguments.args, call.arguments.kwargs))
        found = EffectReader(later)
        if found.constants:  # which do not change in each call
            again = program.captured_again(call.args, call.kwargs, changing=found.constants)
            later = ExampleCall(again.current)
            found = EffectReader(later)
        later_inputs = later.inputs
        results = None if found.causes else returned(later)
    changing = {one.input for one in later.program.metadata.mutations} | {one.input for one in found.rebindings}
    if not moved:
        later_inputs = _as_before(later, later_inputs, changing)
    fresh = {number: made[id(value)] for number, value in enumerate(later_inputs) if id(value) in made}
    for number in fresh.keys() - changing:
        constant = _of_constants(call, fresh[number])
        if constant is not None:
            later_inputs[number].copy_(constant)
    return Exportable(later, later_inputs, found, results, fresh, None if moved else call)


@contextlib.contextmanager
def _parted(places: Sequence[Slot]) -> Iterator[None]:
    """While places hold copies of their tensors, which other places hold as well."""
    entries = [(slot.container, slot.key, entry(slot.container, slot.key)) for slot in places]
    try:
        for slot in places:
            slot.set(slot.get().clone())
        yield
    finally:

        def put_back() -> None:
            for container, key, value in entries:
                write(container, key, value)

        uninterrupted(put_back)


def _got_gradients(call: ExampleCall) -> bool:
    """Whether other tensors have gradients now than when the program was captured, and it is another one then."""
    had = call.program.guards.had_gradient
    return any((call.inputs[number].grad is not None) is not given for number, given in had.items())


def _as_before(call: ExampleCall, inputs: list[Any], changing: Set[int]) -> list[Any]:
    """Tensors and numbers of state as they are now that what the first call does to them is undone, where there are.

    ``changing``: the inputs that later calls change; a number that the first call makes, and no other changes, stays.
    """
    found = list(inputs)
    for number, (known, value) in enumerate(zip(call.program.metadata.inputs, inputs, strict=True)):
        if isinstance(known.slot, NumberSlot):
            if number in changing or _now(known.slot) is not ABSENT:
                found[number] = _known_number(known.slot)
        elif known.slot is not None and known.gradient_of is None:
            before = known.slot.found()
            if isinstance(before, torch.Tensor) and before.size() == value.size() and before.dtype == value.dtype:
                found[number] = before
    return found


def _known_number(slot: NumberSlot) -> Any:
    try:
        return slot.get()
    except (TypeError, LookupError) as error:
        now = _now(slot)
        said = "not there" if now is ABSENT else repr(now)
        what = f"`{slot.path}` is {said} before the first call, and {_article(slot.kind)} after it"
        if type(now) is slot.kind:
            what = f"the first call changes the length of the list or tuple that contains `{slot.path}`"
        raise UnsupportedProgramError(
            what,
            why="an exported program keeps such a number as a tensor of one dtype from the start",
            hint=f"call the program once before the export, or initialize it with {_article(slot.kind)}",
            at="the program's state",
        ) from error


def _now(slot: NumberSlot) -> Any:
    try:
        return Slot.get(slot)
    except LookupError:
        return ABSENT


def _article(kind: type) -> str:
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


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

    gradients = [(values[number], values[number].grad) for number in metadata.gradients]
    maker = Maker(states, tensor, results, metadata.graph.numbers)
    try:
        with applied(_on_state(call, states), states, maker):
            for number, output in metadata.gradients.items():
                leave_gradient(values[number], None if output is None else tensor(output))
            yield made
    finally:
        for value, gradient in gradients:
            leave_gradient(value, gradient)


def _on_state(call: ExampleCall, states: Sequence[Any]) -> list[SideEffect]:
    """What a call leaves for the next one: not in the containers of its arguments, which each call gets new."""
    containers = [[id(source.container) for source in state.containers.values()] for state in states]
    effects = call.program.metadata.side_effects
    return [one for one in effects if containers[one.state][one.container] not in call.containers_of_caller]


def _results(call: ExampleCall) -> list[Any]:
    results: Any = call.program.recorded.graph.output_node().args[0]
    return list(results)


def _number(node: Any) -> Any:
    """A number that is left: any other than before will do, so that it counts as one that changes."""
    value = node.meta.get("val") if hasattr(node, "meta") else node
    if isinstance(value, torch.SymFloat):
        return 0.5
    return 1 if isinstance(value, torch.SymInt) else value


def _of_constants(call: ExampleCall, output: int) -> Any:
    """What an output of a first call comes to, where that depends on constants alone, and on state that stays.

    Gradients through it to a parameter would be lost: one that requires some has no such value.
    """
    metadata = call.program.metadata
    if metadata.outputs[output].requires_grad:
        return None
    result = _results(call)[metadata.outputs[output].result]  # type: ignore[index]
    written = {one.input for one in metadata.mutations}
    placeholders = call.program.recorded.graph.find_nodes(op="placeholder")
    numbers = dict(zip(placeholders, metadata.taken, strict=True))
    needed, open_ends = set[Node](), [result]
    while open_ends:
        node = open_ends.pop()
        if node in needed:
            continue
        number = numbers.get(node)
        if is_random(node) or (number is not None and (number in written or not _is_state(metadata.inputs[number]))):
            return None
        needed.add(node)
        open_ends += node.all_input_nodes
    values: dict[Node, Any] = {}
    module = call.program.graph_module
    for node in call.program.recorded.graph.nodes:
        if node in needed:
            values[node] = call.inputs[numbers[node]] if node in numbers else _computed(module, node, values)
    return values[result]


def _is_state(entry: GraphInput) -> bool:
    return entry.argument is None and entry.kind in STATE_KINDS


def _computed(module: Any, node: Node, values: Mapping[Node, Any]) -> Any:
    if node.op == "get_attr":
        return attrgetter(str(node.target))(module)
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]
