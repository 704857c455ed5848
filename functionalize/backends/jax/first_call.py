"""Programs whose first call differs from later ones, as one function: the state says whether there was a call.

Invariant: the first call computes what the original's first call does, later ones what its later calls do. Limits: both
return what is built alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from functionalize._torch import pytree
from functionalize.backends.arrays.interpreter import Backend, UnknownNumberError, refusal
from functionalize.backends.arrays.program import ArrayProgram, Prepared, Written
from functionalize.backends.jax.values import is_array, is_number
from functionalize.backends.preparation.first_call import Settled, settled
from functionalize.python_state.reconstruct import ObjectRef, references_in
from functionalize.runtime.calls.specialization import Specialization

FIRST_CALL = "first_call"


def program_of(specialization: Specialization, backend: Backend, key: Any) -> ArrayProgram:
    """A program over JAX arrays: of one graph, or of two where the first call makes what later ones find."""
    found = settled(specialization) if specialization.metadata.side_effects else None
    if found is None:
        return ArrayProgram(specialization, backend, key)
    if not found.made and str(found.later.recorded.graph) == str(specialization.recorded.graph):
        return ArrayProgram(found.later, backend, key)
    return _OfTwo(specialization, found, backend, key)


_ARRAY = object()


def _is_computed(leaf: Any) -> bool:
    return is_array(leaf) or is_number(leaf)


@dataclass(frozen=True)
class _Nest:
    """How outputs are built: what JAX cannot choose between, as it is the same in each call."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # `_ARRAY` for arrays and numbers

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Such outputs, with these arrays."""
        given = iter(arrays)
        return pytree.tree_unflatten([next(given) if leaf is _ARRAY else leaf for leaf in self.leaves], self.spec)


class _OfTwo(ArrayProgram):
    """The later program, and before it, once, the first."""

    _nest: _Nest  # of the outputs, once it has run

    def __init__(self, first: Specialization, found: Settled, backend: Backend, key: Any) -> None:
        super().__init__(found.later, backend, key)
        self._first = ArrayProgram(first, backend, key, settled=True)
        results = [*first.metadata.results, *self.metadata.results]
        if any(isinstance(part, ObjectRef) and part.state for part in references_in(results)):
            why = "it returns one of its arguments, and creates state in its first call"
            raise refusal(backend, [("what it returns", why)])
        self._without = found.made
        outputs = first.metadata.outputs
        self._made = {self.keys[n]: outputs[output].result for n, output in found.made.items() if n in self.keys}
        places = first.metadata.arguments
        self._numbers = {  # of the arguments, in the first program
            n: places[entry.argument] for n, entry in enumerate(self.metadata.inputs) if entry.argument is not None
        }
        self.stopped = list(dict.fromkeys([*self.stopped, *self._first.stopped]))

    def initial_state(self) -> dict[str, Any]:
        state = {**self._first.initial_state(), **super().initial_state()}
        fakes = dict(zip(self.metadata.taken, self.interpreter.placeholders, strict=True))
        for number in self._without:
            if number in self.keys:
                fake = fakes[number].meta["val"]
                state[self.keys[number]] = jnp.zeros(tuple(fake.size()), self.backend.dtype(fake.dtype))
        return {**state, FIRST_CALL: jnp.array(True)}

    @property
    def decides(self) -> bool:
        return super().decides or self._first.decides

    @property
    def written(self) -> frozenset[str]:
        return super().written | self._first.written | self._made.keys() | {FIRST_CALL}

    def run(self, state: Mapping[str, Any], inputs: Mapping[int, Any]) -> Any:
        names, nests = sorted(self.written), list[_Nest]()

        def parted(program: ArrayProgram, results: Sequence[Any], outputs: Any) -> list[Any]:
            leaves, spec = pytree.tree_flatten(outputs)
            nests.append(_Nest(spec, tuple(_ARRAY if _is_computed(leaf) else leaf for leaf in leaves)))
            return [*(leaf for leaf in leaves if _is_computed(leaf)), *self._asked(program, results)]

        def first(_: Any) -> Any:
            given = {mine: inputs[n] for n, mine in self._numbers.items() if n in inputs}
            new, arguments, results = self._first.run(state, given)
            arguments = {n: arguments[mine] for n, mine in self._numbers.items() if mine in arguments}
            made = {name: results[at] for name, at in self._made.items()}  # type: ignore[index]
            after = {**state, **new, **made}
            return _ended(names, after), arguments, parted(self._first, results, self._first.outputs(results, after))

        def later(_: Any) -> Any:
            new, arguments, results = ArrayProgram.run(self, state, inputs)
            after = {**state, **new}
            return _ended(names, after), arguments, parted(self, results, ArrayProgram.outputs(self, results, after))

        found = jax.lax.cond(state[FIRST_CALL], first, later, None)
        if any(nest != nests[0] for nest in nests):
            why = "its first call returns a result of another structure, or another constant, than later calls"
            raise refusal(self.backend, [("what it returns", why)])
        self._nest = nests[0]
        return found

    def _asked(self, program: ArrayProgram, results: Sequence[Any]) -> list[Any]:
        """What both programs decide by, the first one's first: of the one that runs, and nothing for the other's."""
        values = []
        for each in (self._first, self):
            looks: Any = each.decided.graph.output_node().args[0]
            for decision in each.decided.asked:
                look = looks[decision.output].meta["val"]
                dtype = self.backend.dtype(look.dtype) if isinstance(look, torch.Tensor) else type(decision.answer)
                value = jnp.reshape(results[decision.output], ()) if each is program else 0
                values.append(jnp.asarray(value, dtype=dtype))
        return values

    def finished(
        self, state: Mapping[str, Any], prepared: Prepared, found: tuple[dict[str, Any], dict[int, Any], Sequence[Any]]
    ) -> tuple[dict[str, Any], Any]:
        new, written, arrays = found
        count = len(self._first.decided.asked)
        asked = arrays[len(arrays) - count - len(self.decided.asked) :]
        if self._is_first(state):
            self._first.check_decisions(asked[:count])
        else:
            self.check_decisions(asked[count:])
        outputs = self._nest.filled(arrays)
        returned = Written(outputs, self.arguments_after(prepared, written)) if self.written_inputs else outputs
        return {**state, **new}, returned

    def _is_first(self, state: Mapping[str, Any]) -> bool:
        """Whether a call is the first; where JAX traces it, nobody can tell: what there is to compare is refused."""
        try:
            return bool(self.decides and self.backend.number(state[FIRST_CALL]))
        except UnknownNumberError:
            return not self.decided.asked


def _ended(names: Sequence[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a state, after a call."""
    return {name: state[name] for name in names} | {FIRST_CALL: jnp.array(False)}
