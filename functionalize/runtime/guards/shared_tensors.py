"""Places of a program's state that held tensors: a call must find tensors there, the same ones in the same places.

A program takes a tensor from the first place where it was found. Where another place holds another tensor by now, it
would be read as that one. A tensor that the graph does not use is no input of it; yet the program may ask whether it is
there, of what class it is, and which other it is.

Invariant: nothing is compared but who is who, and classes. Limits: places of state; sets have no places, only members;
gradients are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

from functionalize.errors import StateMismatchError
from functionalize.python_state.containers import ABSENT, SetItems, place_of
from functionalize.python_state.slots import Slot
from functionalize.python_state.traversal_rules import key_behind
from functionalize.python_state.walk import StateWalk
from functionalize.runtime.metadata import ProgramMetadata

_PUT_BACK = "restore the previous objects, or capture again"


class SharedPlaces:
    """The further places of the inputs, and those of tensors that are no inputs."""

    def __init__(self, metadata: ProgramMetadata, values: Sequence[Any], state: StateWalk, *, kinds: bool) -> None:
        """``kinds``: whether the program may ask for the classes of tensors."""
        inputs, logs = metadata.inputs, _logs(metadata, state)
        self._inputs = inputs
        self.known = [n for n, entry in enumerate(inputs) if entry.is_tensor and entry.gradient_of is None]
        numbers = {id(values[n]): n for n in reversed(self.known)}
        numbers |= {id(values[n]): n for n in reversed(self.known) if inputs[n].slot is not None}
        self.places = list[tuple[Slot, int]]()
        others = dict[int, list[Slot]]()
        for slot, value in _held(state.tensors):
            number = numbers.get(id(value))
            if id(slot.container) in logs:
                continue
            if number is None:
                others.setdefault(id(value), []).append(slot)
            elif slot is not inputs[number].slot:
                self.places.append((slot, number))
        self.others = [(slots, type(slots[0].get())) for slots in others.values()]
        self._kinds = [(n, type(values[n])) for n in self.known if kinds and inputs[n].slot is not None]
        self.members = [(slot.container, numbers[id(value)]) for slot, value in _in_sets(state) if id(value) in numbers]
        self._keyed = list(state.keyed_by_tensor)
        known = [*(values[n] for n in self.known), *(slots[0].get() for slots, _ in self.others)]
        self._found = self._who(known)

    @property
    def is_empty(self) -> bool:
        """Whether all tensors are inputs, and no keys."""
        return not (self.others or self._keyed)

    def check(self, values: Sequence[Any], changed: Callable[[], Set[int]], examples: Set[int]) -> None:
        """Compare the places with a call's inputs; ``changed``: the identities of containers that the program changes.

        ``examples``: inputs that stand for any that a call may pass: which objects these are is not compared.

        Raises:
            StateMismatchError: one holds something else.
        """
        for items, number in self.members:
            if number not in examples and not items.holds(values[number]):
                raise StateMismatchError(
                    f"{self._inputs[number].label} is not in a set that contained it when the program was captured",
                    hint="put it into the set again, or capture again",
                    container=items,
                )
        for slot, number in self.places:
            if number not in examples and slot.found() is not values[number]:
                first = self._inputs[number].slot or slot
                raise _apart(self._inputs[number].label, first, slot, changed)
        for number, kind in self._kinds:
            if number not in examples and values[number] is not None and type(values[number]) is not kind:
                raise _other_kind(self._inputs[number].label, self._inputs[number].slot, values[number], kind)
        self._check_others(values, changed, bool(examples))

    def _check_others(self, values: Sequence[Any], changed: Callable[[], Set[int]], for_examples: bool) -> None:
        for (first, *rest), kind in self.others:
            now = first.found()
            if type(now) is not kind:
                raise _other_kind(f"`{first.path}`", first, now, kind)
            for slot in rest:
                if slot.found() is not now:
                    raise _apart(f"`{first.path}`", first, slot, changed)
        if self.is_empty or for_examples:
            return
        who, found = self._who(self.tensors(values)), self._found
        if who != found:
            places = [self._inputs[n].slot for n in self.known] + [slots[0] for slots, _ in self.others]
            pairs = zip(places, [*who[0], *who[1]], [*found[0], *found[1]], strict=False)
            place = next((one for one, now, before in pairs if now != before and one is not None), None)
            what = "an attribute or item of the program's state" if place is None else f"`{place.path}`"
            raise StateMismatchError(
                f"{what} shares its tensor with other attributes, items or keys of containers than when the program "
                "was captured",
                hint=_PUT_BACK,
                container=None if place is None else place_of(place.container, place.key)[0],
            )

    def differ(self, values: Sequence[Any]) -> bool:
        """Whether the tensors that are no inputs, or keys, are others than they were, to a program."""
        if not all(type(found := slots[0].found()) is kind and _all_are(found, slots) for slots, kind in self.others):
            return True
        return self._who(self.tensors(values)) != self._found

    def tensors(self, values: Sequence[Any]) -> list[Any]:
        """The inputs that are tensors, and the others."""
        return [*(values[n] for n in self.known), *(slots[0].found() for slots, _ in self.others)]

    def _who(self, tensors: Sequence[Any]) -> tuple[list[int], list[Set[int]]]:
        """Of each tensor which is the first that is the same; of each container with such keys which are among them."""
        first = dict[int, int]()
        own = [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]
        keyed = [map(key_behind, keys) for keys in self._keyed]
        return own, [{first[id(key)] for key in keys if id(key) in first} for keys in keyed]


def _all_are(tensor: Any, slots: Iterable[Slot]) -> bool:
    return all(slot.found() is tensor for slot in slots)


def _apart(label: str, first: Slot, slot: Slot, changed: Callable[[], Set[int]]) -> StateMismatchError:
    containers = [place_of(one.container, one.key)[0] for one in (first, slot)]
    return StateMismatchError(
        f"`{slot.path}` and {label} were the same tensor when the program was captured, and are not any more",
        hint="assign one tensor to both again, or capture again",
        container=next((one for one in containers if id(one) in changed()), containers[1]),
    )


def _other_kind(label: str, slot: Slot | None, now: Any, kind: type) -> StateMismatchError:
    what = "not there" if now is ABSENT else f"a {type(now).__name__}"
    return StateMismatchError(
        f"{label} is {what}, and was a {kind.__name__} when the program was captured",
        hint=_PUT_BACK,
        container=None if slot is None else place_of(slot.container, slot.key)[0],
    )


def _logs(metadata: ProgramMetadata, state: StateWalk) -> set[int]:
    """The identities of the lists to which a program only adds: it asks nothing of what is there."""
    keys = list(state.containers)
    return {keys[effect.container] for effect in metadata.side_effects if effect.state == 0 and effect.adds}


def _held(slots: Sequence[Slot]) -> Iterator[tuple[Slot, Any]]:
    """The places that have names or numbers, and what is there."""
    yield from ((slot, slot.get()) for slot in slots if not isinstance(slot.container, SetItems))


def _in_sets(state: StateWalk) -> Iterator[tuple[Slot, Any]]:
    """The items of sets."""
    yield from ((slot, slot.get()) for slot in state.tensors if isinstance(slot.container, SetItems))
