"""One call of a program: compute by its graph, write back, give the outputs the aliasing of the original.

Captured programs and compiled Dynamo graphs run through here alike.

Invariant: a call computes by the graph alone; whatever is refused is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize.runtime.autograd import CapturedFunction, ForwardCall, Undifferentiable, called
from functionalize.runtime.metadata import AliasKind, BaseResult, OutputAlias, ProgramMetadata
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
    _require_gradients(metadata, inputs)
    with torch.no_grad():
        results = called(function, [inputs[number] for number in metadata.taken])
    if positions is not None:
        given = dict(zip(positions, results, strict=True))
        results = [given.get(position) for position in range(metadata.graph_outputs)]
    refuse_other_sizes(metadata, results)
    if torch.is_grad_enabled() and not metadata.gradients:
        results = _known_to_autograd(metadata, results, None, [torch.empty(0, requires_grad=True)])
    return results, [None if base.result is None else results[base.result] for base in metadata.bases]


def _require_gradients(metadata: ProgramMetadata, inputs: Sequence[Any]) -> None:
    """Have inputs require gradients of which the program says so."""
    for entry, value in zip(metadata.inputs, inputs, strict=True):
        if entry.requires_grad:
            value.requires_grad_()


def compute_differentiably(
    metadata: ProgramMetadata, joint: JointGraph, call: ForwardCall, inputs: Sequence[Any]
) -> Computed:
    """What a graph gives, with the captured backward as its derivative."""
    _require_gradients(metadata, inputs)
    with torch.enable_grad():
        outputs = CapturedFunction.apply(call, *(inputs[number] for number in metadata.taken))  # type: ignore[no-untyped-call]
    results: dict[int, Any] = dict(zip(joint.results, outputs, strict=False))
    further = dict(zip(joint.bases, outputs[len(joint.results) :], strict=True))
    bases = [
        further[number] if base.result is None else results[base.result] for number, base in enumerate(metadata.bases)
    ]
    given = [results.get(position) for position in range(metadata.graph_outputs)]
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
    with torch.no_grad():
        results, _ = compute(metadata, function, inputs)
    required = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    results = _known_to_autograd(metadata, results, reason, required)
    return results, [None if base.result is None else results[base.result] for base in metadata.bases]


def _known_to_autograd(
    metadata: ProgramMetadata, results: Sequence[Any], reason: Exception | None, leaves: Sequence[torch.Tensor]
) -> list[Any]:
    """Results, of which some require gradients: the leaves get none, or a backward raises the reason why.

    Without a reason the leaf stands for those that the program made itself, and keeps to itself.
    """
    described: list[OutputAlias | BaseResult] = [*metadata.bases]
    described += [alias for alias in metadata.outputs if alias.kind is AliasKind.RESULT or alias.own_gradient]
    found = {one.result for one in described if one.requires_grad and one.result is not None}
    positions = sorted(position for position in found if results[position] is not None)
    given, results = [results[position] for position in positions], list(results)
    if given:
        with torch.enable_grad():
            known = Undifferentiable.apply(reason, len(given), *given, *leaves)  # type: ignore[no-untyped-call]
        for position, value in zip(positions, known, strict=True):
            results[position] = value
    return results


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
    for entry, value in zip(metadata.inputs, inputs, strict=True):
        if entry.requires_grad is False:
            value.detach_()
    for effect in metadata.side_effects:
        effect.apply(states, outputs.tensor)
    return [
        results[reconstruction.position]
        if isinstance(reconstruction, GraphNumber)
        else reconstruct(reconstruction, states, outputs.tensor)
        for reconstruction in metadata.results
    ]
