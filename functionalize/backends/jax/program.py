"""A captured program as a pure function of JAX arrays: jitted, differentiated, mapped as any other.

Invariant: the function has no effect; what is donated are the arrays that the program overwrites, and no others; what
it returns is not one of these.
Limits: 64 bits inside of ``jax.jit``, ``grad`` and ``vmap`` are there if JAX has them on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from functionalize._torch import pytree
from functionalize.backends.arrays.interpreter import Backend, UnknownNumberError
from functionalize.backends.arrays.leaves import is_sortable, with_ordered
from functionalize.backends.arrays.program import Prepared, Written
from functionalize.backends.arrays.registry import Lowerings
from functionalize.backends.export.exported_program import to_exported_program
from functionalize.backends.jax.asserted_decisions import with_decisions
from functionalize.backends.jax.backward import with_own_gradients
from functionalize.backends.jax.first_call import program_of
from functionalize.backends.jax.lowerings import lowering
from functionalize.backends.jax.symbolic_sizes import SymbolicSizes
from functionalize.backends.jax.values import as_precise_as_torch, dtype_of, from_torch, is_array, is_wide, wide_enough
from functionalize.backends.preparation.example_call import as_called_now, refuse_schedules, with_arguments_apart
from functionalize.backends.preparation.stopped_gradients import stopped_gradients
from functionalize.errors import InputMismatchError, UnsupportedExportError, UnsupportedProgramError

if TYPE_CHECKING:
    from functionalize.runtime.calls.program import CapturedProgram

State = dict[str, Any]
# What JAX reads off the functions that it traces: it takes an argument by name for the parameter of the same name,
# though that is by position only. A signature that fits no call has it name none.
UNNAMED = inspect.Signature()


def to_jax(program: CapturedProgram, *, lowerings: Lowerings = lowering, seed: int = 0) -> JaxProgram:
    """A captured program as a function of JAX arrays; see :meth:`CapturedProgram.to_jax`."""
    program = as_called_now(program)
    refuse_schedules(program, "JAX")
    program = with_arguments_apart(program, program.specialization)
    try:
        return JaxProgram(program, lowerings, seed)
    except UnsupportedProgramError as error:
        found = program.specialization
        if not (found.metadata.side_effects or found.guards.changes_gradients):
            raise
        steady = _of_tensors(program, error)
        lines = stopped_gradients(found.capture, range(found.metadata.graph.outputs))
        return JaxProgram(steady, lowerings, seed, ending=lines)


def _of_tensors(program: CapturedProgram, refused: UnsupportedProgramError) -> CapturedProgram:
    """A program that changes objects, with all that it changes there as tensors; ``refused``: why it is not taken so.

    Raises:
        UnsupportedProgramError: what it changes can be no tensors; all causes.
    """
    try:
        exported = to_exported_program(program, to="JAX", layouts=False, warns=False)
    except UnsupportedExportError as error:
        if not refused.causes:
            raise refused from error
        raise UnsupportedProgramError.of_exports("JAX", [*error.causes, *refused.causes]) from error
    return with_decisions(exported)


class JaxProgram:
    """``(state, *args, **kwargs) -> (new_state, outputs)``, a pure function of JAX arrays.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> counter = torch.nn.BatchNorm1d(2)
        >>> step = to_jax(capture(counter, (torch.ones(3, 2),)))
        >>> state, outputs = step(step.initial_state, jnp.ones((3, 2)))
        >>> int(state["num_batches_tracked"]), outputs.shape
        (1, (3, 2))
    """

    def __init__(
        self, program: CapturedProgram, lowerings: Lowerings, seed: int, *, ending: Sequence[str] | None = None
    ) -> None:
        """``ending``: where it ends gradients; None where the program tells, and it is the user's."""
        backend = Backend(lowerings, from_torch, dtype_of, is_array, _split, _number, as_precise_as_torch, True)
        self._program = program_of(program.specialization, backend, jax.random.PRNGKey(seed))
        self._shapes = {name: (array.shape, array.dtype) for name, array in self.initial_state.items()}
        self._run = with_own_gradients(self._program, program, ending)
        self._wide = is_wide(self._program.interpreter.graph)
        self.__signature__ = UNNAMED

    def __repr__(self) -> str:
        return f"JaxProgram({self._program.described()})"

    @property
    def initial_state(self) -> State:
        """The current state of the program's objects: arrays by path, new ones for each access."""
        return self._program.initial_state()

    @property
    def written(self) -> frozenset[str]:
        """The keys of the state that a call changes; the other entries are returned unchanged."""
        return self._program.written

    def __call__(self, state: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> tuple[State, Any]:
        """Compute the new state and what the program returns.

        Args:
            state: as :attr:`initial_state`, or as a call gave it.
            args: arrays for the tensors of the original's arguments, nested alike; plain values as they were.
            kwargs: the same by name.

        Returns:
            The new state, and the outputs: of a program that writes to its arguments :class:`Written`.

        Raises:
            InputMismatchError: the state has other keys, or an argument another shape, dtype or value.
            UnsupportedProgramError: the program has 64 bits, and JAX has them switched off.
        """
        return self._called(state, args, kwargs, self._run)

    def jit(self, *, donate: bool = True) -> Callable[..., tuple[State, Any]]:
        """The function compiled by ``jax.jit``, with 64-bit types if the program has some.

        Args:
            donate: whether a call reuses the buffers of the arrays that it overwrites, in the state and in the
                arguments. These arrays cannot be read afterwards: use those that the call returns. No buffer is reused
                if the program branches on tensor values, because a call may then be refused after it has run.

        Returns:
            A function with the same signature.
        """
        run = self._run

        def donating(written: Any, kept: Any) -> Any:
            return run({**written[0], **kept[0]}, {**written[1], **kept[1]})

        donate = donate and not self._program.decides  # else a call that is refused would have taken the state
        compiled = jax.jit(donating, donate_argnums=(0,) if donate else ())
        names, numbers = self._program.written, self._program.written_inputs

        def flat(state: State, inputs: dict[int, Any]) -> Any:
            parts = [_parted(state, names), _parted(inputs, numbers)]
            return compiled(tuple(part[0] for part in parts), tuple(part[1] for part in parts))

        def jitted(state: State, /, *args: Any, **kwargs: Any) -> tuple[State, Any]:
            return self._called(state, args, kwargs, flat)

        jitted.__signature__ = UNNAMED  # type: ignore[attr-defined]
        return jitted

    def example(self) -> tuple[State, list[Any], dict[str, Any]]:
        """Shapes and dtypes of state and arguments, as ``jax.ShapeDtypeStruct`` in the structure of a call.

        Raises:
            UnsupportedProgramError: dynamic sizes have a relation that no file can hold.
        """
        state = {name: _struct(*look) for name, look in self._shapes.items()}
        sizes = SymbolicSizes(self._program.looks)
        with jax.enable_x64(True):
            args, kwargs = self._program.example(lambda look: _struct(sizes.of(look), dtype_of(look.dtype)))
        plain = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if not (leaf is None or isinstance(leaf, _struct))]
        if plain:
            raise UnsupportedProgramError(
                f"the program takes {', '.join(map(repr, plain))} as an argument",
                why="a StableHLO program is called with arrays or None",
                hint="bind such arguments before the capture (functools.partial)",
                at="the arguments",
            )
        return state, args, kwargs

    def _called(self, state: Mapping[str, Any], args: Any, kwargs: Any, run: Callable[..., Any]) -> tuple[State, Any]:
        program = self._program
        self._check_state(state)
        with wide_enough(self._wide, (state, args, kwargs)):
            prepared = program.prepare(*program.in_key_order(args, kwargs))
            after, outputs = program.finished(state, prepared, run(dict(state), self._converted(prepared)))
            return after, _apart(outputs, [after[name] for name in program.written])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self._shapes.keys():
            missing, more = self._shapes.keys() - state.keys(), state.keys() - self._shapes.keys()
            said = [f"without {', '.join(sorted(missing))}"] if missing else []
            said += [f"with {', '.join(sorted(more))}"] if more else []
            raise InputMismatchError(
                f"the state is passed {' and '.join(said)}",
                hint="pass `initial_state`, or the state that the last call returned",
            )
        for name, (shape, dtype) in self._shapes.items():
            now = state[name]
            if now.shape != shape or now.dtype != dtype:
                raise InputMismatchError(
                    f"the state `{name}` is {now.dtype}{list(now.shape)}, but was captured as {dtype}{list(shape)}",
                    hint="pass an array of that shape and dtype",
                )

    def _converted(self, prepared: Prepared) -> dict[int, Any]:
        """The arguments as arrays of the dtypes of the capture."""
        inputs = dict(prepared.inputs)
        program = self._program
        for number, node in zip(program.metadata.taken, program.interpreter.placeholders, strict=True):
            if number in inputs:
                wanted = dtype_of(node.meta["val"].dtype)
                inputs[number] = _of_dtype(inputs[number], wanted, program.metadata.inputs[number].label)
        return inputs


