"""What a program takes for granted of its calls, as data, and whether a call is such.

What is compared stands in tables: the modes of torch (:data:`~functionalize.runtime.guards.modes.MODES`), the
properties of a tensor (:mod:`~functionalize.runtime.guards.tensors`), Python values
(:mod:`~functionalize.runtime.guards.python_guards`).

Invariant: what passes here is computed as the original would. Limits: a storage offset counts where the program asked
for one, or where inputs share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from functionalize._torch import (
    ASKED_PROPERTIES,
    FOLLOWED_VIEW,
    GRADIENT,
    HOOKS,
    KIND,
    LEAF,
    LEAF_VIEW,
    OFFSET,
    SILENT_VIEW,
    VIEW,
    gradient_hooks,
)
from functionalize.errors import GradientMismatchError, InputMismatchError, NumberMismatchError, StateMismatchError
from functionalize.python_state.containers import ABSENT, SetItems, place_of, read
from functionalize.python_state.reconstruct import TensorRef
from functionalize.python_state.snapshot import frozen, same
from functionalize.python_state.traversal_rules import PLAIN
from functionalize.python_state.walk import StateWalk, containers_inside, joined
from functionalize.runtime.arguments import CallArguments, InputSources
from functionalize.runtime.guards.alias_pattern import Pattern, Sharing, relation
from functionalize.runtime.guards.modes import GRAD_MODE, modes_now
from functionalize.runtime.guards.python_guards import LENGTH, Settings, is_numbers
from functionalize.runtime.guards.shared_tensors import SharedPlaces
from functionalize.runtime.guards.sizes import SizeGuards
from functionalize.runtime.guards.tensors import (
    IDENTITY,
    INFERENCE,
    REQUIRES_GRAD,
    STRIDES,
    TENSOR_PROPERTIES,
    AskedAttribute,
    Dimensions,
    Laid,
    answer_of,
    is_answer,
)
from functionalize.runtime.metadata import GraphInput, OutputAlias, ProgramMetadata

_SINGULAR, _WHEN = ("is", "was"), "when the program was captured"
_CHANGES_IT = (
    "the program changes it, and supports only the value from the capture: restore that value, or capture again"
)
_HINT = "pass inputs like those of the capture, capture again, or capture with on_guard_failure='recapture'"


class Guard(NamedTuple):
    """One thing that a program takes for granted: a property of a mode, an input, an argument or a Python value.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> guards = capture(lambda x: x + 1, (torch.zeros(3),)).guards
        >>> [str(guard) for guard in guards if guard.property == "size"]
        ['the input `x`: size (3,)']
    """

    subject: str
    property: str
    expected: Any

    def __str__(self) -> str:
        return f"{self.subject}: {self.property} {_words(self.expected)}"


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
_PROPERTIES = tuple(TENSOR_PROPERTIES)
_READ = tuple(TENSOR_PROPERTIES.values())
_SIZE, _STRIDES = _PROPERTIES.index("size"), _PROPERTIES.index(STRIDES)


@dataclass(frozen=True, eq=False)
class Assumptions:
    """What a capture found, which a call must find again."""

    modes: Mapping[str, Any]
    settings: Settings
    state: StateWalk
    arguments: CallArguments
    values: Sequence[Any]  # of the inputs
    sizes: SizeGuards | None
    gradients_matter: bool  # whether it matters which of the inputs have a gradient, whoever asked
    asked: Set[tuple[int, str]]  # what the program asked, or may have asked, of inputs, by their numbers
    written: Set[int]  # inputs that autograd saw being written, also where nothing changed: leaves refuse that
    laid_out: Set[int]  # gradients of which it may see how they lie
    asks_kinds: bool  # whether the program may ask of which classes tensors of its state are


class Guards:
    """What one program takes for granted, and where it finds its inputs."""

    def __init__(self, metadata: ProgramMetadata, found: Assumptions) -> None:
        self.metadata, self.state = metadata, found.state
        self.modes, self.sizes = dict(found.modes), found.sizes
        self.structure, values = found.arguments.structure, found.values
        self.settings = found.settings.without(_changed(metadata, found.state))
        self._constants = [(slot.path, frozen(slot.get(), {})) for slot in found.arguments.walk.constants]
        self._looks = [self._look(number, value) for number, value in enumerate(values)]
        self.had_gradient = {
            number: value.grad is not None
            for number, value in enumerate(values)
            if (found.gradients_matter or (number, GRADIENT) in found.asked)
            if isinstance(value, torch.Tensor) and value.is_leaf
            if value.requires_grad or value.grad is not None or number in metadata.gradients
        }
        written = {m.input for m in metadata.mutations} | set(metadata.gradients) | {n for n, _ in metadata.requiring}
        written |= found.written | {entry.gradient_of for entry in self.inputs if entry.gradient_of is not None}
        written |= {number for number, entry in enumerate(self.inputs) if entry.base_of is not None}
        self.leaves = {
            number: value.is_leaf
            for number, value in enumerate(values)
            if ((number, LEAF) in found.asked or number in written) and isinstance(value, torch.Tensor)
        }
        self.asked = {
            (number, name): answer_of(name, values[number])
            for number, name in sorted(found.asked, key=itemgetter(1, 0))
            if self._is_compared(number, name, values[number])
        }
        fixed = [number for number in found.laid_out if self.inputs[number].gradient_of not in self.dynamic]
        offsets = {number for number, name in found.asked if name == OFFSET}
        self._laid = Laid({number: values[number] for number in fixed}, offsets)
        self.sources = InputSources(self.inputs)
        self.sharing = Sharing(values, dict(self.sources.gradients), metadata.unused)
        self.shared_places = SharedPlaces(metadata, values, found.state, kinds=found.asks_kinds)

    def _is_compared(self, number: int, question: str, value: Any) -> bool:
        """Whether calls are to give the answer that an input gave."""
        if question in (KIND, IDENTITY) or isinstance(question, AskedAttribute):
            return True
        if question not in ASKED_PROPERTIES:
            return False
        if value.layout is not torch.strided or self.inputs[number].gradient_of is not None:
            return False
        return not (question == HOOKS and self.changes.intersection(map(id, gradient_hooks(value))))  # it removes some

    @property
    def inputs(self) -> Sequence[GraphInput]:
        """The program's inputs."""
        return self.metadata.inputs

    @property
    def changes_gradients(self) -> bool:
        """Whether a call leaves other tensors with gradients than it must find."""
        left = {number: given is not None for number, given in self.metadata.gradients.items()}
        return any(self.had_gradient.get(number, given) is not given for number, given in left.items())

    @property
    def dynamic(self) -> Set[int]:
        """The inputs whose sizes may differ."""
        return frozenset() if self.sizes is None else self.sizes.inputs

    @property
    def changes(self) -> set[int]:
        """The identities of containers that the program changes or replaces, and of what holds tensors it moves."""
        changed = _changed(self.metadata, self.state)
        return {container for container, _ in changed} | containers_inside(self.state, changed)

    @property
    def inputs_are_disjoint(self) -> bool:
        """Whether no two inputs share memory."""
        return not any(isinstance(entry, tuple) for entry in self.aliasing)

    @property
    def aliasing(self) -> Pattern:
        """How inputs share memory."""
        return self.sharing.pattern

    def listed(self) -> Iterator[Guard]:
        """The guards as data."""
        yield from (Guard("the call", name, value) for name, value in self.modes.items())
        yield from (Guard(f"the argument `{path}`", "value", value) for path, value in self._constants)
        yield from (Guard(f"`{setting.path}`", "value", setting.content) for setting in self.settings.found)
        for entry, look in zip(self.inputs, self._looks, strict=True):
            if look is not None and entry.gradient_of is None:
                yield from (Guard(entry.label, *pair) for pair in zip(_PROPERTIES, look, strict=True))
        labels = [entry.label for entry in self.inputs]
        yield from (Guard(labels[number], name, answer) for (number, name), answer in self.asked.items())
        yield from (Guard(labels[number], LEAF, leaf) for number, leaf in self.leaves.items())
        yield from (Guard(labels[number], "has a gradient", had) for number, had in self.had_gradient.items())
        shared = [(number, entry) for number, entry in enumerate(self.aliasing) if isinstance(entry, tuple)]
        yield from (Guard(labels[n], f"shares memory with {labels[entry[0]]}", entry[1:]) for n, entry in shared)
        yield from (Guard("the sizes", "satisfy", one) for one in (self.sizes.listed() if self.sizes else ()))
        decisions = self.metadata.graph.decisions
        yield from (Guard("the data", f"decision at {one.location} ->", one.answer) for one in decisions)

    def check(self, arguments: CallArguments) -> list[Any]:
        """The program's inputs for a call, once they have been checked; of examples all but the tensors themselves.

        Raises:
            InputMismatchError: the call's inputs differ from those that the program was captured for.
        """
        self._check_structure(arguments)
        modes = modes_now()
        for name, before in self.modes.items():
            if name != GRAD_MODE and modes[name] != before:
                _refuse(f"the {name}", modes[name], before)
        self._check_constants(arguments)
        self._check_settings()
        values = self.sources.values(arguments)
        examples: Set[int] = self._passed if arguments.are_examples else frozenset()
        self.shared_places.check(values, lambda: self.changes, examples)
        self._check_tensors(values, examples)
        self._check_presence(values, examples)
        self.check_side_effects(arguments, values)
        if self.sizes is not None and not arguments.are_examples:
            self.sizes.check(values)
        self._check_aliasing(self.sharing.now(values), examples)
        if modes[GRAD_MODE] != self.modes[GRAD_MODE]:  # what can be followed comes last: all else is as it was
            _refuse(f"the {GRAD_MODE}", modes[GRAD_MODE], self.modes[GRAD_MODE], GradientMismatchError)
        self._check_gradients(values, examples)
        return values

    def check_arguments(self, arguments: CallArguments) -> None:
        """Of a call's arguments what does not depend on tensors: how they are nested, and the plain values.

        Raises:
            InputMismatchError: the program was captured with others.
        """
        self._check_structure(arguments)
        self._check_constants(arguments)

    def _check_structure(self, arguments: CallArguments) -> None:
        if arguments.structure != self.structure:
            raise InputMismatchError(
                "the arguments are nested differently than when the program was captured",
                hint="pass containers of the same types and lengths, or capture again",
            )

    def _look(self, number: int, value: Any) -> Any:
        """What an input looks like, its sizes left out where they may differ."""
        if not isinstance(value, torch.Tensor):
            return None
        look = [read(value) for read in _READ]
        if number in self.dynamic:
            look[_SIZE], look[_STRIDES] = Dimensions(value.dim()), None
        return look

    def _check_constants(self, arguments: CallArguments) -> None:
        for slot, (path, before) in zip(arguments.walk.constants, self._constants, strict=True):
            if not same(frozen(slot.get(), {}), before):
                _refuse(f"the argument `{path}`", slot.get(), before)

    def _check_settings(self) -> None:
        found = self.settings.differing()
        if found is not None:
            setting, now = found
            numbers = setting.key is not LENGTH and is_numbers(now) and is_numbers(setting.value)
            kind = partial(NumberMismatchError, key=setting.key) if numbers else StateMismatchError
            _refuse(f"`{setting.path}`", now, setting.content, kind, container=setting.container)

    def compares(self, container: Any, key: Any) -> bool:
        """Whether a value of Python state counts."""
        same_place = (one for one in self.settings.found if one.container is container)
        plain = type(key) in PLAIN  # keys of a program's own classes are asked nothing
        return any(one.key is key or (plain and type(one.key) is type(key) and one.key == key) for one in same_place)

    @cached_property
    def _passed(self) -> frozenset[int]:
        """The inputs that are arguments, and their gradients."""
        passed = {number for number, entry in enumerate(self.inputs) if entry.argument is not None}
        return frozenset(n for n, entry in enumerate(self.inputs) if n in passed or entry.gradient_of in passed)

    def _check_tensors(self, values: Sequence[Any], examples: Set[int]) -> None:
        for number, (entry, value, before) in enumerate(zip(self.inputs, values, self._looks, strict=True)):
            now = self._look(number, value)
            absent = entry.gradient_of is not None and (value is None or number in self.metadata.unused)
            if now == before or absent or number in examples:
                continue
            if now is None or before is None:
                one, other = ("no tensor" if look is None else "a tensor" for look in (now, before))
                said = f"{entry.label} is {one}, and was {other} {_WHEN}"
                raise InputMismatchError(said, hint=_HINT, container=self._container(number))
            for name, one, other in zip(_PROPERTIES, now, before, strict=True):
                if one != other and name != REQUIRES_GRAD and (entry.gradient_of is None or name != STRIDES):
                    self._refuse_property(number, name, one, other)
        for (number, name), before in self.asked.items():
            if number not in examples and not is_answer(name, values[number], before):
                self._refuse_property(number, name, answer_of(name, values[number]), before)

    def agree(self, numbers: Sequence[int], values: Sequence[Any]) -> bool:
        """Whether some gradients look as they did."""
        alike = all(values[n] is None or self._look(n, values[n]) == self._looks[n] for n in numbers)
        return alike and self._laid.differing(values) is None

    def _check_presence(self, values: Sequence[Any], examples: Set[int]) -> None:
        for number, had in self.had_gradient.items():
            if number not in examples and (values[number].grad is not None) != had:
                raise GradientMismatchError(
                    f"{self.inputs[number].label} has {'no' if had else 'a'} gradient, and had "
                    f"{'one' if had else 'none'} when the program was captured",
                    hint="set gradients to None before the call, as optimizer.zero_grad() does, or capture again",
                )

    def _check_gradients(self, values: Sequence[Any], examples: Set[int]) -> None:
        """What autograd tells of the inputs: which require some, which that change are leaves, how gradients lie."""
        for number, (value, look) in enumerate(zip(values, self._looks, strict=True)):
            if number not in examples and look is not None and value is not None and value.requires_grad != look[-1]:
                self._refuse_property(number, REQUIRES_GRAD, value.requires_grad, look[-1], GradientMismatchError)
        for number, before in self.leaves.items():
            if number not in examples and values[number] is not None and values[number].is_leaf != before:
                self._refuse_property(number, LEAF, values[number].is_leaf, before, GradientMismatchError)
        found = self._laid.differing(values)
        if found is not None and found[0] not in examples:
            number, now, lay = found
            self._refuse_property(number, "memory layout", now, lay, GradientMismatchError)

    def _refuse_property(
        self, number: int, name: str, now: Any, before: Any, kind: type[InputMismatchError] = InputMismatchError
    ) -> None:
        label, said, container = self.inputs[number].label, _TRUE_OR_NOT.get(name), self._container(number)
        if said is None:
            verbs = ("are", "were") if name == STRIDES else _SINGULAR
            _refuse(f"the {name} of {label}", now, before, kind, verbs, container)
        else:
            raise kind(f"{label} {said[now][0]}, and {said[before][1]} {_WHEN}", hint=_HINT, container=container)

    def _container(self, number: int) -> Any:
        """What an input of the program's state sits in."""
        slot = self.inputs[number].slot
        return None if slot is None else place_of(slot.container, slot.key)[0]

    def missing_gradients(self, values: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Zeros for the gradients that will be added to and are not there, by input."""
        if not self.sources.gradients:
            return {}
        return {
            number: torch.zeros_like(values[entry.gradient_of])
            for number, entry in enumerate(self.inputs)
            if entry.gradient_of is not None and values[number] is None and number not in self.metadata.unused
        }

    def check_side_effects(self, arguments: CallArguments, values: Sequence[Any]) -> None:
        """What the program changes must be found as the capture found it.

        Raises:
            StateMismatchError: it is not.
        """
        states = self.state, arguments.walk
        for effect in self.metadata.side_effects:
            container = list(states[effect.state].containers.values())[effect.container][0]
            if effect.length not in (None, len(container)):
                raise StateMismatchError(
                    f"`{effect.path}` has {len(container)} items, and had {effect.length} {_WHEN}",
                    hint=_CHANGES_IT,
                    container=place_of(container, 0)[0],
                )
            if not effect.is_in_order(container):
                said = f"`{effect.path}` has its keys in the order {tuple(container)}, and had {effect.order} {_WHEN}"
                raise StateMismatchError(said, hint=_CHANGES_IT, container=container)
            items = container if isinstance(container, SetItems) else ()  # in Python's order
            for name, before in effect.before.items():
                number = self._input_of(name) if isinstance(name, TensorRef) else None
                now = read(container, name if number is None else values[number])
                label = name if number is None else self.inputs[number].target
                if not any(before.is_found(one, states) for one in (now, *items)):
                    told, was = before.told(now, states, _words)
                    raise StateMismatchError(
                        f"`{joined(effect.path, label)}` is {told}, and was {was} {_WHEN}",
                        hint=_CHANGES_IT,
                        container=place_of(container, label)[0],
                    )

    def _input_of(self, name: TensorRef) -> int:
        alias: OutputAlias = self.metadata.outputs[name.number]
        assert alias.input is not None
        return alias.input

    def _check_aliasing(self, pattern: Pattern, examples: Set[int]) -> None:
        for number in sorted(
            range(len(pattern)), key=self.sharing.gradients.__contains__
        ):  # what can be followed comes last
            if (now := pattern[number]) != (before := self.aliasing[number]):
                first = (now if isinstance(now, tuple) else before)[0]
                if not examples.isdisjoint((number, first)):
                    continue
                own = next((one for one in (number, first) if id(self._container(one)) in self.changes), number)
                kind = GradientMismatchError if number in self.sharing.gradients else InputMismatchError
                raise kind(
                    f"{self.inputs[number].label} and {self.inputs[first].label} {relation(now)}, and "
                    f"{relation(before)} {_WHEN}",
                    hint="pass tensors that share memory in the same way, or capture with on_guard_failure='recapture'",
                    container=self._container(own),
                )


def _changed(metadata: ProgramMetadata, state: StateWalk) -> set[tuple[int, Any]]:
    """What a program changes itself, or makes look otherwise: the entries of containers by identity, and keys."""
    containers = [container for container, _ in state.containers.values()]
    places = [
        place_of(containers[effect.container], key)
        for effect in metadata.side_effects
        if effect.state == 0
        for key in (effect.before or (0,))
    ]
    moved = (metadata.inputs[one.input].slot for one in metadata.mutations if one.metadata or one.after)
    places += [place_of(slot.container, slot.key) for slot in moved if slot is not None]
    return {(id(container), key) for container, key in places}


def _refuse(
    what: str,
    now: Any,
    before: Any,
    kind: Callable[..., InputMismatchError] = InputMismatchError,
    verbs: tuple[str, str] = _SINGULAR,
    container: Any = None,
) -> None:
    said = f"{what} {verbs[0]} {_words(now)}, and {verbs[1]} {_words(before)} {_WHEN}"
    raise kind(said, hint=_HINT, container=container)


def _words(value: Any) -> str:
    return "not there" if value is ABSENT else repr(value)[:80]
