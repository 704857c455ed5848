"""Guards on single tensors: the properties that all programs depend on, and properties that a program asked for.

Invariant: two answers are the same only if a program cannot distinguish them. Limits: an attribute that is an object is
compared by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
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
from functionalize._torch.subclasses.wrappers import Wrapping
from functionalize.errors import GradientMismatchError, InputMismatchError
from functionalize.python_state.containers import ABSENT
from functionalize.python_state.slots import ObjectSource
from functionalize.python_state.snapshot import frozen, same
from functionalize.python_state.walk import TENSOR_TYPES
from functionalize.runtime.guards.compiled import items_of
from functionalize.runtime.guards.guard import (
    HINT,
    WHEN,
    CallInputs,
    FastCode,
    Guard,
    GuardKind,
    containers_of,
    mismatch,
)
from functionalize.runtime.metadata import GraphInput

IDENTITY, HAS_GRADIENT = "identity", "has a gradient"  # a program asks for the first by ``id``
REQUIRES_GRAD, STRIDES, INFERENCE = "requires_grad", "strides", "is an inference tensor"
TENSOR_PROPERTIES = (
    *("class", "layout", "dtype", "device", "size", STRIDES),
    *("conjugate bit", "negative bit", INFERENCE),
)
_SIZE, _STRIDES = TENSOR_PROPERTIES.index("size"), TENSOR_PROPERTIES.index(STRIDES)


def _properties_of(tensor: torch.Tensor) -> list[Any]:
    """The ``TENSOR_PROPERTIES`` of a tensor, in order."""
    cls, strided = type(tensor), tensor.layout is torch.strided
    is_nested = strided and tensor.is_nested
    return [
        # Of a tensor that a program cannot distinguish from a plain one, `torch.Tensor`.
        torch.Tensor if cls in TENSOR_TYPES or issubclass(cls, FakeTensor) else cls,
        *(tensor.layout, tensor.dtype, tensor.device),
        "nested" if is_nested else tuple(tensor.shape),
        tensor.stride() if strided and not is_nested else None,
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    ]


# For properties that are true or false: what messages say of an input now, and of it at the capture.
_TRUE_OR_NOT: Mapping[str, tuple[tuple[str, str], ...]] = {
    REQUIRES_GRAD: (("requires no gradients", "required none"), ("requires gradients", "required some")),
    INFERENCE: (("is not an inference tensor", "was not"), ("is an inference tensor", "was one")),
    HAS_GRADIENT: (("has no gradient", "had none"), ("has a gradient", "had one")),
    LEAF: (("is not a leaf", "was not"), ("is a leaf", "was one")),
    VIEW: (("is not a view", "was not"), ("is a view", "was one")),
    SILENT_VIEW: (
        ("is not a view of a tensor that requires gradients", "was not"),
        ("is a view of a tensor that requires gradients", "was one"),
    ),
    LEAF_VIEW: (("is not both a leaf and a view", "was not"), ("is both a leaf and a view", "was both")),
    FOLLOWED_VIEW: (
        ("is not a view of a tensor that requires gradients", "was not"),
        ("is a view of a tensor that requires gradients", "was one"),
    ),
    HOOKS: (
        ("has no hooks on its gradient", "had none"),
        ("has hooks on its gradient", "had some"),
        ("has two kinds of hooks on its gradient", "had two kinds"),
    ),
}
_HINTS = {
    HAS_GRADIENT: "set gradients to None before the call, as optimizer.zero_grad() does, or capture again",
}


def _mismatch(
    entry: GraphInput, name: str, now: Any, before: Any, error: type[InputMismatchError] = InputMismatchError
) -> InputMismatchError:
    """The error for an input with another value of a property."""
    said, containers = _TRUE_OR_NOT.get(name), containers_of(entry.slot)
    if said is None:
        verbs = ("are", "were") if name == STRIDES else ("is", "was")
        return mismatch(f"the {name} of {entry.label}", now, before, error, verbs, containers)
    what = f"{entry.label} {said[now][0]}, and {said[before][1]} {WHEN}"
    return error(what, hint=_HINTS.get(name, HINT), containers=containers)


class AskedAttribute(str):
    """The question for an attribute that somebody set on a tensor, or may set: its words, with the name as a field."""

    name: str

    @classmethod
    def of(cls, name: str) -> AskedAttribute:
        """The question for an attribute of this name."""
        made = cls(f"attribute `{name}`")
        made.name = name
        return made


def answer_of(question: str, tensor: torch.Tensor) -> Any:
    """The answer of a tensor, as a value that :func:`same` compares."""
    if isinstance(question, AskedAttribute):
        value = vars(tensor).get(question.name, ABSENT)
        if isinstance(value, torch.Tensor):
            return ObjectSource(value)
        return value if value is ABSENT else frozen(value, {})
    return id(tensor) if question == IDENTITY else ASKED_PROPERTIES[question](tensor)


@dataclass(frozen=True)
class Dimensions:
    """The size of a tensor if only its number of dimensions is compared."""

    count: int

    def __repr__(self) -> str:
        return f"of {self.count} dimension{'' if self.count == 1 else 's'}"


class TensorProperties(GuardKind):
    """The :data:`TENSOR_PROPERTIES` of some inputs."""

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
                return self._failure_of(self._inputs[number], now, before)
        return None

    def write(self, code: FastCode) -> None:
        tensors = {n: code.call.values[n] for n in self._expected if isinstance(code.call.values[n], torch.Tensor)}
        if not tensors:
            return
        sizes: list[Any] = [[None] * t.dim() if n in self._dynamic else list(t.size()) for n, t in tensors.items()]
        strides: list[Any] = [[None] * t.dim() if n in self._dynamic else list(t.stride()) for n, t in tensors.items()]
        guards = TensorGuards(*tensors.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        code.body.refuse(
            f"not have_layouts({items_of('inputs', [*tensors], len(self._inputs))})", have_layouts=guards.check
        )

    def listed(self) -> Iterator[Guard]:
        for number, properties in self._expected.items():
            for name, value in zip(TENSOR_PROPERTIES, properties or (), strict=properties is not None):
                yield Guard(self._inputs[number].label, name, value)

    def _read(self, number: int, value: Any) -> list[Any] | None:
        """The properties of an input, without sizes that may differ; None if it is not a tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        properties = _properties_of(value)
        if number in self._dynamic:
            properties[_SIZE], properties[_STRIDES] = Dimensions(value.dim()), None
        return properties

    def _failure_of(
        self, entry: GraphInput, now: list[Any] | None, before: list[Any] | None
    ) -> InputMismatchError | None:
        if now is None or before is None:
            what, was = ("no tensor" if properties is None else "a tensor" for properties in (now, before))
            said = f"{entry.label} is {what}, and was {was} {WHEN}"
            return InputMismatchError(said, hint=HINT, containers=containers_of(entry.slot))
        for name, this, that in zip(TENSOR_PROPERTIES, now, before, strict=True):
            if this != that:
                return _mismatch(entry, name, this, that)
        return None


