"""Computes the results of a program's graph in a call, before anything is written, and records them in autograd.

Takes the inputs of a call and gives :class:`Computed`. A program has one computation, made once, and captured programs
and compiled Dynamo graphs share these classes.

Invariant: a call computes by the graph alone; whatever is refused is refused before a computation returns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize._torch.dispatch import BelowVersions
from functionalize.errors import UnsupportedMutationError
from functionalize.refusals.calls import BACKWARD_OF_BACKWARD
from functionalize.runtime.autograd.function import Undifferentiable, differentiable_call
from functionalize.runtime.autograd.joint import Orders, called
from functionalize.runtime.metadata import AliasKind, BaseResult, OutputAlias, ProgramMetadata


@dataclass(frozen=True, eq=False)
class Computed:
    """The results of a program's graph."""

    results: Sequence[Any]  # by position among the graph's outputs; None: not computed
    # By position among the program's bases: the values of bases that are not results.
    bases: Mapping[int, Any] = field(default_factory=dict)
    refusals: Sequence[GradientRefusal] = ()
    # By output: wrappers that autograd recorded, over the results that are their parts.
    wrappers: Mapping[int, torch.Tensor] = field(default_factory=dict)
    refused_wrapper: GradientRefusal | None = None  # of each other wrapper that requires gradients

    def with_autograd(self) -> Sequence[Any]:
        """The results with their gradient refusals, once the leaves among the inputs have their new metadata."""
        return functools.reduce(lambda results, refusal: refusal.attached(results), self.refusals, self.results)


@dataclass(frozen=True, eq=False)
class GradientRefusal:
    """Results that must require gradients, of a graph that autograd did not record: a backward raises the reason.

    Without a reason, they require gradients only for leaves that the program made and kept: no input gets a gradient.
    """

    reason: Exception | None
    positions: Sequence[int]
    sources: Sequence[torch.Tensor]  # the tensors that they were computed from

    def attached(self, results: Sequence[Any]) -> Sequence[Any]:
        """All results; these have the backward that raises."""
        values = [results[position] for position in self.positions]
        attached = dict(zip(self.positions, _undifferentiable(self.reason, values, self.sources), strict=True))
        return [attached.get(position, result) for position, result in enumerate(results)]


@dataclass(frozen=True, eq=False)
class GraphComputation:
    """A graph that autograd does not record.

    ``positions``: the results of the program that it gives; None: all. ``reason``: why it has no backward, which a
    backward raises.
    """

    metadata: ProgramMetadata
    function: Callable[..., Any]
    positions: Sequence[int] | None = None
    reason: Exception | None = None

    def __call__(self, inputs: Sequence[Any]) -> Computed:
        """The results of the graph.

        Raises:
            UnsupportedMutationError: the reason, if autograd must record the writes to inputs.
        """
        metadata, reason = self.metadata, self.reason
        if isinstance(reason, UnsupportedMutationError) and any(m.differentiable for m in metadata.mutations):
            raise reason
        taken = [inputs[number] for number in metadata.taken]
        workspaces = torch.enable_grad() if metadata.graph.keeps_workspaces else contextlib.nullcontext()
        hidden = torch.no_grad() if reason is not None else contextlib.nullcontext()
        with hidden, BelowVersions(), workspaces:
            values = called(self.function, taken)
        positions = range(metadata.graph.outputs) if self.positions is None else self.positions
        results = _by_position(values, positions, metadata.graph.outputs)
        if reason is None:
            if not torch.is_grad_enabled():
                return Computed(results)
            reason = BACKWARD_OF_BACKWARD.error() if metadata.has_backward else None
        refused = None
        if any(alias.is_recorded for alias in metadata.outputs):
            sources = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
            refused = GradientRefusal(reason, [0], sources or [torch.empty(0, requires_grad=True)])
        return Computed(results, refusals=_refusals(metadata, results, reason, inputs), refused_wrapper=refused)


@dataclass(frozen=True, eq=False)
class DifferentiableComputation:
    """A graph with the captured backward as its derivative; ``refused``: results without a derivative, and why."""

    metadata: ProgramMetadata
    orders: Orders
    refused: Mapping[int, Exception] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Any]) -> Computed:
        """The results of the graph, recorded by autograd."""
        orders, joint = self.orders, self.orders.first.joint
        taken = [inputs[number] for number in self.metadata.taken]
        sizes = () if orders.sizes_of is None else orders.sizes_of(inputs)
        differentiated = [inputs[gradient.input] for gradient in joint.gradients.of_wrappers]
        outputs = differentiable_call(orders, taken, sizes, differentiated)
        count, end = len(joint.results), len(joint.layouts)
        results = _by_position(outputs[:count], joint.results, self.metadata.graph.outputs)
        refusals: Sequence[GradientRefusal] = ()
        if self.refused:
            sources = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
            refusals = [GradientRefusal(reason, [position], sources) for position, reason in self.refused.items()]
        bases = dict(zip(joint.bases, outputs[count:end], strict=True))
        wrappers = {w.output: made for w, made in zip(joint.gradients.wrapper_results, outputs[end:], strict=True)}
        return Computed(results, bases, refusals, wrappers)


def _by_position(values: Sequence[Any], positions: Sequence[int], count: int) -> list[Any]:
    results = [None] * count
    for position, value in zip(positions, values, strict=True):
        results[position] = value
    return results


def _refusals(
    metadata: ProgramMetadata, results: Sequence[Any], reason: Exception | None, inputs: Sequence[Any]
) -> Sequence[GradientRefusal]:
    """The refusal for results that must require gradients but have no backward; empty if no result must."""
    described: list[OutputAlias | BaseResult] = [*metadata.bases]
    described += [alias for alias in metadata.outputs if _has_own_gradient(alias, metadata.bases)]
    requiring = {item.result for item in described if item.requires_grad and item.result is not None}
    requiring |= {write.result for m in metadata.mutations if m.differentiable for write in m.writes}
    positions = sorted(position for position in requiring if results[position] is not None)
    if not positions:
        return ()
    if reason is None:
        return (GradientRefusal(None, positions, [torch.empty(0, requires_grad=True)]),)
    # Autograd saves a leaf with its size at this moment, and other tensors with their history at this moment.
    moved = [inputs[m.input] for m in metadata.mutations if m.metadata and not m.detached]
    leaves = {id(tensor) for tensor in moved if tensor.is_leaf}
    sources = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    before = [source for source in sources if id(source) not in leaves]
    history = _undifferentiable(reason, [torch.empty(0)], before) if before else ()
    moved_leaves = [source for source in sources if id(source) in leaves]
    return (GradientRefusal(reason, positions, [*history, *moved_leaves]),)


def _undifferentiable(
    reason: Exception | None, values: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    with torch.enable_grad():
        return Undifferentiable.apply(reason, len(values), *values, *sources)  # type: ignore[no-any-return, no-untyped-call]


def _has_own_gradient(alias: OutputAlias, bases: Sequence[BaseResult]) -> bool:
    """Whether an output has the gradient of its result: bases that are not results have no values here."""
    unbased = alias.base is not None and bases[alias.base].result is None
    return alias.kind is AliasKind.RESULT or alias.own_gradient or unbased
