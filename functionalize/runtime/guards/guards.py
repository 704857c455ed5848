"""All guards of a program: what it assumes of its calls, and whether a call satisfies it.

A :class:`Guards` is made from the :class:`Assumptions` of a capture. It is a list of kinds of guards, in the order in
which they are checked. :meth:`Guards.check` raises the error of the first kind that fails; :meth:`Guards.fast_code` has
the same kinds write the function that compares later calls; :meth:`Guards.listed` gives all guards as data.

Invariant: a call that passes is computed as the original would. Limits: a storage offset counts only if the program
asked for one, or if inputs share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

import torch

from functionalize._torch import ASKED_PROPERTIES, GRADIENT, HOOKS, KIND, LEAF, OFFSET, gradient_hooks
from functionalize.python_state.walk import StateWalk
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.guards.alias_pattern import Pattern, Shared, Sharing
from functionalize.runtime.guards.arguments import ArgumentStructure, ArgumentValues, InputSources
from functionalize.runtime.guards.guard import CallInputs, FastCode, Guard, GuardKind
from functionalize.runtime.guards.modes import GradModeGuard, ModeGuards, can_be_compared_fast
from functionalize.runtime.guards.python_guards import ChangedObjects, PythonGuards, changed_containers, changed_places
from functionalize.runtime.guards.shared_tensors import SharedTensors
from functionalize.runtime.guards.sizes import SizeGuards
from functionalize.runtime.guards.tensors import (
    HAS_GRADIENT,
    IDENTITY,
    REQUIRES_GRAD,
    AskedAttribute,
    GradientProperties,
    InputProperty,
    RequiresGrad,
    TensorProperties,
    Wrappers,
    answer_of,
    asked_properties,
    strides_and_offset,
    strides_that_count,
)
from functionalize.runtime.metadata import GraphInput, ProgramMetadata

_requires_grad, _is_leaf = attrgetter("requires_grad"), attrgetter("is_leaf")


@dataclass(frozen=True, eq=False)
class Assumptions:
    """What a capture assumes, and a call must satisfy."""

    modes: Mapping[str, Any]
    python_guards: PythonGuards
    state: StateWalk
    arguments: CallArguments
    values: Sequence[Any]  # of the inputs
    sizes: SizeGuards | None
    gradients_matter: bool  # whether it always matters which inputs have a gradient, whatever the program asked
    asked: Set[tuple[int, str]]  # questions that the program asked, or may have asked: numbers of inputs, names
    written: Set[int]  # inputs that the program writes under autograd, even without a change: leaves refuse that
    seen_layouts: Set[int]  # gradients whose memory layout the program may see
    asks_kinds: bool  # whether the program may ask for the classes of tensors of its state


class Guards:
    """What one program assumes of its calls, and where it finds its inputs."""

    def __init__(self, metadata: ProgramMetadata, assumed: Assumptions) -> None:
        self.metadata, self.state = metadata, assumed.state
        self.modes, self.sizes = dict(assumed.modes), assumed.sizes
        self.python_guards = assumed.python_guards.without(changed_places(metadata, assumed.state))
        self.sources = InputSources(metadata.inputs)
        self.had_gradient = _had_gradient(metadata, assumed)
        self.asked = _answers(metadata, assumed, self.changes)
        inputs, values = metadata.inputs, assumed.values
        wrappers = {n for n, entry in enumerate(inputs) if entry.wrapping is not None}
        owners = dict(self.sources.gradients)
        if wrappers:
            owners |= {n: owners[e.part.wrapper] for n, e in enumerate(inputs) if e.part and e.part.wrapper in owners}
        self.sharing = Sharing(metadata, values, owners)
        structure, constants = ArgumentStructure(assumed.arguments, inputs), ArgumentValues(assumed.arguments)
        self._of_arguments = structure, constants
        self._of_python: Sequence[GuardKind] = (structure, ModeGuards(self.modes), constants, self.python_guards)
        tensors = {n: v for n, v in enumerate(values) if n not in owners}
        gradients = {n: values[n] for n in owners}
        plain = {n: v for n, v in tensors.items() if n not in wrappers} if wrappers else tensors
        taken = {n: gradient for n, gradient in gradients.items() if n not in metadata.unused}
        # A gradient that the capture has only supposed is represented by its owner, and requires none.
        requiring = {n: v.requires_grad and v is not values[owners[n]] for n, v in gradients.items()}
        self._of_tensors: Sequence[GuardKind] = (
            SharedTensors(metadata, values, assumed.state, kinds=assumed.asks_kinds),
            *([Wrappers(inputs, wrappers)] if wrappers else ()),
            TensorProperties(inputs, plain, self.dynamic),
        )
        further: Sequence[GuardKind | None] = (
            GradientProperties(inputs, taken, self.dynamic),
            *asked_properties(inputs, self.asked),
            InputProperty(inputs, HAS_GRADIENT, _has_gradient, self.had_gradient),
            ChangedObjects(metadata, assumed.state),
            assumed.sizes,
            self.sharing,
            # The guards for which a call may be captured again come last: if one fails, all others hold.
            GradModeGuard(self.modes),
            RequiresGrad(inputs, REQUIRES_GRAD, _requires_grad, _read(_requires_grad, tensors)),
            InputProperty(inputs, REQUIRES_GRAD, _requires_grad, requiring),
            InputProperty(inputs, LEAF, _is_leaf, _leaves(metadata, assumed)),
            *_gradient_layouts(metadata, assumed, self.dynamic),
        )
        self._further = [guards for guards in further if guards is not None and not guards.is_empty]

    @property
    def inputs(self) -> Sequence[GraphInput]:
        """The program's inputs."""
        return self.metadata.inputs

    @property
    def changes_gradients(self) -> bool:
        """Whether, after a call, other tensors have gradients than the guards require before it."""
        left = {number: gradient is not None for number, gradient in self.metadata.gradients.items()}
        return any(self.had_gradient.get(number, has) is not has for number, has in left.items())

    @property
    def dynamic(self) -> Set[int]:
        """The inputs whose sizes may differ."""
        return frozenset() if self.sizes is None else self.sizes.inputs

    @property
    def changes(self) -> set[int]:
        """The identities of containers that the program changes or replaces, or whose tensors get other metadata."""
        return changed_containers(self.metadata, self.state)

    @property
    def inputs_are_disjoint(self) -> bool:
        """Whether no two inputs share memory."""
        return not any(isinstance(entry, Shared) for entry in self.aliasing)

    @property
    def aliasing(self) -> Pattern:
        """How inputs share memory."""
        return self.sharing.pattern

    def listed(self) -> Iterator[Guard]:
        """The guards as data."""
        for guards in (*self._of_python, *self._of_tensors, *self._further):
            yield from guards.listed()
        for decision in self.metadata.graph.decisions:
            yield Guard("the data", f"decision at {decision.location} ->", decision.answer)

    def check(self, arguments: CallArguments) -> list[Any]:
        """The program's inputs for a call, which are checked; of examples, the tensors are not compared.

        Raises:
            InputMismatchError: the call's inputs differ from those that the program was captured for.
        """
        call = CallInputs(arguments, examples=self._passed if arguments.are_examples else frozenset())
        _check(self._of_python, call)
        values = self.sources.values(arguments)
        call.values = values
        _check(self._of_tensors, call)
        _check(self._further, call)
        return values

    def check_arguments(self, arguments: CallArguments) -> None:
        """Check the nesting of a call's arguments, and their plain values, but not their tensors.

        Raises:
            InputMismatchError: the program was captured with other arguments.
        """
        _check(self._of_arguments, CallInputs(arguments))

    def fast_code(self, arguments: CallArguments, values: Sequence[Any]) -> FastCode | None:
        """Code that compares calls with one that passed; ``values``: its inputs. None if torch cannot compare them."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
            return None
        if any(entry.wrapping is not None for entry in self.inputs):
            return None
        if not can_be_compared_fast():
            return None
        code = FastCode(CallInputs(arguments, values))
        for guards in self._of_python:
            guards.write(code)
        self.sources.write(code)
        for guards in self._of_tensors:
            guards.write(code)
        self.sources.write_gradients(code)
        for guards in self._further:
            guards.write(code)
        return code

    def missing_gradients(self, values: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Zeros, by input, for missing gradients to which the program adds."""
        return {
            number: torch.zeros_like(values[source])
            for number, source in self.sources.gradients.items()
            if values[number] is None and number not in self.metadata.unused
        }

    @cached_property
    def _passed(self) -> frozenset[int]:
        """The inputs that are arguments, and their gradients."""
        passed = {number for number, entry in enumerate(self.inputs) if entry.argument is not None}
        return frozenset(n for n, entry in enumerate(self.inputs) if n in passed or entry.gradient_of in passed)


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad is not None