class Wrappers(GuardKind):
    """How the inputs that are wrappers are made: class, metadata, sizes."""

    def __init__(self, inputs: Sequence[GraphInput], numbers: Set[int]) -> None:
        self._inputs, self._numbers = inputs, sorted(numbers)

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        for number in self._numbers:
            entry, value = self._inputs[number], call.values[number]
            missing = value is None and entry.gradient_of is not None  # another guard compares which are missing
            if missing or number in call.examples:
                continue
            expected: Any = entry.wrapping
            error = InputMismatchError if entry.gradient_of is None else GradientMismatchError
            containers = containers_of(entry.slot)
            if type(value) is not expected.cls:
                what = f"the class of {entry.label}"
                return mismatch(what, type(value), expected.cls, error, containers=containers)
            difference = Wrapping.of(value).difference(expected)
            if difference is not None:
                return error(f"{entry.label} has other {difference} than {WHEN}", hint=HINT, containers=containers)
        return None

    def listed(self) -> Iterator[Guard]:
        for number in self._numbers:
            entry = self._inputs[number]
            assert entry.wrapping is not None
            yield Guard(entry.label, "class", entry.wrapping.cls)
            yield Guard(entry.label, "metadata", entry.wrapping.context)


class GradientProperties(TensorProperties):
    """The properties of inputs that are gradients, unless they are missing; another guard compares their strides."""

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        missing = {number for number in self._expected if call.values[number] is None}
        return super().failure(CallInputs(call.arguments, call.values, call.examples | missing) if missing else call)

    def write(self, code: FastCode) -> None:
        code.refuse_failing(self)

    def _read(self, number: int, value: Any) -> list[Any] | None:
        properties = super()._read(number, value)
        if properties is not None and self._inputs[number].part is None:
            properties[_STRIDES] = None
        return properties


@dataclass(frozen=True, eq=False)
class InputProperty(GuardKind):
    """One property of some inputs."""

    inputs: Sequence[GraphInput]
    name: str
    read: Callable[[Any], Any]
    expected: Mapping[int, Any]  # by the numbers of inputs
    error: type[InputMismatchError] = GradientMismatchError
    is_asked: bool = False  # whether the program asked for it: then missing values have an answer too

    @property
    def is_empty(self) -> bool:
        return not self.expected

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        values, read, is_asked = call.values, self.read, self.is_asked
        for number, before in self.expected.items():
            if (values[number] is None and not is_asked) or number in call.examples:
                continue
            now = read(values[number])
            if not same(now, before) if is_asked else now != before:
                return _mismatch(self.inputs[number], self.name, now, before, self.error)
        return None

    def listed(self) -> Iterator[Guard]:
        return (Guard(self.inputs[number].label, self.name, value) for number, value in self.expected.items())


class RequiresGrad(InputProperty):
    """Which inputs require gradients, for inputs whose properties torch compares at once, this one included."""

    def write(self, code: FastCode) -> None:
        """Write nothing: the line of :class:`TensorProperties` compares it."""


def asked_properties(inputs: Sequence[GraphInput], answers: Mapping[tuple[int, str], Any]) -> list[InputProperty]:
    """Guards on properties that a program asked for; ``answers``: by numbers of inputs, and questions."""
    by_question: dict[str, dict[int, Any]] = {}
    for (number, question), answer in answers.items():
        by_question.setdefault(question, {})[number] = answer
    return [
        InputProperty(inputs, question, partial(answer_of, question), expected, InputMismatchError, is_asked=True)
        for question, expected in by_question.items()
    ]


def strides_that_count(tensor: torch.Tensor) -> Any:
    """The strides of a gradient, without those of dimensions of size 1."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.size(), strict=True) if size > 1)


def strides_and_offset(tensor: torch.Tensor) -> Any:
    """The strides that count, and the storage offset of a gradient."""
    strides = strides_that_count(tensor)
    return (strides, tensor.storage_offset()) if isinstance(strides, tuple) else strides
