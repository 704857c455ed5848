"""Gradients of programs that end some on their own: as torch takes them, where the graph does not show where they end.

The program is captured once more, as a function of its arguments and of a cotangent for each value that it gives: it
asks autograd for the gradients. JAX runs that program where it would go backward through the graph.

Invariant: both programs are of one Python state, and draw the same random numbers. Limits: first derivatives, in
reverse; arguments and results in plain containers; state has gradients where it requires some in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import Node

from functionalize._torch import is_symbolic, pytree
from functionalize.backends.arrays.program import RANDOM_KEY, ArrayProgram
from functionalize.backends.jax.values import is_wide, wide_enough
from functionalize.backends.preparation.example_call import ExampleCall
from functionalize.backends.preparation.wrappers import ProgramOfParts
from functionalize.errors import InputMismatchError, UnsupportedProgramError
from functionalize.python_state.reconstruct import Reconstruction, TensorRef
from functionalize.python_state.slots import NumberSlot
from functionalize.runtime.arguments import Nest
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.guards.alias_pattern import Shared
from functionalize.runtime.guards.modes import in_modes
from functionalize.runtime.random_state import is_random

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram

State = dict[str, Any]
Inputs = dict[int, Any]
Values = tuple[State, Inputs, Sequence[Any]]  # as `ArrayProgram.run` gives them


class _NoBackwardError(Exception):
    """Why there is no such program."""


def with_own_gradients(
    program: ArrayProgram, captured: CapturedProgram, ending: Sequence[str] | None = None
) -> Callable[[State, Inputs], Values]:
    """The function ``program.run`` with torch's gradients; where there are none, JAX refuses to differentiate it.

    ``captured``: what it was made of. ``ending``: the lines where the user's program ends gradients, if it is another.
    """
    if ending is not None:
        what = "a program that stops gradients itself and changes Python objects"
        return _undifferentiable(program.run, ending, what) if ending else program.run
    if not program.stopped:
        return program.run
    try:
        backward = _Backward.of(program, captured)
    except (_NoBackwardError, RuntimeError, InputMismatchError) as error:  # ours, and those of operators
        return _undifferentiable(program.run, program.stopped, f"a program that stops gradients itself: {error}")
    run = jax.custom_vjp(program.run)
    run.defvjp(lambda state, inputs: (program.run(state, inputs), (state, inputs)), backward)
    return run


def _undifferentiable(function: Callable[..., Any], lines: Sequence[str], what: str) -> Callable[..., Any]:
    guarded = jax.custom_jvp(function)

    def refuse(*_: Any) -> Any:
        raise UnsupportedProgramError.of_causes(
            f"JAX cannot differentiate {what}",
            [(line, "torch stops the gradient here, but JAX would not: the graph does not show it") for line in lines],
            "compute the gradients in torch, inside the captured program (loss.backward(), torch.func.grad); or, to "
            "differentiate the graph as it is, capture under torch.no_grad()",
        )

    guarded.defjvp(refuse)
    return guarded


class _Backward:
    """``(saved, cotangents) -> gradients``, as ``jax.custom_vjp`` takes it."""

    def __init__(self, forward: ArrayProgram, ends: _Ends, program: ArrayProgram) -> None:
        """``program``: what :func:`_gradients` is as a program of arrays."""
        self._ends, self._initial, self._names = ends, program.initial_state(), _names(forward, program)
        self._wide = is_wide(program.interpreter.graph)
        self._run = _undifferentiable(
            lambda state, inputs, cotangents: program(state, inputs, cotangents)[1],
            forward.stopped,
            "a program that stops gradients itself a second time: its first derivatives are not differentiable",
        )

    @classmethod
    def of(cls, forward: ArrayProgram, captured: CapturedProgram) -> _Backward:
        """The program that computes the gradients.

        Raises:
            _NoBackwardError: there is none, and why.
        """
        if captured.specialization.metadata is not forward.metadata:
            raise _NoBackwardError("it changes Python objects")
        found = captured.specialization
        if isinstance(captured.original, ProgramOfParts) or any(entry.wrapping for entry in found.metadata.inputs):
            raise _NoBackwardError("gradients of tensor subclasses are no arrays")
        nest = _checked(forward, found)
        call = ExampleCall(found)
        found.guards.check(call.arguments)  # the state is that of the capture
        ends = _Ends.of(forward, _in_order(nest, found))
        examples = [call.arguments.leaves[forward.metadata.inputs[n].argument] for n in ends.inputs]  # type: ignore[index]
        zeros = [torch.zeros(fake.size(), dtype=fake.dtype) for fake in ends.likes]
        with in_modes(found.guards.modes):
            function = _gradients(captured.original, nest, ends)
            backward = captured.captured_again([examples, zeros], {}, function=function)
            program = ArrayProgram(backward.specialization, forward.backend)
        if _draws(forward) != _draws(program):
            raise _NoBackwardError("its backward draws other random numbers")
        return cls(forward, ends, program)

    def __call__(self, saved: tuple[State, Inputs], given: Values) -> tuple[State, Inputs]:
        state, inputs = saved
        ends = self._ends
        own = {**self._initial, **{mine: state[name] for mine, name in self._names.items() if name in state}}
        with wide_enough(self._wide, (saved, given)):
            cotangents = map(jnp.conj, ends.cotangents(given))  # torch's are JAX's, conjugated; so are gradients
            gradients = self._run(own, [inputs[number] for number in ends.inputs], list(cotangents))
            found = iter([jnp.conj(one) for one in gradients])
        of_inputs = {number: next(found) for number in ends.inputs if _is_float(inputs[number].dtype)}
        of_state = dict(zip(ends.parameters, found, strict=True))
        return {name: of_state.get(name) for name in state}, {number: of_inputs.get(number) for number in inputs}


@dataclass(frozen=True, eq=False)
class _Ends:
    """What of a call's values may have gradients, and what these flow to: in torch's terms, and in those of a call."""

    inputs: list[int]  # the tensors among the arguments, in the order of their nest
    leaves: dict[int, int]  # of what the program returns, by the position among the graph's results
    written: list[int]  # arguments, by the number of the program's input
    state: dict[str, torch.Tensor]  # that is written, by key
    parameters: dict[str, torch.Tensor]  # state that requires gradients, by key
    likes: list[torch.Tensor]  # fake tensors of the values

    @classmethod
    def of(cls, program: ArrayProgram, inputs: list[int]) -> _Ends:
        """Those of a program; ``inputs``: the tensors among the arguments."""
        metadata, leaves = program.metadata, dict[int, int]()
        for leaf, part in enumerate(metadata.results):
            at = metadata.outputs[part.number].result if isinstance(part, TensorRef) else None
            if at is not None:
                leaves.setdefault(at, leaf)
        held = _tensors_of_state(program)
        state, arguments, results = _fakes(program)
        leaves = {at: leaf for at, leaf in leaves.items() if _has_gradients(results[at])}
        written = [number for number, fake in arguments.items() if _has_gradients(fake)]
        kept = {name: held[name] for name, fake in state.items() if name in held and _has_gradients(fake)}
        likes = [results[at] for at in leaves] + [arguments[number] for number in written]
        parameters = {name: tensor for name, tensor in held.items() if tensor.requires_grad}
        return cls(inputs, leaves, written, kept, parameters, likes + [state[name] for name in kept])

    def cotangents(self, given: Values) -> list[Any]:
        """Those of the ends among the cotangents of a call."""
        state, arguments, results = given
        found = [results[position] for position in self.leaves]
        return [*found, *(arguments[number] for number in self.written), *(state[name] for name in self.state)]


def _gradients(original: Callable[..., Any], nest: Nest, ends: _Ends) -> Callable[..., list[torch.Tensor]]:
    """A function of the arguments' tensors and of cotangents: the gradients of the arguments, and of parameters."""
    written = [ends.inputs.index(number) for number in ends.written]
    leaves, state, parameters = list(ends.leaves.values()), list(ends.state.values()), list(ends.parameters.values())

    def gradients(inputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
        sources = [one.detach().requires_grad_(_has_gradients(one)) for one in inputs]
        given = [one.clone() for one in sources]  # which the program may write
        tensors = iter(given)
        args, kwargs = nest.filled(lambda: next(tensors))
        returned = pytree.tree_leaves(original(*args, **kwargs))
        values = [*(returned[leaf] for leaf in leaves), *(given[place] for place in written), *state]
        flowing = [number for number, value in enumerate(values) if value.requires_grad]
        wanted = [*(one for one in sources if one.requires_grad), *parameters]
        if not (flowing and wanted):
            return [torch.zeros_like(one) for one in wanted]
        return list(
            torch.autograd.grad(
                [values[number] for number in flowing],
                wanted,
                [cotangents[number] for number in flowing],
                allow_unused=True,
                materialize_grads=True,
            )
        )

    return gradients


def _checked(forward: ArrayProgram, found: Specialization) -> Nest:
    """How the arguments of a program are nested, of which there may be a backward."""
    nest, metadata = found.capture.convention.nest, found.metadata
    argument = {number for number, entry in enumerate(metadata.inputs) if entry.argument is not None}
    pairs = (pair for pair in enumerate(found.guards.aliasing) if isinstance(pair[1], Shared))
    shared = {number for at, one in pairs for number in (at, one.first)}
    sizes = [node.meta.get("val") for node in found.recorded.graph.nodes]
    for stands, why in (
        (forward.decides, "it branches on tensor values"),
        (metadata.gradients, "it leaves gradients"),
        (
            nest is None or any(isinstance(part, Reconstruction) for part in metadata.results),
            "it takes or returns objects",
        ),
        (argument & shared, "arguments share memory"),
        (any(isinstance(value, torch.Tensor) and is_symbolic(value) for value in sizes), "its sizes are dynamic"),
    ):
        if stands:
            raise _NoBackwardError(why)
    assert nest is not None
    return nest


def _in_order(nest: Nest, found: Specialization) -> list[int]:
    """The inputs that are tensors among the arguments, in the order of their nest."""
    markers = list[torch.Tensor]()

    def marker() -> torch.Tensor:
        markers.append(torch.empty(0))
        return markers[-1]

    arguments = found.capture.convention.arguments(*nest.filled(marker))
    places = {id(leaf): place for place, leaf in enumerate(arguments.leaves)}
    numbers = found.metadata.arguments
    return [numbers[places[id(one)]] for one in markers]


def _fakes(program: ArrayProgram) -> Values:
    """Fake tensors for what ``program.run`` gives."""
    ends: Any = program.interpreter.graph.output_node().args[0]
    results = [node.meta.get("val") if isinstance(node, Node) else None for node in ends]
    state = {program.keys[number]: results[at] for number, at in program.new_values.items() if number in program.keys}
    return state, {number: results[program.new_values[number]] for number in program.written_inputs}, results


def _names(forward: ArrayProgram, program: ArrayProgram) -> Mapping[str, str]:
    """What the state of a program calls that of another one, by the tensors that both have.

    Raises:
        _NoBackwardError: the other one has state of which that is not known.
    """
    known = {id(tensor): name for name, tensor in _tensors_of_state(forward).items()}
    found = {RANDOM_KEY: RANDOM_KEY}
    for number, name in program.keys.items():
        entry = program.metadata.inputs[number]
        if entry.slot is not None:
            tensor = None if isinstance(entry.slot, NumberSlot) else entry.slot.found()
            if id(tensor) not in known:
                raise _NoBackwardError(f"its backward reads `{name}`, but its forward does not")
            found[name] = known[id(tensor)]
    return found


def _tensors_of_state(program: ArrayProgram) -> dict[str, torch.Tensor]:
    held = ((name, program.metadata.inputs[number].slot) for number, name in program.keys.items())
    found = {name: slot.found() for name, slot in held if slot is not None and not isinstance(slot, NumberSlot)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _draws(program: ArrayProgram) -> list[tuple[Any, Any]]:
    """What a program draws, in order: of operators with bodies, that they may."""
    graph = program.interpreter.graph
    found = [(node.target, str(node.meta.get("val"))) for node in graph.nodes if is_random(node)]
    return found if found or not program.draws else [(None, id(program))]


def _has_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _is_float(value.dtype)


def _is_float(dtype: Any) -> bool:
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point or dtype.is_complex
    return bool(jnp.issubdtype(dtype, jnp.inexact))
