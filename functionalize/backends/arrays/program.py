"""A captured program as a pure function of a backend's arrays: ``(state, *args, **kwargs) -> (new_state, outputs)``.

State is a dict of arrays: parameters, buffers and other tensors of the program under their paths, the random key, and
gradients that the program leaves, as ``<parameter>.grad``. The new state has the same keys. Where the program writes to
its arguments, ``outputs`` is :class:`Written`: what it returned, and those arguments with the new values.

Invariant: nothing that the program writes is dropped: it comes back as a value, or is refused before anything runs.
Limits: arguments that share memory are given by their values; what a call changes in Python objects is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functionalize._torch import pytree
from functionalize._torch.subclasses.wrappers import plain_part
from functionalize.backends.arrays.frozen_numbers import freeze_numbers
from functionalize.backends.arrays.interpreter import Backend, Interpreter, UnknownNumberError, refusal, without_dead
from functionalize.backends.arrays.leaves import Leaf as _Leaf
from functionalize.backends.arrays.leaves import in_key_order, no_array, plain
from functionalize.backends.arrays.sizes import ArraySizes
from functionalize.backends.preparation.new_values import (
    arguments_with_gradients,
    changes_metadata,
    unlike_memory,
    with_new_values,
)
from functionalize.backends.preparation.shared_memory import check_one_value, passed_state, with_shared_memory
from functionalize.backends.preparation.stopped_gradients import stopped_gradients
from functionalize.backends.preparation.wrappers import refuse_wrappers
from functionalize.errors import DataDependentError, UnsupportedProgramError
from functionalize.python_state.reconstruct import GraphNumber, Maker, Walked, tensors_in
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.decisions import same_answer
from functionalize.runtime.guards.alias_pattern import same_tensors
from functionalize.runtime.guards.modes import GRAD_MODE
from functionalize.runtime.metadata import GraphInput

RANDOM_KEY = "random_key"


_GOES_ON = "torch stops the gradient here, but the derivative of the graph would continue"


class Written(NamedTuple):
    """The result of a call of a program that writes to its arguments.

    ``returned``: the result of the program. ``arguments``: each argument that contains a written tensor, by parameter
    name, in the structure in which it was passed, with the new values.
    """

    returned: Any
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """The arrays of one call, and how its arguments are built."""

    inputs: dict[int, Any]  # by the number of the program's input
    arguments: CallArguments  # with tensors that stand for the arrays
    arrays: dict[int, Any]  # by the identity of these tensors
    positions: dict[int, int]  # of the same: the number of the program's input

    def after(self, written: Mapping[int, Any]) -> dict[int, Any]:
        """The arrays after a call that gives the inputs of some numbers others, by what stands for them."""
        return {marker: written.get(self.positions.get(marker, -1), array) for marker, array in self.arrays.items()}


class ArrayProgram:
    """A captured program over the arrays of a backend.

    Raises:
        UnsupportedProgramError: the backend cannot run it; the error has all causes, each with the user's line. Or the
            program ends gradients, and the backend does not say that it regards this.

    Example:
        See ``examples/numpy_backend.py``.
    """

    def __init__(
        self, specialization: Specialization, backend: Backend, key: Any = None, *, settled: bool = False
    ) -> None:
        """``key``: the first random key, for programs that draw. ``settled``: whether others see to what it makes."""
        self._settled = settled
        self._without: Collection[int] = ()  # inputs that are not there yet
        self.backend, self.metadata = backend, specialization.metadata
        refuse_wrappers(self.metadata)
        self._capture = specialization.capture
        self._same = same_tensors(self._capture.guards.aliasing)
        recorded = specialization.recorded
        self.decided = decided = freeze_numbers(recorded.graph, recorded.root, self.metadata)
        graph, unseen = with_shared_memory(decided.graph, self.metadata, self._capture.guards.aliasing)
        graph, self.new_values = with_new_values(graph, self.metadata, self._capture.guards.aliasing)
        self.interpreter = Interpreter(backend, without_dead(graph), recorded.root)
        causes = [*decided.causes, *unseen, *self._causes(), *self.interpreter.causes()]
        if causes:
            raise refusal(backend, causes)
        self.new_values |= {n: at for n, one in self._same.items() if (at := self.new_values.get(one)) is not None}
        self._passed = passed_state(self._capture.guards.aliasing, self.metadata)
        self.keys = self._state_keys()
        self._gradients = self._gradient_keys()
        self._returned = self._result_positions()
        self._first_key = key
        follows = self._capture.guards.modes[GRAD_MODE]  # else nobody asks torch for gradients
        self.stopped = stopped_gradients(self._capture, self._returned) if follows else []
        if self.stopped and backend.differentiates is None:
            raise UnsupportedProgramError.of_causes(
                f"{backend.name} cannot run a program that stops gradients itself",
                [(line, _GOES_ON) for line in self.stopped],
                "pass Backend(..., differentiates=False) if nobody differentiates the results, or "
                "differentiates=True if the backend stops gradients at ArrayProgram.stopped; or capture under "
                "torch.no_grad()",
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.described()})"

    def described(self) -> str:
        """The backend, the arguments, the state and what of it a call writes, as text."""
        rows = {"arguments": list(self.looks), "state": list(self.keys.values()), "written": sorted(self.written)}
        said = [f"{what}: {', '.join(names)}" for what, names in rows.items() if names]
        return "; ".join([self.backend.name, *said])

    def __call__(self, state: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """The new state and what the program returns, from a state and arguments as the original's.

        Raises:
            InputMismatchError: arguments are nested differently from those of the capture, or of other sizes.
        """
        prepared = self.prepare(args, kwargs)
        return self.finished(state, prepared, self.run(state, prepared.inputs))

    def finished(
        self, state: Mapping[str, Any], prepared: Prepared, found: tuple[dict[str, Any], dict[int, Any], Sequence[Any]]
    ) -> tuple[dict[str, Any], Any]:
        """The new state and the outputs, of what :meth:`run` gave.

        Raises:
            DataDependentError: the data take another branch than when the program was captured.
        """
        new, written, results = found
        self.check_decisions([results[one.output] for one in self.decided.asked])
        after = {**state, **new}
        outputs = self.outputs(results, after, prepared.after(written), [prepared.arguments])
        if self.written_inputs:
            outputs = Written(outputs, self.arguments_after(prepared, written))
        return after, outputs

    @property
    def decides(self) -> bool:
        """Whether a call compares decisions once it has run."""
        return bool(self.decided.asked)

    def check_decisions(self, values: Sequence[Any]) -> None:
        """Compare the decisions with what a run gave for them; the error is that of :meth:`finished`."""
        for one, value in zip(self.decided.asked, values, strict=True):
            try:
                plain = isinstance(value, (bool, int, float, complex))
                agrees = same_answer(value if plain else self.backend.number(value), one.answer)
            except UnknownNumberError as error:
                raise UnsupportedProgramError(
                    "the program branches on tensor values", why=str(error), hint=_UNKNOWN, at=one.location
                ) from None
            if not agrees:
                raise DataDependentError(
                    f"the program takes another branch for this data than when it was captured\n    at   {one}",
                    why="the function holds only the branches that were captured; no state has changed",
                    hint="call the program with such data, and make another function from it",
                )

    @property
    def looks(self) -> dict[str, torch.Tensor]:
        """What the tensors among the arguments look like, by the names of the graph's inputs."""
        pairs = zip(self.metadata.taken, self.interpreter.placeholders, strict=True)
        given = [node for number, node in pairs if self.metadata.inputs[number].argument is not None]
        return {node.name: look for node in given if isinstance(look := node.meta["val"], torch.Tensor)}

    @functools.cached_property
    def draws(self) -> bool:
        """Whether a call may draw random numbers."""
        return self.interpreter.draws

    # State

    def initial_state(self) -> dict[str, Any]:
        """The state as the program's objects have it now, as arrays of the backend."""
        found = {}
        for number, name in self.keys.items():
            if number not in self._without:
                found[name] = self.backend.array(self._now(self.metadata.inputs[number]).detach())
        for number, name in self._gradients.items():
            if name not in found and number not in self._without:
                found[name] = self.backend.array(torch.zeros_like(self._now(self.metadata.inputs[number])).detach())
        if self.draws:
            found[RANDOM_KEY] = self._first_key
        return found

    @property
    def written(self) -> frozenset[str]:
        """The keys of the state that a call gives new values."""
        found = {self.keys[number] for number in self.new_values if number in self.keys}
        return frozenset(found | set(self._gradients.values()) | ({RANDOM_KEY} if self.draws else set()))

    @property
    def written_inputs(self) -> frozenset[int]:
        """The numbers of the arguments' tensors that a call gives new values."""
        return frozenset(n for n in self.new_values if self.metadata.inputs[n].argument is not None)

    def _now(self, entry: GraphInput) -> torch.Tensor:
        if entry.gradient_of is not None:
            of = self._now(self.metadata.inputs[entry.gradient_of])
            return torch.zeros_like(of) if of.grad is None else of.grad
        if entry.part is not None:  # perhaps of a gradient
            part: torch.Tensor = plain_part(self._now(self.metadata.inputs[entry.part.wrapper]), entry.part.path)
            return part
        value: torch.Tensor = entry.now()
        return value

    def _state_keys(self) -> dict[int, str]:
        """What the state calls the inputs of the graph that are no arguments."""
        names: dict[int, str] = {}
        for number in self.metadata.taken:
            entry = self.metadata.inputs[number]
            if entry.argument is None and number not in self.decided.frozen and number not in self._passed:
                name = entry.target or entry.name
                if self._settled and entry.slot is None and entry.gradient_of is None:
                    name = f"first_call.{name}"  # a constant, which another program may call so as well
                names[number] = entry.name if name in names.values() else name
        return names

    def _gradient_keys(self) -> dict[int, str]:
        """What the state calls the gradients that a call leaves, by the input whose gradient it is."""
        read = {e.gradient_of: self.keys[n] for n, e in enumerate(self.metadata.inputs) if n in self.keys}
        found = {}
        for number in self.metadata.gradients:
            entry = self.metadata.inputs[number]
            found[number] = read.get(number) or f"{entry.target or entry.name}.grad"
        return found

    # Calls

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        """The arrays of a call, checked against what the program was captured for.

        Raises:
            InputMismatchError: they are nested differently, or of other sizes.
        """
        arrays: list[tuple[torch.Tensor, Any]] = []  # each with a tensor that stands for it in the arguments

        def marked(leaf: Any) -> Any:
            if not self.backend.is_array(leaf):
                return leaf
            arrays.append((torch.empty(0), leaf))
            return arrays[-1][0]

        given = pytree.tree_map(marked, (list(args), dict(kwargs)))
        arguments = self._capture.convention.arguments(*given)
        self._capture.guards.check_arguments(arguments)
        known = {id(marker): array for marker, array in arrays}
        positions, inputs, leaves = {}, {}, arguments.leaves
        for number, entry in enumerate(self.metadata.inputs):
            if entry.argument is not None and entry.is_tensor:
                marker = leaves[entry.argument]
                if id(marker) not in known:
                    raise no_array(entry.label, marker)
                inputs[number], positions[id(marker)] = known[id(marker)], number
        self._sizes.check(inputs)
        check_one_value(self.metadata, self._same, inputs)
        return Prepared(inputs, arguments, known, positions)

    def in_key_order(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of a call by a library that sorts dicts, with their keys in the order of the capture."""
        nest, given = self._capture.convention.nest, (list(args), dict(kwargs))
        return given if nest is None else in_key_order(given, tuple(nest.filled(lambda: None)))

    @functools.cached_property
    def _sizes(self) -> ArraySizes:
        pairs = zip(self.metadata.taken, self.interpreter.placeholders, strict=True)
        looks = {number: look for number, node in pairs if isinstance(look := node.meta["val"], torch.Tensor)}
        return ArraySizes(self.metadata.inputs, looks, self._capture.guards.sizes)

    def example(self, make: Callable[[torch.Tensor], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as those of the capture, with what ``make`` gives for the fake tensor of each.

        Raises:
            UnsupportedProgramError: there are objects among them.
        """
        nest = self._capture.convention.nest
        if nest is None:
            raise UnsupportedProgramError(
                "the program was captured with arguments that are Python objects",
                why="an exported program is called with arrays in lists, tuples and dicts",
                hint="capture a function that takes the tensors inside",
                at="the capture",
            )
        args, kwargs = nest.filled(lambda: torch.empty(0))
        leaves = self._capture.convention.arguments(args, kwargs).leaves
        numbered = zip(self.metadata.taken, self.interpreter.placeholders, strict=True)
        fakes = {self.metadata.inputs[number].argument: node.meta.get("val") for number, node in numbered}
        tensors = {at: fake for at, fake in fakes.items() if at is not None and isinstance(fake, torch.Tensor)}
        known = {id(leaves[at]): make(fake) for at, fake in tensors.items()}
        args, kwargs = pytree.tree_map(lambda leaf: known.get(id(leaf), leaf), (args, kwargs))
        return args, kwargs

    def arguments_after(self, prepared: Prepared, new: Mapping[int, Any]) -> dict[str, Any]:
        """The arguments that a call writes to, by parameter name, built as they were passed."""
        convention, arguments = self._capture.convention, prepared.arguments
        positions, arrays = prepared.positions, prepared.after(new)
        found = {}
        names = zip((*convention.names, *arguments.kwargs), arguments.values, strict=True)
        for name, value in names:
            if any(positions.get(id(leaf)) in new for leaf in pytree.tree_leaves(value)):
                found[name] = pytree.tree_map(lambda leaf: arrays.get(id(leaf), leaf), value)
        return found

    def _result_positions(self) -> frozenset[int]:
        """The graph's outputs that the caller gets."""
        found: set[Any] = set()
        left = set(self.metadata.gradients.values()) - tensors_in(self.metadata.results)
        for number, alias in enumerate(self.metadata.outputs):
            found |= set() if number in left else {alias.result}
        found |= {made.position for made in self.metadata.results if isinstance(made, GraphNumber)}
        found |= set(self.metadata.graph.numbers)
        return frozenset(found - {None})

    def run(
        self, state: Mapping[str, Any], inputs: Mapping[int, Any]
    ) -> tuple[dict[str, Any], dict[int, Any], list[Any]]:
        """The written state, the written arguments and the graph's results.

        Args:
            state: arrays by key.
            inputs: arrays by the number of the program's input.
        """
        values = {**inputs, **{number: state[name] for number, name in self.keys.items()}}
        values |= {one: inputs[n] for one, n in self._passed.items() if one not in inputs}
        results, key = self.interpreter.run([values.get(n) for n in self.metadata.taken], state.get(RANDOM_KEY))
        new = {self.keys[n]: results[at] for n, at in self.new_values.items() if n in self.keys}
        for number, name in self._gradients.items():
            left = self.metadata.gradients[number]
            like = values[number]
            new[name] = like * 0 if left is None else results[self.metadata.outputs[left].result]  # type: ignore[index]
        if self.draws:
            new[RANDOM_KEY] = key
        arguments = {n: results[at] for n, at in self.new_values.items() if n in inputs}
        kept = self._returned.union(one.output for one in self.decided.asked)
        return new, arguments, [value if at in kept else None for at, value in enumerate(results)]

    def outputs(
        self,
        results: Sequence[Any],
        state: Mapping[str, Any],
        passed: Mapping[int, Any] = MappingProxyType({}),
        arguments: Sequence[Walked] = (),
    ) -> Any:
        """What the program returns, of tuples, lists and dicts; objects come as dicts of what in them is an array.

        ``state``, ``passed``: arrays after the call, the second by the identity of what stands for them in arguments.
        """

        def tensor(number: int) -> Any:
            return _Leaf(results[self.metadata.outputs[number].result])  # type: ignore[index]

        def array(held: torch.Tensor) -> Any:
            return after[id(held)] if id(held) in after else self.backend.array(held.detach())

        entries = ((self.metadata.inputs[n], name) for n, name in self.keys.items() if n not in self._without)
        after = {id(self._now(entry)): state[name] for entry, name in entries if entry.gradient_of is None}
        after |= passed
        known = [_Leaf(value) for value in results]
        maker = Maker([self._capture.state, *arguments], tensor, known, self.metadata.graph.numbers)
        leaves = [maker.make(made) for made in self.metadata.results]
        return plain(pytree.tree_unflatten(leaves, self.metadata.spec), array)

    # What stands in the way

    def _causes(self) -> list[tuple[str, str]]:
        found = []
        for mutation in self.metadata.mutations:
            why = changes_metadata(mutation, self.metadata, self._capture.guards.aliasing)
            if why is not None:
                found.append((self.metadata.inputs[mutation.input].label, why))
        found += unlike_memory(self.metadata, self._capture.guards.aliasing)
        found += [(label, _GRADIENT_LEFT) for label in arguments_with_gradients(self.metadata)]
        found += [(label, _CHANGED_OBJECT) for label in self._changed_objects()]
        if self.metadata.gives_gradients:
            found.append(("gradients of tensors that the program makes", "a graph's results have no gradients"))
        if self._capture.modes_left:
            found.append(
                (
                    ", ".join(self._capture.modes_left),
                    ("the program changes a setting of torch, which a graph cannot do"),
                )
            )
        read = {node.name for node in self.interpreter.placeholders if node.users}
        for entry in self.metadata.inputs:
            if entry.argument is not None and not entry.is_tensor and entry.name in read:
                found.append((entry.label, "it is a number that differs from call to call, and not a tensor"))
        return found

    def _changed_objects(self) -> list[str]:
        changed = [] if self._settled else [effect.path for effect in self.metadata.side_effects]
        found = [f"`{path}`" if path else "attributes of the module" for path in changed]
        found += ["a scheduler of learning rates"] if self.metadata.steps else []
        at_first = not self._settled and self._capture.guards.changes_gradients
        return [*found, "gradients left by a call"] if at_first else found


_UNKNOWN = (
    "call it outside a trace (`.jit()` compiles it and compares after each run); or do not branch on tensor values: "
    "use torch.where or torch.cond, or capture(..., is_exporting=True) for models from libraries"
)
_GRADIENT_LEFT = "the program leaves a gradient there, but arrays have no gradients: return it (torch.autograd.grad)"
_CHANGED_OBJECT = (
    "a call changes this Python object, and not only its tensors; for state that the first call creates, such as an "
    "optimizer's, call the original once before the capture"
)