_struct: Any = jax.ShapeDtypeStruct


def _split(key: Any) -> tuple[Any, Any]:
    one, two = jax.random.split(key)
    return one, two


def _number(array: Any) -> Any:
    if isinstance(array, jax.core.Tracer):
        raise UnknownNumberError("JAX traces the call, and values are unknown until the traced function runs")
    return array.item()


def _apart(outputs: Any, state: Sequence[Any]) -> Any:
    """Outputs of a call, in which what is returned is none of the arrays that a later call may overwrite."""
    returned, arguments = outputs if isinstance(outputs, Written) else (outputs, None)
    taken = {id(leaf) for leaf in (*state, *pytree.tree_leaves(arguments)) if isinstance(leaf, jax.Array)}

    def apart(leaf: Any) -> Any:
        return jnp.copy(leaf) if id(leaf) in taken and not isinstance(leaf, jax.core.Tracer) else leaf

    own = pytree.tree_map(apart, returned)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in pytree.tree_leaves(own)):
        own = with_ordered(own, lambda keys: not is_sortable(keys))
    return own if arguments is None else Written(own, arguments)


def _parted(values: Mapping[Any, Any], chosen: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    one = {key: value for key, value in values.items() if key in chosen}
    return one, {key: value for key, value in values.items() if key not in chosen}


def _of_dtype(array: Any, wanted: Any, label: str) -> Any:
    """An array of a dtype: of that dtype already, or of the 32 bits that JAX makes of its 64, or of the array's."""
    narrow = {"int64": "int32", "float64": "float32", "uint64": "uint32", "complex128": "complex64"}
    given = {str(array.dtype), str(jax.dtypes.canonicalize_dtype(array.dtype))}
    if given.isdisjoint({str(wanted), narrow.get(str(wanted))}):  # as text: to NumPy float64 equals None
        raise InputMismatchError(
            f"{label} has the dtype {array.dtype}, but had {wanted} when the program was captured",
            hint="convert it, or capture the program for that dtype",
        )
    return jnp.asarray(array, dtype=wanted)
