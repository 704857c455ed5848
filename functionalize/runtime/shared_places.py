"""Places of a program's state that held one tensor: a call must find one tensor in all of them.

A program takes a tensor from the first place where it was found. Where another place holds another tensor by now, it
would be read as that one.

Invariant: nothing is compared but who is who. Limits: places of state; sets have no places, only members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from functionalize.errors import StateMismatchError
from functionalize.runtime.containers import SetItems, place_of
from functionalize.runtime.metadata import GraphInput
from functionalize.runtime.slots import Slot


class SharedPlaces:
    """The further places of the inputs."""

    def __init__(self, inputs: Sequence[GraphInput], values: Sequence[Any], slots: Sequence[Slot]) -> None:
        """``slots``: of all tensors of the state."""
        numbers = {id(value): n for n, (entry, value) in enumerate(zip(inputs, values, strict=True)) if entry.slot}
        self._inputs = inputs
        self.places = [(slot, numbers[id(value)]) for slot, value in _held(slots) if id(value) in numbers]
        self.places = [(slot, number) for slot, number in self.places if slot is not inputs[number].slot]
        self.members = [(slot.container, numbers[id(value)]) for slot, value in _in_sets(slots) if id(value) in numbers]

    def check(self, values: Sequence[Any], changed: Callable[[], Set[int]]) -> None:
        """Compare the places with a call's inputs; ``changed``: the identities of containers that the program changes.

        Raises:
            StateMismatchError: one holds something else.
        """
        for items, number in self.members:
            if not items.holds(values[number]):
                raise StateMismatchError(
                    f"{self._inputs[number].label} is not in a set in which it was when the program was captured",
                    hint="put it there, or capture again",
                    container=items,
                )
        for slot, number in self.places:
            try:
                same = slot.get() is values[number]
            except (LookupError, TypeError):
                same = False
            if not same:
                first = self._inputs[number].slot or slot
                containers = [place_of(one.container, one.key)[0] for one in (first, slot)]
                raise StateMismatchError(
                    f"`{slot.path}` is no longer {self._inputs[number].label}, as it was when the program was captured",
                    hint="put one tensor in both places again, or capture again",
                    container=next((one for one in containers if id(one) in changed()), containers[1]),
                )


def _held(slots: Sequence[Slot]) -> Iterator[tuple[Slot, Any]]:
    """The places that have names or numbers, and what is there."""
    yield from ((slot, slot.get()) for slot in slots if not isinstance(slot.container, SetItems))


def _in_sets(slots: Sequence[Slot]) -> Iterator[tuple[Slot, Any]]:
    """The items of sets."""
    yield from ((slot, slot.get()) for slot in slots if isinstance(slot.container, SetItems))
