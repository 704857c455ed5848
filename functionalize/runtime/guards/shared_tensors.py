"""Guards on which slots of a program's state hold the same tensor, and on tensors that are not inputs.

A call reads a tensor from the first slot where the capture found it. If another slot holds another tensor by then, the
call would not see that. A tensor that the graph does not use is not an input; yet the program may ask whether it
exists, for its class, and whether it is the same as another one.

Invariant: only identities and classes are compared. Limits: slots of state; sets have members instead of slots;
gradients are left out.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from functionalize.errors import InputMismatchError, StateMismatchError
from functionalize.python_state.containers import ABSENT, SetItems
from functionalize.python_state.slots import Slot
from functionalize.python_state.traversal_rules import key_behind
from functionalize.python_state.walk import StateWalk
from functionalize.runtime.guards.guard import WHEN, CallInputs, FastCode, GuardKind, containers_of
from functionalize.runtime.metadata import ProgramMetadata

_PUT_BACK = "restore the previous objects, or capture again"


class SharedTensors(GuardKind):
    """The further slots of inputs, and the slots of tensors that are not inputs."""

    def __init__(self, metadata: ProgramMetadata, values: Sequence[Any], state: StateWalk, *, kinds: bool) -> None:
        """``kinds``: whether the program may ask for the classes of tensors."""
        inputs, logs = metadata.inputs, _logs(metadata, state)
        self._inputs = inputs
        self._numbers = [n for n, entry in enumerate(inputs) if entry.is_tensor and entry.gradient_of is None]
        numbers = {id(values[n]): n for n in reversed(self._numbers)}
        numbers |= {id(values[n]): n for n in reversed(self._numbers) if inputs[n].slot is not None}
        self._places = list[tuple[Slot, int]]()
        others = dict[int, list[Slot]]()
        values_of_slots = [(slot, slot.get()) for slot in state.tensors]
        for slot, value in values_of_slots:
            if type(slot.source.container) is SetItems:
                continue
            number = numbers.get(id(value))
            if id(slot.container) in logs:
                continue
            if number is None:
                others.setdefault(id(value), []).append(slot)
            elif slot is not inputs[number].slot:
                self._places.append((slot, number))
        self._others = [(slots, type(slots[0].get())) for slots in others.values()]
        self._kinds = [(n, type(values[n])) for n in self._numbers if kinds and inputs[n].slot is not None]
        self._members = [
            (slot.container, numbers[id(value)])
            for slot, value in values_of_slots
            if type(slot.source.container) is SetItems and id(value) in numbers
        ]
        self._keyed = list(state.keyed_by_tensor)
        self._expected = self._identities(values) if self._others or self._keyed else _Identities([], [])

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        return self._input_failure(call) or self._other_failure(call.values, bool(call.examples))

    def write(self, code: FastCode) -> None:
        body, places, members = code.body, self._places, self._members
        lines = [f"if {body.place(slot)} is not inputs[{number}]: return None" for slot, number in places]
        lines += [
            f"if not {body.name('holds', items.holds)}(inputs[{number}]): return None" for items, number in members
        ]
        body.attempt(lines, "LookupError", "TypeError")
        if self._others or self._keyed:
            body.refuse("others(inputs) is not None", others=self._other_failure)

    def _input_failure(self, call: CallInputs) -> StateMismatchError | None:
        values = call.values
        for items, number in self._members:
            if number not in call.examples and not items.holds(values[number]):
                return StateMismatchError(
                    f"{self._inputs[number].label} is not in a set that contained it {WHEN}",
                    hint="put it into the set again, or capture again",
                    containers=[items],
                )
        for slot, number in self._places:
            if number not in call.examples and slot.found() is not values[number]:
                return self._no_longer_same(self._inputs[number].label, self._inputs[number].slot or slot, slot)
        for number, expected in self._kinds:
            value = values[number]
            if number not in call.examples and value is not None and type(value) is not expected:
                return _other_kind(self._inputs[number].label, self._inputs[number].slot, value, expected)
        return None

    def _other_failure(self, values: Sequence[Any], are_examples: bool = False) -> StateMismatchError | None:
        """The failure for tensors that are not inputs, for keys, and for which tensors are the same."""
        for (first, *rest), expected in self._others:
            now = first.found()
            if type(now) is not expected:
                return _other_kind(f"`{first.path}`", first, now, expected)
            for slot in rest:
                if slot.found() is not now:
                    return self._no_longer_same(f"`{first.path}`", first, slot)
        if are_examples or not (self._others or self._keyed):
            return None
        now, before = self._identities(values), self._expected
        if now == before:
            return None
        places = [self._inputs[n].slot for n in self._numbers] + [slots[0] for slots, _ in self._others]
        triples = zip(places, [*now.firsts, *now.keys], [*before.firsts, *before.keys], strict=False)
        place = next((slot for slot, this, that in triples if this != that and slot is not None), None)
        what = "an attribute or item of the program's state" if place is None else f"`{place.path}`"
        return StateMismatchError(
            f"{what} shares its tensor with other attributes, items or keys of containers than when the program "
            "was captured",
            hint=_PUT_BACK,
            containers=containers_of(place),
        )

    def _no_longer_same(self, label: str, first: Slot, slot: Slot) -> StateMismatchError:
        return StateMismatchError(
            f"`{slot.path}` and {label} were the same tensor {WHEN}, and are not any more",
            hint="assign one tensor to both again, or capture again",
            containers=containers_of(first, slot),
        )

    def _identities(self, values: Sequence[Any]) -> _Identities:
        tensors = [*(values[n] for n in self._numbers), *(slots[0].found() for slots, _ in self._others)]
        first = dict[int, int]()
        firsts = [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]
        keyed = [map(key_behind, keys) for keys in self._keyed]
        return _Identities(firsts, [{first[id(key)] for key in keys if id(key) in first} for keys in keyed])


@dataclass(frozen=True)
class _Identities:
    """Which tensors are the same object, by number."""

    firsts: list[int]  # for each tensor, the first that is the same
    keys: list[Set[int]]  # for each container with tensors for keys, which of these tensors are keys


def _other_kind(label: str, slot: Slot | None, now: Any, expected: type) -> StateMismatchError:
    what = "not there" if now is ABSENT else f"a {type(now).__name__}"
    return StateMismatchError(
        f"{label} is {what}, and was a {expected.__name__} {WHEN}", hint=_PUT_BACK, containers=containers_of(slot)
    )


def _logs(metadata: ProgramMetadata, state: StateWalk) -> set[int]:
    """The identities of the lists to which a program only appends, without reading their items."""
    effects = (effect for effect in metadata.side_effects if effect.state == 0 and effect.adds)
    return {id(effect.container_in([state])) for effect in effects}
