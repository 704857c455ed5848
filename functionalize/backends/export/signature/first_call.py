"""Whether a program of later calls, begun with zeros, does in its first call what the program of the first call does.

Both are run once as they were captured, on arguments of random numbers, and compared in all that they give and leave:
what is exported may round differently, but they round alike.

Invariant: no state of the program's is touched. Limits: what is equal for these numbers is taken to be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from functionalize.backends.export.signature.effects import Rebinding
from functionalize.backends.export.signature.returned import InputTensor, returned
from functionalize.backends.export.signature.shared_places import GraphValue
from functionalize.backends.export.signature.steady import Exportable
from functionalize.backends.preparation.example_call import ExampleCall
from functionalize.errors import UnsupportedExportError
from functionalize.reachability import nodes_behind
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.decisions import Decision, same_answer
from functionalize.runtime.metadata import InputMutation
from functionalize.runtime.random_state import default_generators_kept, is_random


def check_first_call(found: Exportable, to: str) -> None:
    """Compare both programs.

    Raises:
        UnsupportedExportError: they differ.
    """
    first, later = found.first, found.call
    if first is None:
        return
    try:
        with torch.no_grad():
            one, other = _Run(first, first.inputs), _Run(later, found.inputs, found.effects.rebindings)
    except _FailsError as error:
        what = f"the first call branches on tensor values, and fails for data other than that of the capture: {error}"
        raise _refusal(to, what) from error
    _refuse_first_alone(first.program, later.program, to)
    for decision in later.program.metadata.graph.of_forward:
        value = other.results[decision.output]
        if not (same_answer(value, decision.answer) or _decided(first, one, decision, value)):
            raise _refusal(to, f"the first call takes another branch than later calls: {decision}")
    pairs = [*zip(one.leaves, other.leaves, strict=True)]
    for number, output in found.made.items():
        pairs.append((one.value(GraphValue(alias=output)), other.after.get(number, found.inputs[number])))
    targets = {entry.target: number for number, entry in enumerate(later.program.metadata.inputs)}
    for number, value in one.after.items():
        target = first.program.metadata.inputs[number].target
        if target is not None:
            pairs.append((value, other.after.get(targets.get(target, -1))))
    if all(_equal(*pair) for pair in pairs):
        return
    made = [f"`{later.program.metadata.inputs[number].target}`" for number in sorted(found.made)]
    if not made:
        raise _refusal(to, "the first call computes something else than later calls")
    what = f"{', '.join(made[:3])}{', ...' if len(made) > 3 else ''}"
    raise _refusal(
        to, (f"the first call creates {what}, and computes something else than later calls do with zeros instead")
    )


def _decided(first: ExampleCall, run: _Run, decision: Decision, value: Any) -> bool:
    """Whether the first call reads the same there, and decided alike: of other data than its own neither is right."""
    return any(
        before.location == decision.location
        and same_answer(before.answer, decision.answer)
        and same_answer(run.results[before.output], value)
        for before in first.program.metadata.graph.of_forward
    )


def _refuse_first_alone(first: Specialization, later: Specialization, to: str) -> None:
    """Refuse what a first call alone asks of data: it may make another thing, and nothing asserts the answer."""
    lines = Counter(decision.location for decision in later.metadata.graph.of_forward)
    results: Any = first.recorded.graph.output_node().args[0]
    placeholders = zip(first.recorded.graph.find_nodes(op="placeholder"), first.metadata.taken, strict=True)
    data = {node for node, number in placeholders if first.metadata.inputs[number].argument is not None}
    for decision in first.metadata.graph.of_forward:
        behind = nodes_behind([results[decision.output]])
        lines[decision.location] -= 1
        if lines[decision.location] < 0 and any(node in data or is_random(node) for node in behind):
            raise _refusal(to, f"the first call branches on tensor values where later calls do not: {decision}")


def _refusal(to: str, what: str) -> UnsupportedExportError:
    cause = UnsupportedExportError.cause(
        what,
        why="an exported program is the same for all calls",
        hint="call the program once before the export",
    )
    return UnsupportedExportError(to, [cause])


class _FailsError(Exception):
    """A program does not run for random numbers."""


class _Run:
    """One run of a program, with what it gives and leaves."""

    def __init__(self, call: ExampleCall, inputs: Sequence[Any], rebindings: Sequence[Rebinding] = ()) -> None:
        self._call, self._metadata = call, call.program.metadata
        self._inputs = self._with_gradients(inputs)
        given = call.program.inputs_of_graph(list(self._inputs))
        copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in given]
        with default_generators_kept():
            torch.manual_seed(0)
            try:
                self.results = list(call.program.graph_module(*copies))
            except Exception as error:  # of kernels, which get other sizes than the data told at the capture
                raise _FailsError(error) from error
        mutations = (one for one in self._metadata.mutations if not (one.metadata or one.after or one.layout))
        self._written = {one.input: self._mutated(one) for one in mutations}
        self.after = dict(self._written)  # what is in the places of inputs, by their numbers
        self.after |= {one.input: self.value(one.value) for one in rebindings}
        for number, entry in enumerate(self._metadata.inputs):
            gradient = None if entry.gradient_of is None else self._metadata.gradients.get(entry.gradient_of)
            if gradient is not None:
                self.after[number] = self.value(GraphValue(alias=gradient))

    def _with_gradients(self, inputs: Sequence[Any]) -> list[Any]:
        """What the program takes, with zeros for gradients that it reads or writes in place, and that are not there."""
        used = {*self._metadata.taken, *(one.input for one in self._metadata.mutations)}
        found = list(inputs)
        for number, entry in enumerate(self._metadata.inputs):
            if number in used and entry.gradient_of is not None and found[number] is None:
                found[number] = torch.zeros_like(inputs[entry.gradient_of])
        return found

    def value(self, one: GraphValue) -> Any:
        """What a value of the graph comes to."""
        if one.alias is None:
            return self.results[one.result]  # type: ignore[index]
        alias = self._metadata.outputs[one.alias]
        return self._content(alias.input) if alias.result is None else self.results[alias.result]  # type: ignore[arg-type]

    def _content(self, number: int) -> Any:
        return self._written.get(number, self._inputs[number])

    @property
    def leaves(self) -> list[Any]:
        """What it returns."""
        return [self._leaf(leaf) for leaf in returned(self._call).leaves]

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, InputTensor):
            return self._content(leaf.number)
        return self.value(leaf) if isinstance(leaf, GraphValue) else leaf

    def _mutated(self, mutation: InputMutation) -> torch.Tensor:
        value: torch.Tensor = self._inputs[mutation.input].detach().clone()
        for write in mutation.writes:
            part = value
            for op, args in write.path:
                part = op(part, *args)
            part.copy_(self.results[write.result])
        return value


def _equal(one: Any, other: Any) -> bool:
    if one is None or not isinstance(one, torch.Tensor):
        return True
    if not isinstance(other, torch.Tensor) or one.size() != other.size() or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
