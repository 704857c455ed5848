"""Whether a program of later calls, begun with zeros, does in its first call what the program of the first call does.

Both are run once, on arguments of random numbers, and compared in all that they give and leave.

Invariant: no state of the program's is touched. Limits: what is equal for these numbers is taken to be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from functionalize.backends.export.example_call import ExampleCall
from functionalize.backends.export.graph import ExportGraph
from functionalize.backends.export.returned import returned
from functionalize.backends.export.shared_places import GraphValue
from functionalize.errors import UnsupportedExportError


def check_first_call(graph: ExportGraph, function: Any, to: str) -> None:
    """Compare both programs. ``function``: what computes the graph of later calls.

    Raises:
        UnsupportedExportError: they differ.
    """
    found, first = graph.found, graph.found.first
    if first is None:
        return
    with torch.no_grad():
        inputs = first.inputs
        before = _run(first.program.graph_module, first.program.inputs_of_graph(list(inputs)))
        try:
            results = _run(function, _inputs_of(graph))
        except RuntimeError as error:  # an assertion of the later program's
            raise _refusal(to, f"the first call decides otherwise than later ones: {error}") from error
    finals = dict(zip(graph.written, results, strict=False))
    pairs = [*zip(_returned(first, before), results[len(graph.written) :], strict=True)]
    for number, output in found.made.items():
        of = found.program.metadata.inputs[number].gradient_of
        one = graph.inputs.by_number[number] if of is None else graph.inputs.gradient(of)
        after = None if one is None else finals.get(one.name)
        pairs.append((before[first.program.metadata.outputs[output].result], after))  # type: ignore[index]
    for target, value in _written(first, inputs, before):
        one = next((one for one in graph.inputs.all if one.target == target), None)
        pairs.append((value, None if one is None else finals.get(one.name)))
    if all(_equal(*pair) for pair in pairs):
        return
    made = [f"`{found.program.metadata.inputs[number].target}`" for number in sorted(found.made)]
    if not made:
        raise _refusal(to, "the first call does something else than later calls do")
    what = f"{', '.join(made[:3])}{', ...' if len(made) > 3 else ''}"
    raise _refusal(to, f"the first call makes {what}, and does something else than later calls do with zeros there")


def _refusal(to: str, what: str) -> UnsupportedExportError:
    cause = UnsupportedExportError.cause(
        what,
        why="an exported program is one for all calls",
        hint="call the program once, and export it then",
    )
    return UnsupportedExportError(to, [cause])


def _run(function: Any, inputs: Sequence[Any]) -> list[Any]:
    copies = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return list(function(*copies))


def _inputs_of(graph: ExportGraph) -> list[Any]:
    """State, and the arguments of the first call for those of the later ones: they are made alike."""
    values = graph.found.call.inputs
    return [one.value if one.target is not None or one.number is None else values[one.number]
            for one in graph.inputs.all]  # fmt: skip


def _returned(call: ExampleCall, results: Sequence[Any]) -> list[Any]:
    """The leaves that a program returns; None for what is an input, which is compared by itself."""
    found = []
    for value in returned(call).leaves:
        alias = value.alias if isinstance(value, GraphValue) else None
        position = value.result if isinstance(value, GraphValue) else None
        if alias is not None:
            position = call.program.metadata.outputs[alias].result
        found.append(None if position is None else results[position])
    return found


def _written(call: ExampleCall, inputs: Sequence[Any], results: Sequence[Any]) -> Iterator[tuple[str | None, Any]]:
    """The state that a program writes, with its new values."""
    metadata = call.program.metadata
    for mutation in metadata.mutations:
        entry = metadata.inputs[mutation.input]
        if entry.target is None or mutation.metadata or mutation.after or mutation.layout:
            continue
        value = inputs[mutation.input].detach().clone()
        for write in mutation.writes:
            part = value
            for op, args in write.path:
                part = op(part, *args)
            part.copy_(results[write.result])
        yield entry.target, value


def _equal(one: Any, other: Any) -> bool:
    if one is None or not isinstance(one, torch.Tensor):
        return True
    if not isinstance(other, torch.Tensor) or one.size() != other.size() or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
