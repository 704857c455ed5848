"""What a program leaves in objects, as new values of the tensors and numbers that were there.

A call of a program gives an attribute another tensor (`self.h = h`); an exported one has no attributes, and writes the
new value over the old one. Both are the same to whoever reads the attribute.

Invariant: each entry that a program changes is a tensor or a number that the graph takes, or a cause. Limits: places
where a tensor of the same size and dtype was before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.backends.export.signature.shared_places import GraphValue, Place, SharedPlaces, place_in
from functionalize.backends.preparation.example_call import ExampleCall
from functionalize.errors import UnsupportedExportError
from functionalize.python_state.containers import ABSENT, MAPPINGS, assign, copy_of, unchanged
from functionalize.python_state.reconstruct import Maker, Walked
from functionalize.python_state.slots import NumberSlot, Slot, is_number
from functionalize.python_state.snapshot import frozen, same
from functionalize.python_state.walk import StateWalk, joined
from functionalize.runtime.metadata import AliasKind, ProgramMetadata
from functionalize.runtime.outputs.side_effects import SideEffect
from functionalize.uninterrupted import uninterrupted

_OF_STATE = (
    "the state of an exported program consists of tensors of fixed sizes, without Python objects",
    "keep it in a tensor of a fixed size (register_buffer), or return it",
)
_OF_ARGUMENTS = (
    "an exported program can write to the tensors of its arguments, but not change their containers",
    "return the new values, and change the container outside the program",
)


@dataclass(frozen=True)
class Rebinding:
    """An input of a program that is another tensor, or another number, after a call."""

    input: int
    value: GraphValue


class Substitutes:
    """A maker of what a call leaves and returns, with substitutes for tensors and numbers."""

    def __init__(self, call: ExampleCall) -> None:
        metadata = call.program.metadata
        self.inputs = call.inputs
        self.states: list[Walked] = [call.program.capture.state, call.arguments]
        self._metadata, self._markers = metadata, dict[int, torch.Tensor]()
        self.of_marker: dict[int, GraphValue] = {}
        results = [GraphValue(result=position) for position in range(metadata.graph.outputs)]
        self.maker = Maker(self.states, self._tensor, results, metadata.graph.numbers)

    def _tensor(self, number: int) -> torch.Tensor:
        alias = self._metadata.outputs[number]
        if alias.kind is AliasKind.INPUT and alias.input is not None:
            found: torch.Tensor = self.inputs[alias.input]
            return found
        if number not in self._markers:
            made = self._markers[number] = torch.empty(0)
            self.of_marker[id(made)] = GraphValue(alias=number)
        return self._markers[number]


@contextlib.contextmanager
def applied(effects: Sequence[SideEffect], states: Sequence[Walked], maker: Maker) -> Iterator[None]:
    """While objects are as a call leaves them, of what a maker makes."""
    containers = [source.container for state in states for source in state.containers.values()]
    before = [(container, copy_of(container)) for container in containers]
    try:
        for effect in effects:
            effect.apply(states, maker)
        yield
    finally:

        def put_back() -> None:
            for container, content in before:
                if not unchanged(container, content):
                    assign(container, content)

        uninterrupted(put_back)


class EffectReader:
    """Reads the side effects of one program."""

    def __init__(self, call: ExampleCall) -> None:
        self._metadata: ProgramMetadata = call.program.metadata
        self._of_caller, self._reasons = call.containers_of_caller, _OF_STATE
        self._substitutes = Substitutes(call)
        self._numbers = call.numbers
        self._slots = [(n, e.slot) for n, e in enumerate(self._metadata.inputs) if isinstance(e.slot, NumberSlot)]
        self._left: dict[Place, torch.Tensor] = {}  # what a call leaves at a place
        self.rebindings: list[Rebinding] = []
        self.constants: list[str] = []  # numbers that are none of the graph's inputs, and change
        self.causes: list[str] = []
        for effect in self._metadata.side_effects:
            self._read(effect)
        places = SharedPlaces(call, self._left, self._substitutes.of_marker) if self.rebindings else None
        self.parted = [] if places is None else places.parted
        self.mixed = [] if places is None else places.causes  # causes as well
        self.causes += self.mixed

    def _read(self, effect: SideEffect) -> None:
        states = self._substitutes.states
        container = effect.container_in(states)
        self._reasons = _OF_ARGUMENTS if effect.state and id(container) in self._of_caller else _OF_STATE
        if effect.last and effect.order:
            self._refuse(effect.path, "a dict whose entries change their order in each call")
        if effect.adds:
            self._refuse(effect.path, "a list that gets longer with each call")
            return
        for key in effect.removed:
            self._refuse(joined(effect.path, key), "an entry that a call removes from its container")
        now, make = copy_of(container), self._substitutes.maker.make
        if not isinstance(container, MAPPINGS):
            items = [make(item) for item in effect.entries.values()]
            if len(items) != len(now):
                self._refuse(effect.path, "a container whose length changes in each call")
                return
            changes = list(zip(range(len(now)), now, items, strict=True))
        else:
            made = [(make(key), make(part)) for key, part in effect.entries.items()]
            changes = [(key, now.get(key, ABSENT), item) for key, item in made]
        for key, before, after in changes:
            self._compare(container, key, before, after, joined(effect.path, key))

    def _compare(self, container: Any, key: Any, before: Any, after: Any, path: str) -> None:
        old, new, holder = StateWalk(), StateWalk(), [before]
        old.walk(holder, 0, path)
        new.walk([after], 0, path)
        if before is ABSENT:
            self._refuse(path, "an entry that a call adds")
            return
        if len(old.tensors) != len(new.tensors) or len(old.constants) != len(new.constants):
            self._refuse(path, "an object whose structure changes in a call")
            return
        for one, other in zip(old.tensors, new.tensors, strict=True):
            where = (container, key) if one.container is holder else (one.container, one.key)
            self._left[place_in(*where, one.steps)] = other.get()
            self._pair_tensors(one.get(), other.get(), other.path)
        for one, other in zip(old.constants, new.constants, strict=True):
            steps = (one.key, *one.steps) if one.container is before else one.steps
            found = (container, key) if one.container is holder or one.container is before else (one.container, one.key)
            self._pair_constants(one, other.get(), (*found, steps))

    def _pair_tensors(self, before: torch.Tensor, after: torch.Tensor, path: str) -> None:
        number = self._numbers.get(id(before))
        if before is after:
            return
        value = self._substitutes.of_marker.get(id(after))
        if value is None:
            other = self._numbers.get(id(after))
            aliases = enumerate(self._metadata.outputs)
            kind = AliasKind.INPUT
            value = next((GraphValue(alias=n) for n, a in aliases if a.kind is kind and a.input == other), None)
        if number is None or value is None or value.alias is None:
            self._refuse(path, "a tensor that is not an input of the graph")
            return
        layout = self._metadata.outputs[value.alias].layout
        known = self._metadata.layouts_before.get(number)
        size = tuple(before.size()) if known is None else tuple(known.size)
        if tuple(layout.size) != size or layout.dtype != before.dtype:
            was, now = f"{list(size)} of {before.dtype}", f"{list(layout.size)} of {layout.dtype}"
            self._refuse(path, f"a tensor whose size or dtype changes: from {was} to {now}")
            return
        self.rebindings.append(Rebinding(number, value))

    def _pair_constants(self, before: Slot, after: Any, place: tuple[Any, Any, tuple[int, ...]]) -> None:
        """``place``: as slots of numbers have places, which know the numbers of a list by the list's."""
        if isinstance(after, GraphValue):
            container, key, steps = place
            for number, slot in self._slots:
                if slot.container is container and slot.key == key and slot.steps == steps:
                    self.rebindings.append(Rebinding(number, after))
                    return
            if is_number(before.get()):
                self.constants.append(before.path)
        elif same(frozen(after, {}), frozen(before.get(), {})):
            return
        self._refuse(before.path, "a Python value that the program changes")

    def _refuse(self, path: str, what: str) -> None:
        why, hint = self._reasons
        self.causes.append(UnsupportedExportError.cause(f"`{path}` is {what}", why=why, hint=hint))


def changed_entries(call: ExampleCall) -> Iterator[SideEffect]:
    """The side effects of a program whose entries are no longer, or not yet, as it found them."""
    substitutes = Substitutes(call)
    for effect in call.program.metadata.side_effects:
        container = effect.container_in(substitutes.states)
        now = copy_of(container)
        for name, before in effect.before.items():
            key = substitutes.maker.make(name)
            found = now.get(key, ABSENT) if isinstance(now, dict) else (now[key] if key < len(now) else ABSENT)
            if not before.is_found(found, substitutes.states):
                yield effect
                break