def _check(kinds: Sequence[GuardKind], call: CallInputs) -> None:
    for guards in kinds:
        error = guards.failure(call)
        if error is not None:
            raise error


def _read(read: Callable[[Any], Any], values: Mapping[int, Any]) -> dict[int, Any]:
    return {number: read(value) for number, value in values.items() if isinstance(value, torch.Tensor)}


def _gradient_layouts(
    metadata: ProgramMetadata, assumed: Assumptions, dynamic: Set[int]
) -> tuple[InputProperty, InputProperty]:
    """The memory layouts of gradients, if the program may see them."""
    fixed = {number for number in assumed.seen_layouts if metadata.inputs[number].gradient_of not in dynamic}
    with_offset = {number for number in fixed if (number, OFFSET) in assumed.asked}

    def layouts(read: Callable[[Any], Any], numbers: Set[int]) -> InputProperty:
        expected = _read(read, {number: assumed.values[number] for number in sorted(numbers)})
        return InputProperty(metadata.inputs, "memory layout", read, expected)

    return layouts(strides_that_count, fixed - with_offset), layouts(strides_and_offset, with_offset)


def _had_gradient(metadata: ProgramMetadata, assumed: Assumptions) -> dict[int, bool]:
    """Whether an input had a gradient, for inputs where that matters."""
    return {
        number: _has_gradient(value)
        for number, value in enumerate(assumed.values)
        if (assumed.gradients_matter or (number, GRADIENT) in assumed.asked)
        if isinstance(value, torch.Tensor) and value.is_leaf
        if value.requires_grad or value.grad is not None or number in metadata.gradients
    }


