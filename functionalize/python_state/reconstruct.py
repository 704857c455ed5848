"""How a call makes the objects that its program made: part by part, as the capture found them to consist.

Invariant: what one recipe describes is one object in a call, and another one in the next call. Tensors, numbers of
the graph, and objects that were there before the call stand in a recipe by their numbers; it holds nothing of a trace.
Limits: no `__init__` runs, nor any other code of the object's class, but where `copyreg` alone knows its parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Seen(Protocol):
    """Objects that were walked."""

    @property
    def seen(self) -> Sequence[Any]:
        """The objects, in order."""


@dataclass(frozen=True)
class ObjectRef:
    """An object that was there before, by its number on the walk."""

    state: int  # which walk: of the program's state, or of the arguments
    number: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor, by its number."""

    number: Any


@dataclass(frozen=True)
class GraphNumber:
    """A number that the graph gives, by its index among the graph's outputs."""

    position: int


@dataclass(frozen=True)
class NumberRef:
    """A number that the graph gives, by its position among those that objects hold."""

    number: int


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to make one object: of some parts, and then, so that it may hold itself, filled with others.

    Parts are recipes, references, or the very values.
    """

    new: Callable[[Sequence[Any]], Any]
    fill: Callable[[Any, Sequence[Any]], None]
    first: list[Any] = field(default_factory=list)  # what `new` takes
    rest: list[Any] = field(default_factory=list)  # what `fill` takes


def references_in(parts: Sequence[Any]) -> Iterator[TensorRef | ObjectRef]:
    """What parts refer to, and objects that they describe."""
    todo, seen = list(parts), set[Recipe]()
    while todo:
        part = todo.pop()
        if isinstance(part, (TensorRef, ObjectRef)):
            yield part
        elif isinstance(part, Recipe) and part not in seen:
            seen.add(part)
            todo += [*part.first, *part.rest]


def tensors_in(parts: Sequence[Any]) -> set[Any]:
    """The numbers of the tensors that parts are, and that objects hold which they describe."""
    return {part.number for part in references_in(parts) if isinstance(part, TensorRef)}


_BEGIN, _MAKE, _FILL = "begin", "make", "fill"  # what is to be done next with a recipe


class Maker:
    """Makes the objects of one call."""

    def __init__(
        self, states: Sequence[Seen], tensor: Callable[[Any], Any], results: Sequence[Any], numbers: Sequence[int]
    ) -> None:
        """``tensor``: what the call has for the number of one; ``numbers``: the ``results`` that objects hold."""
        self._states, self._tensor, self._results, self._numbers = states, tensor, results, numbers
        self._made: dict[Recipe, Any] = {}

    def make(self, part: Any) -> Any:
        """The value that a recipe, or a reference, describes; of others the value itself."""
        pending = [(part, _BEGIN)] if isinstance(part, Recipe) and part not in self._made else []
        begun: Counter[Recipe] = Counter()
        while pending:  # what is above is done before: a set is filled with what can be hashed
            recipe, stage = pending.pop()
            if stage is _FILL:
                recipe.fill(self._made[recipe], list(map(self._value, recipe.rest)))
            elif recipe in self._made:  # since it was put here: by something in it that holds it
                continue
            elif stage is _BEGIN:
                begun[recipe] += 1
                if begun[recipe] > len(recipe.first) + 1:
                    raise RuntimeError(f"the result of {recipe.new} would contain itself before it exists")
                pending += [(recipe, _MAKE), *self._missing(recipe.first)]
            else:
                self._made[recipe] = recipe.new(list(map(self._value, recipe.first)))
                if recipe.rest:
                    pending += [(recipe, _FILL), *self._missing(recipe.rest)]
        return self._value(part)

    def _missing(self, parts: Sequence[Any]) -> list[tuple[Recipe, str]]:
        return [(part, _BEGIN) for part in parts if isinstance(part, Recipe) and part not in self._made]

    def _value(self, part: Any) -> Any:
        """What a part is, once all objects that it consists of are made."""
        if isinstance(part, Recipe):
            return self._made[part]
        if isinstance(part, TensorRef):
            return self._tensor(part.number)
        if isinstance(part, ObjectRef):
            return self._states[part.state].seen[part.number]
        if isinstance(part, NumberRef):
            return self._results[self._numbers[part.number]]
        return self._results[part.position] if isinstance(part, GraphNumber) else part
