"""How a call makes the objects that its program made: part by part, as the capture has decomposed them.

Takes :class:`Reconstruction` trees, in which references represent tensors, numbers of the graph, and objects that
existed before the call. Gives objects. Guarantees that a reconstruction is one object in a call, another one in the
next call, and that nothing of a trace is held. Limits: neither ``__init__`` nor other code of an object's class runs,
unless only ``copyreg`` knows the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from functionalize.python_state.slots import ContainerSource, ObjectSource


class Walked(Protocol):
    """The result of a walk over objects, in order."""

    @property
    def containers(self) -> Mapping[int, ContainerSource]:
        """The containers of their values."""

    @property
    def objects(self) -> Sequence[ObjectSource]:
        """The objects."""


@dataclass(frozen=True)
class ObjectRef:
    """An object that existed before the call, by its number on the walk."""

    state: int  # which walk: of the program's state, or of the arguments
    number: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor, by its number."""

    number: Any


@dataclass(frozen=True)
class GraphNumber:
    """A number that the graph computes, by its index among the graph's outputs."""

    position: int


@dataclass(frozen=True)
class NumberRef:
    """A number that the graph computes, by its position among the numbers that objects hold."""

    number: int


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """How to make one object: from some parts, then filled with others, so that it may contain itself.

    Parts are reconstructions, references, or plain values.
    """

    new: Callable[[Sequence[Any]], Any]
    fill: Callable[[Any, Sequence[Any]], None]
    first: list[Any] = field(default_factory=list)  # what `new` takes
    rest: list[Any] = field(default_factory=list)  # what `fill` takes


def references_in(parts: Sequence[Any]) -> Iterator[TensorRef | ObjectRef]:
    """The references in parts, and in the parts of objects that they describe."""
    todo, seen = list(parts), set[Reconstruction]()
    while todo:
        part = todo.pop()
        if isinstance(part, (TensorRef, ObjectRef)):
            yield part
        elif isinstance(part, Reconstruction) and part not in seen:
            seen.add(part)
            todo += [*part.first, *part.rest]


def tensors_in(parts: Sequence[Any]) -> set[Any]:
    """The numbers of the tensors among parts, and in the objects that they describe."""
    return {part.number for part in references_in(parts) if isinstance(part, TensorRef)}


_BEGIN, _MAKE, _FILL = "begin", "make", "fill"  # the next stage of a reconstruction


class Maker:
    """Makes the objects of one call."""

    def __init__(
        self, states: Sequence[Walked], tensor: Callable[[Any], Any], results: Sequence[Any], numbers: Sequence[int]
    ) -> None:
        """``tensor``: gives the call's tensor for a number; ``numbers``: positions of ``results`` that objects hold."""
        self._states, self._tensor, self._results, self._numbers = states, tensor, results, numbers
        self._made: dict[Reconstruction, Any] = {}

    def make(self, part: Any) -> Any:
        """The value that a reconstruction or a reference describes; other values are returned as they are."""
        pending = [(part, _BEGIN)] if isinstance(part, Reconstruction) and part not in self._made else []
        begun: Counter[Reconstruction] = Counter()
        while pending:  # a stack, so that parts are complete before a set is filled with them, which hashes them
            reconstruction, stage = pending.pop()
            if stage is _FILL:
                reconstruction.fill(self._made[reconstruction], list(map(self._value, reconstruction.rest)))
            elif reconstruction in self._made:  # meanwhile, by a part that contains it
                continue
            elif stage is _BEGIN:
                begun[reconstruction] += 1
                if begun[reconstruction] > len(reconstruction.first) + 1:
                    raise RuntimeError(f"the result of {reconstruction.new} would contain itself before it exists")
                pending += [(reconstruction, _MAKE), *self._missing(reconstruction.first)]
            else:
                self._made[reconstruction] = reconstruction.new(list(map(self._value, reconstruction.first)))
                if reconstruction.rest:
                    pending += [(reconstruction, _FILL), *self._missing(reconstruction.rest)]
        return self._value(part)

    def _missing(self, parts: Sequence[Any]) -> list[tuple[Reconstruction, str]]:
        return [(part, _BEGIN) for part in parts if isinstance(part, Reconstruction) and part not in self._made]

    def _value(self, part: Any) -> Any:
        """The value of a part, once all objects in it are made."""
        if isinstance(part, Reconstruction):
            return self._made[part]
        if isinstance(part, TensorRef):
            return self._tensor(part.number)
        if isinstance(part, ObjectRef):
            return self._states[part.state].objects[part.number].value
        if isinstance(part, NumberRef):
            return self._results[self._numbers[part.number]]
        return self._results[part.position] if isinstance(part, GraphNumber) else part
