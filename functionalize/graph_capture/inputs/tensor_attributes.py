"""Attributes that users give to tensors (`p.decay = 0.1`): a program reads them from the substitutes of these tensors.

Fake tensors do not have these attributes. The original answers for its fake, and the answer is recorded, as calls must
find the same one. A missing attribute is recorded too: `getattr(x, "scale", 1)` branches on it. So is `id(p)`.

Invariant: the class of fake tensors is as it was when the program has run. Limits: values that cannot change inside,
and tensors; attributes that the program gives to tensors which it makes are not given to those of a call. Arguments of
a call may have other identities than those of the capture.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from functionalize._torch import FakeTensor
from functionalize.graph_capture.inputs.inputs import TracedInput, WrapperInput
from functionalize.graph_capture.refusals.changed_lines import LineWanted
from functionalize.patches import ABSENT as INHERITED
from functionalize.patches import Patch
from functionalize.python_state.containers import ABSENT
from functionalize.python_state.traversal_rules import PLAIN_BASES
from functionalize.refusals.python_objects import ATTRIBUTE_READ, ATTRIBUTE_SET
from functionalize.runtime.guards.tensors import IDENTITY, AskedAttribute

_UNCHANGING = (*PLAIN_BASES, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)
_OF_TORCH = ("_is_param", "_is_buffer")  # `isinstance` reads these for parameters and buffers
_OF_DYNAMO = ("_dynamo_", "_specialize_on")  # marks for torch.compile, which a class may set on what it holds


class TensorAttributes:
    """The attributes of inputs that a program reads."""

    _running: TensorAttributes | None = None  # of the current run

    def __init__(self, inputs: Sequence[TracedInput]) -> None:
        self._inputs = [entry for entry in inputs if entry.fake is not None and entry.fake is not entry.value]
        self._of = {id(entry.fake): entry for entry in self._inputs if isinstance(entry.value, torch.Tensor)}
        self._fakes = {id(entry.value): entry.fake for entry in self._inputs}
        self._own = [{*entry.fake.__dict__} for entry in self._inputs]
        self._asked = set[tuple[int, str]]()
        self.unused = set[int]()  # inputs, by the identities of their fakes, that the program has not used so far

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Answer for the program, while it runs."""
        TensorAttributes._running = self
        try:
            yield
        finally:
            TensorAttributes._running = None

    def rows(self) -> Iterator[Patch]:
        """Have fake tensors answer for their originals; in all threads, as others do not meet fakes of this capture."""
        for cls in {FakeTensor, *(type(entry.fake) for entry in self._inputs if type(entry) is WrapperInput)}:
            yield Patch(cls, "__getattr__", self._answering, shared=True)

    def _answering(self, own: Any) -> Callable[[Any, str], Any]:
        """What finds the missing attributes of a class; ``own``: what the class has for that."""

        def answer(fake: Any, name: str) -> Any:
            try:
                return self._answer(fake, name)
            except AttributeError:
                if own is INHERITED:
                    raise
            return own(fake, name)

        return answer

    def check_given(self) -> None:
        """Raise if the program gave an attribute to an input.

        Raises:
            LineWanted: it did.
        """
        for entry, name in self._given():
            raise LineWanted(
                lambda: TensorAttributes._running is not None and any(TensorAttributes._running._given()),
                ATTRIBUTE_SET,
                name=name,
                tensor=_label(entry),
            )

    def _given(self) -> Iterator[tuple[TracedInput, str]]:
        """The inputs that the program gave attributes to, and the names of these."""
        for entry, own in zip(self._inputs, self._own, strict=True):
            if not own.issuperset(entry.fake.__dict__):
                names = sorted(entry.fake.__dict__.keys() - own)
                yield from ((entry, name) for name in names if not name.startswith("_"))

    def asked(self, inputs: Sequence[TracedInput]) -> set[tuple[int, str]]:
        """The attributes that the program read, with the numbers of the inputs."""
        numbers = {id(entry): number for number, entry in enumerate(inputs)}
        return {(numbers[key], name) for key, name in self._asked if key in numbers}

    def identity(self, value: Any) -> int:
        """``id`` of a value; for a substitute that of the original."""
        entry = self._of.get(id(value))
        if entry is None:
            return id(value)
        if entry.slot is not None:
            self._asked.add((id(entry), IDENTITY))
            self.unused.discard(id(value))
        return id(entry.value)

    def _answer(self, fake: Any, name: str) -> Any:
        entry = None if name.startswith(_OF_DYNAMO) else self._of.get(id(fake))
        if type(entry) is WrapperInput and name.startswith("_"):  # of its class
            entry = None
        value = ABSENT if entry is None else vars(entry.value).get(name, ABSENT)
        if entry is not None and not (name in _OF_TORCH or name.startswith("__")):
            self._asked.add((id(entry), AskedAttribute.of(name)))
            self.unused.discard(id(fake))
        if value is ABSENT:
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        if not (isinstance(value, torch.Tensor) or _is_unchanging(value)):
            raise ATTRIBUTE_READ.error(name=name, tensor=_label(entry), kind=type(value).__name__)
        return self._fakes.get(id(value), value)


def _is_unchanging(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_unchanging, value))
    return isinstance(value, _UNCHANGING)


def _label(entry: Any) -> str:
    return f"`{entry.target or entry.name}`"
