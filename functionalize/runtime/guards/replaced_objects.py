"""Objects that sit where others sat when a program was captured: what it knows of the one holds for the other.

A recurrent module that keeps ``self.hidden = [h, c]`` has another list after each call. It is built as the one before:
so the places in it, and the guards on it, are those in the new one.

Invariant: what is followed is built alike, and reached in no other way; the guards are asked afterwards. Limits:
containers and objects with attributes; modules, optimizers, and sets are known by their identity.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from typing import Any

import torch

from functionalize.errors import InputMismatchError, UnsupportedProgramError
from functionalize.python_state.containers import MAPPINGS, CodeOf, Container, identity
from functionalize.python_state.slots import Slot
from functionalize.python_state.walk import StateWalk
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.guards.guards import Guards

_KNOWN_BY_IDENTITY = (torch.nn.Module, torch.optim.Optimizer, type, contextvars.ContextVar)


class ReplacedObjects:
    """The objects of one program's state, by the places where they sit."""

    def __init__(self, guards: Guards) -> None:
        self._guards, self._state = guards, guards.state
        self._held = [(slot, slot.found()) for slot in guards.state.entered]
        self._lock = threading.RLock()  # held while a call looks at places, and while they move

    def check(self, arguments: CallArguments) -> tuple[list[Any], bool]:
        """The inputs for a call, by the guards; and whether the program's places are in other objects than before.

        Raises:
            InputMismatchError: it is not one of this program's, wherever its places are.
        """
        with self._lock:
            try:
                return self._guards.check(arguments), False
            except InputMismatchError:
                if not self._follow():
                    raise
            return self._guards.check(arguments), True

    def _follow(self) -> bool:
        """Have the program's places be in the objects of now; false where there are no others, or not such."""
        pairs = self._replaced()
        both = _Alike.of(*zip(*pairs, strict=True)) if pairs else None
        if both is None or not self._apart(both):
            return False
        self._move(both)
        self._held = [(slot, both.objects.get(id(value), value)) for slot, value in self._held]
        return True

    def _replaced(self) -> list[tuple[Any, Any]]:
        """Objects that another one replaced, and those: of each the first that was met, not what it holds."""
        pairs: dict[int, tuple[Any, Any]] = {}
        for slot, before in self._held:
            now = slot.found()
            if now is not before:
                known = pairs.setdefault(id(before), (before, now))
                if known[1] is not now:
                    return []
        return list(pairs.values())

    def _apart(self, both: _Alike) -> bool:
        """Whether nothing of these is reached in another way, before or now."""
        known = {id(value) for value in self._state.seen}
        if known.intersection(id(value) for value in both.objects.values()):
            return False
        if not (
            both.objects.keys() <= known and both.containers.keys() <= set(map(identity, _containers(self._state)))
        ):
            return False  # what was there was changed since
        tops = {id(before) for before, _ in self._replaced()}
        inner = [slot for slot, value in self._held if id(value) in both.objects and id(value) not in tops]
        return all(identity(slot.container) in both.containers for slot in inner)

    def _move(self, both: _Alike) -> None:
        state, guards = self._state, self._guards
        inputs = [entry.slot for entry in guards.inputs if entry.slot is not None]
        slots: list[Slot] = [*state.leaves, *state.entered, *state.tuples, *inputs]
        for slot in {id(slot): slot for slot in slots}.values():
            slot.container = both.moved(slot.container)
            slot.owner = both.objects.get(id(slot.owner), slot.owner)
        state.seen = [both.objects.get(id(value), value) for value in state.seen]
        state.containers, state.ordered = (
            {id(container): (container, path) for one, path in found.values() for container in [both.moved(one)]}
            for found in (state.containers, state.ordered)
        )
        guards.settings.follow(both.moved, both.objects)


class _Alike:
    """Objects that are built alike: those of one, by identity, with those of the other; their containers likewise."""

    def __init__(self, objects: dict[int, Any], containers: dict[int, Container]) -> None:
        self.objects, self.containers = objects, containers

    @classmethod
    def of(cls, before: Sequence[Any], now: Sequence[Any]) -> _Alike | None:
        """What objects consist of, and others in their place; None where they are not built alike."""
        walks = StateWalk(), StateWalk()
        try:
            for walk, values in zip(walks, (before, now), strict=True):
                for index in range(len(values)):
                    walk.walk(values, index, "")
        except UnsupportedProgramError:  # one holds a module that no program can have
            return None
        old, new = walks
        if old.shape != new.shape or not new.seen or any(walk.keyed_by_tensor or walk.weak for walk in walks):
            return None
        if any(isinstance(value, _KNOWN_BY_IDENTITY) for value in new.seen) or len(old.containers) != len(
            new.containers
        ):
            return None
        pairs = list(zip(_containers(old), _containers(new), strict=True))
        if not all(_same_keys(*pair) for pair in pairs):
            return None
        objects = {id(one): other for one, other in zip(old.seen, new.seen, strict=True)}
        return cls(objects, {identity(one): other for one, other in pairs})

    def moved(self, container: Container) -> Container:
        """The container in the place of another one."""
        if type(container) is CodeOf and id(container.owner) in self.objects:
            return CodeOf(self.objects[id(container.owner)], container)
        return self.containers.get(identity(container), container)


def _containers(walk: StateWalk) -> list[Container]:
    return [container for container, _ in walk.containers.values()]


def _same_keys(one: Container, other: Container) -> bool:
    return not isinstance(one, MAPPINGS) or list(one) == list(other)
