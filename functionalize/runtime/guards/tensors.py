"""What calls are compared by of each tensor: its look, and what the program asked it besides.

Invariant: two answers are the same only if a program cannot tell them apart. Limits: an attribute that is an object is
told by its identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from functionalize._torch import ASKED_PROPERTIES, FakeTensor
from functionalize.python_state.containers import ABSENT
from functionalize.python_state.snapshot import EnteredObject, frozen, same
from functionalize.python_state.walk import TENSOR_TYPES


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
    REQUIRES_GRAD: attrgetter("requires_grad"),
}


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
    """What a tensor answers, as a value that can be compared by :func:`is_answer`."""
    if isinstance(question, AskedAttribute):
        value = vars(tensor).get(question.name, ABSENT)
        if isinstance(value, torch.Tensor):
            return EnteredObject(value)
        return value if value is ABSENT else frozen(value, {})
    return id(tensor) if question == IDENTITY else ASKED_PROPERTIES[question](tensor)


def is_answer(question: str, tensor: torch.Tensor, before: Any) -> bool:
    """Whether a tensor answers to a question what another one did."""
    return same(answer_of(question, tensor), before)


@dataclass(frozen=True)
class Dimensions:
    """The size of a tensor of which nothing but the number of dimensions counts."""

    count: int

    def __repr__(self) -> str:
        return f"of {self.count} dimension{'' if self.count == 1 else 's'}"


class Laid:
    """How gradients lie in memory, by their numbers. Strides do not count where there is one position."""

    def __init__(self, gradients: Mapping[int, torch.Tensor], offsets: Set[int]) -> None:
        """``offsets``: those of which it matters where they begin."""
        self._offsets = offsets
        self._before = {number: self._of(number, gradient) for number, gradient in gradients.items()}

    def differing(self, values: Sequence[Any]) -> tuple[int, Any, Any] | None:
        """The first that is there and has other strides: its number, how it lies, how it did."""
        for number, before in self._before.items():
            now = before if values[number] is None else self._of(number, values[number])
            if now != before:
                return number, now, before
        return None

    def _of(self, number: int, gradient: torch.Tensor) -> Any:
        if gradient.layout is not torch.strided or gradient.is_nested:
            return gradient.layout
        pairs = zip(gradient.stride(), gradient.size(), strict=True)
        strides = tuple(stride for stride, size in pairs if size > 1)
        return (strides, gradient.storage_offset()) if number in self._offsets else strides