def _leaves(metadata: ProgramMetadata, assumed: Assumptions) -> dict[int, bool]:
    """Whether an input was a leaf, for inputs where that matters."""
    matter = {mutation.input for mutation in metadata.mutations} | set(metadata.gradients)
    matter |= {number for number, _ in metadata.requiring} | assumed.written
    matter |= {entry.gradient_of for entry in metadata.inputs if entry.gradient_of is not None}
    matter |= {number for number, entry in enumerate(metadata.inputs) if entry.base_of is not None}
    matter |= {number for number, question in assumed.asked if question == LEAF}
    return {n: v.is_leaf for n, v in enumerate(assumed.values) if n in matter and isinstance(v, torch.Tensor)}


def _answers(metadata: ProgramMetadata, assumed: Assumptions, changes: Set[int]) -> dict[tuple[int, str], Any]:
    """The answers of inputs to the questions to which calls must give the same answers."""
    return {
        (number, question): answer_of(question, assumed.values[number])
        for number, question in sorted(assumed.asked, key=itemgetter(1, 0))
        if _is_compared(question, assumed.values[number], metadata.inputs[number], changes)
    }


def _is_compared(question: str, value: Any, entry: GraphInput, changes: Set[int]) -> bool:
    if question in (KIND, IDENTITY) or isinstance(question, AskedAttribute):
        return True
    if question not in ASKED_PROPERTIES or value.layout is not torch.strided or entry.gradient_of is not None:
        return False
    # A program that removes hooks is not compared by them.
    return not (question == HOOKS and any(id(hooks) in changes for hooks in gradient_hooks(value)))
