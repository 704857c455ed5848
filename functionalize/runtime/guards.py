"""Whether the inputs of a call are such as the program was captured for.

Invariant: what passes here is computed as the original would. Limits: strides count only where tensors share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize.errors import InputMismatchError, StateMismatchError
from functionalize.graph_capture.dynamic_shapes import SizeGuard
from functionalize.graph_capture.finalize import Outcome
from functionalize.runtime.graph_inputs import Lifted, Source, Supposed, is_leaf
from functionalize.runtime.side_effects import ABSENT, Result
from functionalize.runtime.state_walk import State, joined

_COMPARED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


class Guard:
    """What a program expects of its inputs."""

    def __init__(self, lifted: Lifted, outcome: Outcome, *, gradients_matter: bool) -> None:
        self._source_of, self._unused, self._changes = outcome.source_of_leaf, outcome.unused, outcome.changes
        self._state, self._sources = lifted.state, lifted.sources
        numbers = {id(source): number for number, source in enumerate(self._sources)}
        self._gradient_of = {n: numbers[id(s.grad_of)] for n, s in enumerate(self._sources) if s.grad_of is not None}
        self._shape = lifted.arguments.shape
        changed = {(change.state, change.holder) for change in outcome.changes}
        numbers = {identity: number for number, identity in enumerate(lifted.state.holders)}
        self._settings = [
            (spot, spot.get())
            for spot in lifted.state.constants
            if isinstance(spot.get(), _COMPARED) and (0, numbers[id(spot.holder)]) not in changed
        ]
        self._constants = [(spot.path, spot.get()) for spot in lifted.arguments.constants]
        places = {id(spot): place for place, spot in enumerate(lifted.arguments.leaves)}
        self._leaf = [places.get(id(source.spot)) for source in self._sources]
        symbolic = {number: place for number, place in outcome.first_places.items() if not place.static}
        self._dynamic = frozenset(symbolic)
        labels = {number: _label(self._sources[number]) for number in symbolic}
        self._sizes = SizeGuard(outcome.environment, symbolic, labels) if symbolic else None
        self._looks = [self._look(number, source.value) for number, source in enumerate(self._sources)]
        self._had_gradient = {
            place: source.value.grad is not None
            for place, source in enumerate(self._sources)
            if gradients_matter and is_leaf(source.value)
        }
        self._pattern = self._aliases([source.value for source in self._sources])

    @property
    def apart(self) -> bool:
        """Whether no two inputs share memory."""
        return not any(isinstance(entry, tuple) for entry in self._pattern)

    def inputs(self, arguments: State) -> list[Any]:
        """The graph's inputs for a call.

        Raises:
            InputMismatchError: the call's inputs differ from those that the program was captured for.
        """
        if arguments.shape != self._shape:
            raise InputMismatchError(
                "the arguments are nested otherwise than those that the program was captured with",
                hint="pass containers of the same types and lengths, or capture again",
            )
        self._check_constants(arguments)
        values = [self._value(place, source, arguments) for place, source in enumerate(self._sources)]
        self._add_gradients(values)
        for number, (source, value, look) in enumerate(zip(self._sources, values, self._looks, strict=True)):
            if self._look(number, value) != look and (source.grad_of is None or value is not None):
                raise InputMismatchError(
                    f"{_label(source)} is {_words(_look(value))}, and was {_words(look)} when the program was captured",
                    hint="pass inputs of the same shapes, dtypes and devices, or capture again",
                )
        self._check_state([self._state, arguments], values)
        self._fill_gradients(values)
        if self._sizes is not None:
            self._sizes.check(values)
        pattern = self._aliases(values)
        if pattern != self._pattern:
            self._refuse_aliases(pattern)
        return values

    def _look(self, number: int, value: Any) -> Any:
        """What an input looks like, its sizes left out where they may differ."""
        look = _look(value)
        return (*look[:2], len(look[2])) if number in self._dynamic and look is not None else look

    def _add_gradients(self, values: list[Any]) -> None:
        """Look the gradients up, and that there are as many as there were."""
        for place, of in self._gradient_of.items():
            values[place] = values[of].grad
        for place, had in self._had_gradient.items():
            if (values[place].grad is not None) != had:
                raise InputMismatchError(
                    f"the gradient of {_label(self._sources[place])} is {'not ' if had else ''}there, and was "
                    f"{'' if had else 'not '}when the program was captured",
                    hint="set gradients to None first, as optimizer.zero_grad() does, or capture again",
                )

    def _fill_gradients(self, values: list[Any]) -> None:
        """Gradients that will be added to begin as zeros."""
        for place, of in self._gradient_of.items():
            if values[place] is None and place not in self._unused:
                values[of].grad = values[place] = torch.zeros_like(values[of])

    def _value(self, place: int, source: Source, arguments: State) -> Any:
        leaf = self._leaf[place]
        if leaf is not None:
            return arguments.leaves[leaf].get()
        return source.value if source.spot is None else source.spot.get()

    def _check_constants(self, arguments: State) -> None:
        for spot, wanted in self._settings:
            if spot.get() != wanted:
                raise StateMismatchError(
                    f"`{spot.path}` is {_short(spot.get())}, and was {_short(wanted)} when the program was captured",
                    hint="what is no tensor is part of the program: make it a tensor, or capture again",
                )
        for spot, (path, wanted) in zip(arguments.constants, self._constants, strict=True):
            value = spot.get()
            if isinstance(wanted, _COMPARED) and not (value == wanted or (value != value and wanted != wanted)):
                raise InputMismatchError(
                    f"the argument `{path}` is {value!r}, and was {wanted!r} when the program was captured",
                    hint="what is no tensor is part of the program: pass the same, pass a tensor, or capture again",
                )

    def _check_state(self, states: Sequence[State], values: Sequence[Any]) -> None:
        for change in self._changes:
            holder = list(states[change.state].holders.values())[change.holder][0]
            for name, before in change.before.items():
                key = values[self._source_of(name.number)] if isinstance(name, Result) else name
                now = _entry(holder, key)
                if now is not before and (not isinstance(before, _COMPARED) or now != before):
                    label = self._label_of(name)
                    raise StateMismatchError(
                        f"`{joined(change.path, label)}` is {_short(now)}, and was {_short(before)} when captured",
                        hint="the program changes it, and is right for that value only: set it back, or capture again",
                    )

    def _label_of(self, name: Any) -> Any:
        return self._sources[self._source_of(name.number)].target if isinstance(name, Result) else name

    def _aliases(self, values: Sequence[Any]) -> list[Any]:
        """For each tensor the first that shares its storage, and how it lies to that."""
        first: dict[int, int] = {}
        pattern: list[Any] = []
        for place, value in enumerate(values):
            if not isinstance(value, torch.Tensor) or self._sources[place].grad_of is not None:
                pattern.append(None)
                continue
            other = first.setdefault(storage_key(value), place)
            if other == place:
                pattern.append(place)
            else:
                apart = (
                    value.storage_offset() * value.itemsize - values[other].storage_offset() * values[other].itemsize
                )
                pattern.append((other, apart, value.stride(), values[other].stride()))
        return pattern

    def _refuse_aliases(self, pattern: list[Any]) -> None:
        for place, (now, before) in enumerate(zip(pattern, self._pattern, strict=True)):
            if now != before:
                other = self._sources[(now if isinstance(now, tuple) else before)[0]]
                raise InputMismatchError(
                    f"{_label(self._sources[place])} and {_label(other)} {_relation(now)}, and {_relation(before)} "
                    "when the program was captured",
                    hint="pass tensors that share memory in the same way, or capture with on_alias_change='recapture'",
                )


def _entry(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key, ABSENT)
    return holder[key] if key < len(holder) else ABSENT


def _look(value: Any) -> Any:
    value = value.of if isinstance(value, Supposed) else value
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device, tuple(value.size()))
    return None


def _words(look: Any) -> str:
    if look is None:
        return "no tensor"
    size = f"of {look[2]} dimensions" if isinstance(look[2], int) else f"of size {list(look[2])}"
    return f"a tensor of {look[0]} on {look[1]} {size}"


def _label(source: Source) -> str:
    return f"the input `{source.name}`" if source.target is None else f"the state `{source.target}`"


def _relation(entry: Any) -> str:
    if not isinstance(entry, tuple):
        return "share no memory"
    return f"share memory ({entry[1]} bytes apart, strides {list(entry[2])} and {list(entry[3])})"


def _short(value: Any) -> str:
    return "not there" if value is ABSENT else repr(value)[:60]
