"""One call of a program: compute by its graph, write back, give the outputs the aliasing of the original.

Captured programs and compiled Dynamo graphs run through here alike.

Invariant: a call computes by the graph alone; whatever is refused is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize.runtime.autograd import CapturedFunction, ForwardCall, Undifferentiable, called
from functionalize.runtime.metadata import BaseResult, OutputAlias, ProgramMetadata
from functionalize.runtime.output_aliasing import OutputReconstructor, WriteBack, refuse_other_sizes
from functionalize.runtime.partition import JointGraph
from functionalize.runtime.side_effects import GraphNumber, reconstruct
from functionalize.runtime.state_walk import StateWalk

Computed = tuple[Sequence[Any], Sequence[Any]]  # the results of a program's graph, and the values of its bases


def compute(
    metadata: ProgramMetadata,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    positions: Sequence[int] | None = None,
) -> Computed:
    """What a graph gives, unseen by autograd. ``positions``: which of the program's results it gives, if not all."""
    taken = [inputs[number] for number in metadata.taken]
    if metadata.graph.keeps_workspaces:
        taken = [
            value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value for value in taken
        ]
    with torch.set_grad_enabled(metadata.graph.keeps_workspaces):
        results = called(function, taken)
    if positions is not None:
        given = dict(zip(positions, results, strict=True))
        results = [given.get(position) for position in range(metadata.graph.outputs)]
    refuse_other_sizes(metadata, results)
    return results, [None if base.result is None else results[base.result] for base in metadata.bases]


def compute_differentiably(
    metadata: ProgramMetadata, joint: JointGraph, call: ForwardCall, inputs: Sequence[Any]
) -> Computed:
    """What a graph gives, with the captured backward as its derivative."""
    with torch.enable_grad():
        outputs = CapturedFunction.apply(call, *(inputs[number] for number in metadata.taken))  # type: ignore[no-untyped-call]
    results: dict[int, Any] = dict(zip(joint.results, outputs, strict=False))
    further = dict(zip(joint.bases, outputs[len(joint.results) :], strict=True))
    bases = [
        further[number] if base.result is None else results[base.result] for number, base in enumerate(metadata.bases)
    ]
    given = [results.get(position) for position in range(metadata.graph.outputs)]
    refuse_other_sizes(metadata, given)
    return given, bases


def compute_undifferentiably(
    metadata: ProgramMetadata, function: Callable[..., Any], inputs: Sequence[Any], reason: Exception
) -> Computed:
    """What a graph gives; the reason why it has no backward is raised by those who ask for gradients.

    Raises:
        Exception: the reason, where the program writes to an input through which gradients flow.
    """
    if any(mutation.differentiable for mutation in metadata.mutations):
        raise reason
    results, _ = compute(metadata, function, inputs)
    described: list[OutputAlias | BaseResult] = [*metadata.outputs, *metadata.bases]
    described = [one for one in described if one.requires_grad]
    positions = sorted({one.result for one in described if one.result is not None})
    required = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    given, results = [results[position] for position in positions], list(results)
    with torch.enable_grad():
        known = Undifferentiable.apply(reason, len(given), *given, *required)  # type: ignore[no-untyped-call]
    for position, value in zip(positions, known, strict=True):
        results[position] = value
    return results, [None if base.result is None else results[base.result] for base in metadata.bases]


def finish(
    metadata: ProgramMetadata, inputs: Sequence[Any], states: Sequence[StateWalk], computed: Computed
) -> list[Any]:
    """Write back, leave gradients and side effects, and give the leaves that the program returns."""
    results, bases = computed
    symbols = metadata.symbols.bind(inputs, results)
    write_back = WriteBack(metadata, inputs, symbols)
    write_back.run(results)
    outputs = OutputReconstructor(metadata, inputs, results, bases, symbols, write_back.originals)
    for number, gradient in metadata.gradients.items():
        inputs[number].grad = None if gradient is None else outputs.tensor(gradient)
    for effect in metadata.side_effects:
        effect.apply(states, outputs.tensor)
    return [
        results[reconstruction.position]
        if isinstance(reconstruction, GraphNumber)
        else reconstruct(reconstruction, states, outputs.tensor)
        for reconstruction in metadata.results
    ]
