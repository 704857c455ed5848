"""Guards on single tensors: the properties that all programs depend on, and what a program asked besides.

Invariant: two answers are the same only if a program cannot tell them apart. Limits: an attribute that is an object is
known by its identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from functionalize._torch import (
    ASKED_PROPERTIES,
    FOLLOWED_VIEW,
    HOOKS,
    LEAF,
    LEAF_VIEW,
    SILENT_VIEW,
    VIEW,
    FakeTensor,
)
from functionalize._torch.dispatch import TensorGuards
from functionalize.errors import InputMismatchError
from functionalize.python_state.containers import ABSENT
from functionalize.python_state.snapshot import EnteredObject, frozen, same
from functionalize.python_state.walk import TENSOR_TYPES
from functionalize.runtime.guards.compiled import items_of
from functionalize.runtime.guards.guard import (
    HINT,
    WHEN,
    CallInputs,
    FastCode,
    Guard,
    GuardKind,
    container_of,
    mismatch,
)
from functionalize.runtime.metadata import GraphInput


def _class_of(tensor: torch.Tensor) -> type:
    """The class of a tensor, where a program could tell it from a plain one."""
    plain = type(tensor) in TENSOR_TYPES or isinstance(tensor, FakeTensor)
    return torch.Tensor if plain else type(tensor)


def _size(tensor: torch.Tensor) -> Any:
    return "nested" if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.size())


def _strides(tensor: torch.Tensor) -> Any:
    return tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else None


IDENTITY = "identity"  # asked by ``id``
REQUIRES_GRAD, STRIDES, INFERENCE = "requires_grad", "strides", "is an inference tensor"
TENSOR_PROPERTIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "class": _class_of,
    "layout": attrgetter("layout"),
    "dtype": attrgetter("dtype"),
    "device": attrgetter("device"),
    "size": _size,
    STRIDES: _strides,
    "conjugate bit": torch.is_conj,
    "negative bit": torch.is_neg,
    INFERENCE: torch.Tensor.is_inference,
}
_READ = tuple(TENSOR_PROPERTIES.values())
_SIZE = [*TENSOR_PROPERTIES].index("size")
STRIDES_AT = [*TENSOR_PROPERTIES].index(STRIDES)

# Of what is true of an input or not, what is said of it now, and of when the program was captured.
_TRUE_OR_NOT: Mapping[str, tuple[tuple[str, str], ...]] = {
    REQUIRES_GRAD: (("requires no gradients", "required none"), ("requires gradients", "required some")),
    INFERENCE: (("is not an inference tensor", "was none"), ("is an inference tensor", "was one")),
    LEAF: (("is not a leaf", "was none"), ("is a leaf", "was one")),
    VIEW: (("is not a view", "was none"), ("is a view", "was one")),
    SILENT_VIEW: (("is not a view of a tensor that requires gradients", "was none"), ("is a view of such", "was one")),
    LEAF_VIEW: (("is not both a leaf and a view", "was none"), ("is a leaf, and a view", "was both")),
    FOLLOWED_VIEW: (
        ("is not a view of a tensor that requires gradients", "was none"),
        ("is a view of such", "was one"),
    ),
    HOOKS: (
        ("has no hooks on its gradient", "had none"),
        ("has hooks on its gradient", "had some"),
        ("has two kinds of hooks on its gradient", "had two kinds"),
    ),
}


def property_mismatch(
    entry: GraphInput, name: str, now: Any, before: Any, kind: type[InputMismatchError] = InputMismatchError
) -> InputMismatchError:
    """The error for an input of which a property is another one."""
    said, container = _TRUE_OR_NOT.get(name), container_of(entry.slot)
    if said is None:
        verbs = ("are", "were") if name == STRIDES else ("is", "was")
        return mismatch(f"the {name} of {entry.label}", now, before, kind, verbs, container)
    return kind(f"{entry.label} {said[now][0]}, and {said[before][1]} {WHEN}", hint=HINT, container=container)


class AskedAttribute(str):
    """An attribute that somebody gave to a tensor, or may give: in words, with its name beside."""

    name: str

    @classmethod
    def of(cls, name: str) -> AskedAttribute:
        """That of a name."""
        made = cls(f"attribute `{name}`")
        made.name = name
        return made


def answer_of(question: str, tensor: torch.Tensor) -> Any:
    """What a tensor answers, as a value that can be compared by :func:`same`."""
    if isinstance(question, AskedAttribute):
        value = vars(tensor).get(question.name, ABSENT)
        if isinstance(value, torch.Tensor):
            return EnteredObject(value)
        return value if value is ABSENT else frozen(value, {})
    return id(tensor) if question == IDENTITY else ASKED_PROPERTIES[question](tensor)


@dataclass(frozen=True)
class Dimensions:
    """The size of a tensor of which nothing but the number of dimensions counts."""

    count: int

    def __repr__(self) -> str:
        return f"of {self.count} dimension{'' if self.count == 1 else 's'}"


class TensorProperties(GuardKind):
    """The properties of some inputs in :data:`TENSOR_PROPERTIES`."""

    def __init__(self, inputs: Sequence[GraphInput], values: Mapping[int, Any], dynamic: Set[int]) -> None:
        """``values``: the inputs that are compared, by number; ``dynamic``: those whose sizes may differ."""
        self._inputs, self._dynamic = inputs, dynamic
        self._expected = {number: self._read(number, value) for number, value in values.items()}

    @property
    def is_empty(self) -> bool:
        return not self._expected

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for number, before in self._expected.items():
            if number in call.examples:
                continue
            now = self._read(number, call.values[number])
            if now != before:
                return self._mismatch(self._inputs[number], now, before)
        return None

    def write(self, code: FastCode) -> None:
        tensors = {n: code.call.values[n] for n in self._expected if isinstance(code.call.values[n], torch.Tensor)}
        if not tensors:
            return
        sizes: list[Any] = [[None] * t.dim() if n in self._dynamic else list(t.size()) for n, t in tensors.items()]
        strides: list[Any] = [[None] * t.dim() if n in self._dynamic else list(t.stride()) for n, t in tensors.items()]
        looks = TensorGuards(*tensors.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        code.body.refuse(f"not looks({items_of('inputs', [*tensors], len(self._inputs))})", looks=looks.check)

    def listed(self) -> Iterator[Guard]:
        for number, look in self._expected.items():
            for name, value in zip(TENSOR_PROPERTIES, look or (), strict=look is not None):
                yield Guard(self._inputs[number].label, name, value)

    def _read(self, number: int, value: Any) -> list[Any] | None:
        """The properties of an input, its sizes left out where they may differ; None of what is no tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        properties = [read(value) for read in _READ]
        if number in self._dynamic:
            properties[_SIZE], properties[STRIDES_AT] = Dimensions(value.dim()), None
        return properties

    def _mismatch(
        self, entry: GraphInput, now: list[Any] | None, before: list[Any] | None
    ) -> InputMismatchError | None:
        if now is None or before is None:
            what, was = ("no tensor" if look is None else "a tensor" for look in (now, before))
            said = f"{entry.label} is {what}, and was {was} {WHEN}"
            return InputMismatchError(said, hint=HINT, container=container_of(entry.slot))
        for name, this, that in zip(TENSOR_PROPERTIES, now, before, strict=True):
            if this != that:
                return property_mismatch(entry, name, this, that)
        return None


class AskedProperties(GuardKind):
    """What a program asked inputs, or may have asked, and what they answered."""

    def __init__(self, inputs: Sequence[GraphInput], answers: Mapping[tuple[int, str], Any]) -> None:
        """``answers``: by the numbers of inputs, and questions."""
        self._inputs, self._answers = inputs, answers

    @property
    def is_empty(self) -> bool:
        return not self._answers

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for (number, question), before in self._answers.items():
            if number not in call.examples:
                now = answer_of(question, call.values[number])
                if not same(now, before):
                    return property_mismatch(self._inputs[number], question, now, before)
        return None

    def listed(self) -> Iterator[Guard]:
        return (Guard(self._inputs[n].label, question, answer) for (n, question), answer in self._answers.items())
