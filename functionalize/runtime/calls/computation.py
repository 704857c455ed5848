"""What a call of a program computes by its graph, before anything is written.

Captured programs and compiled Dynamo graphs run through here alike.

Invariant: a call computes by the graph alone; whatever is refused is refused here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from functionalize._torch.dispatch import BelowVersions
from functionalize.errors import DataDependentError, UnsupportedMutationError
from functionalize.runtime.autograd.function import Undifferentiable, differentiable_call
from functionalize.runtime.autograd.joint import Orders, called
from functionalize.runtime.decisions import Diverged, check
from functionalize.runtime.metadata import AliasKind, BaseResult, OutputAlias, ProgramMetadata

_BACKWARD_INSIDE = (
    "a backward through a result of a captured program that itself calls backward()\n"
    "    why  the backward inside the program is part of its graph, and has freed its saved tensors\n"
    "    try  capture the forward alone, and call backward() on its results"
)
_NONE: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Computed:
    """What a program's graph gave."""

    results: Sequence[Any]
    further: Mapping[int, Any]  # by position among the program's bases: the values of those that are no results
    unknown: Sequence[_Unknown] = ()  # what autograd is to be told of the results

    def told(self) -> Sequence[Any]:
        """The results as autograd is to know them, told when the leaves among the inputs have their new metadata."""
        return functools.reduce(lambda results, unknown: unknown.told(results), self.unknown, self.results)


def compute(
    metadata: ProgramMetadata,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    positions: Sequence[int] | None = None,
) -> Computed:
    """What a graph gives, unseen by autograd; ``positions``: which of the program's results it gives, if not all."""
    taken = [inputs[number] for number in metadata.taken]
    workspaces = torch.enable_grad() if metadata.graph.keeps_workspaces else contextlib.nullcontext()
    if positions is None:
        positions = range(metadata.graph.outputs)
    with _requiring(metadata, inputs):
        with BelowVersions(), workspaces, _told_of_sizes(metadata):
            results = called(function, taken)
        computed = _computed(metadata, inputs, dict(zip(positions, results, strict=True)))
    if not torch.is_grad_enabled():
        return computed
    reason = RuntimeError(_BACKWARD_INSIDE) if metadata.has_backward else None
    return replace(computed, unknown=_unknown(metadata, computed.results, reason, inputs))


def checked(metadata: ProgramMetadata, inputs: Sequence[Any], results: Sequence[Any]) -> Computed:
    """What a graph gave that gives all results.

    Raises:
        DataDependentError: the data gave one of them another size.
    """
    return _computed(metadata, inputs, dict(enumerate(results)))


def _requiring(metadata: ProgramMetadata, inputs: Sequence[Any]) -> AbstractContextManager[None]:
    """Have inputs require gradients of which the program says so; of a call that is refused they do not."""
    return _now_requiring(metadata, inputs) if metadata.requiring else contextlib.nullcontext()


@contextlib.contextmanager
def _now_requiring(metadata: ProgramMetadata, inputs: Sequence[Any]) -> Iterator[None]:
    told = [inputs[number] for number, requires in metadata.requiring if requires]
    told = [tensor for tensor in told if not tensor.requires_grad]
    for tensor in told:
        tensor.requires_grad_()
    try:
        yield
    except BaseException:
        for tensor in told:
            tensor.requires_grad_(False)
        raise


def compute_differentiably(
    metadata: ProgramMetadata, orders: Orders, inputs: Sequence[Any], refused: Mapping[int, Exception] = _NONE
) -> Computed:
    """What a graph gives, with the captured backward as its derivative; ``refused``: results without one, and why."""
    with _requiring(metadata, inputs):
        with _told_of_sizes(metadata):
            taken = [inputs[number] for number in metadata.taken]
            outputs = differentiable_call(orders, taken, orders.sizes_of(inputs))
        results = dict(zip(orders.first.joint.results, outputs, strict=False))
        further = dict(zip(orders.first.joint.bases, outputs[len(results) :], strict=True))
        computed = _computed(metadata, inputs, results, further)
    if not refused:
        return computed
    sources = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    unknown = [_Unknown(reason, [position], sources) for position, reason in refused.items()]
    return replace(computed, unknown=unknown)


def compute_undifferentiably(
    metadata: ProgramMetadata,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    reason: Exception,
    positions: Sequence[int] | None = None,
) -> Computed:
    """What a graph gives; the reason why it has no backward is raised by those who ask for gradients.

    ``positions``: as in :func:`compute`.

    Raises:
        UnsupportedMutationError: the reason, where autograd must know of the writes to inputs, and cannot be told.
    """
    if isinstance(reason, UnsupportedMutationError) and any(m.differentiable for m in metadata.mutations):
        raise reason
    with torch.no_grad():
        computed = compute(metadata, function, inputs, positions)
    return replace(computed, unknown=_unknown(metadata, computed.results, reason, inputs))


@dataclass(frozen=True, eq=False)
class _Unknown:
    """Results that are to require gradients, of a graph which autograd did not see: a backward raises the reason.

    Without a reason they require gradients of leaves that the program made itself and kept: nobody gets any.
    """

    reason: Exception | None
    positions: Sequence[int]
    sources: Sequence[torch.Tensor]  # what they were computed from

    def told(self, results: Sequence[Any]) -> Sequence[Any]:
        """All results, these as autograd knows them."""
        values = [results[position] for position in self.positions]
        known = dict(zip(self.positions, _undifferentiable(self.reason, values, self.sources), strict=True))
        return [known.get(position, result) for position, result in enumerate(results)]


def _unknown(
    metadata: ProgramMetadata, results: Sequence[Any], reason: Exception | None, inputs: Sequence[Any]
) -> Sequence[_Unknown]:
    """What autograd is to be told of the results of a call; nothing where none is to require gradients."""
    described: list[OutputAlias | BaseResult] = [*metadata.bases]
    described += [alias for alias in metadata.outputs if _of_its_own(alias, metadata.bases)]
    found = {one.result for one in described if one.requires_grad and one.result is not None}
    found |= {write.result for m in metadata.mutations if m.differentiable for write in m.writes}
    positions = sorted(position for position in found if results[position] is not None)
    if not positions:
        return ()
    if reason is None:
        return (_Unknown(None, positions, [torch.empty(0, requires_grad=True)]),)
    # Autograd holds a leaf with the size that it has then, and others with the history that they have then.
    moved = [inputs[m.input] for m in metadata.mutations if m.metadata and not m.detached]
    leaves = {id(tensor) for tensor in moved if tensor.is_leaf}
    sources = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    before = [source for source in sources if id(source) not in leaves]
    history = _undifferentiable(reason, [torch.empty(0)], before) if before else ()
    return (_Unknown(reason, positions, [*history, *(source for source in sources if id(source) in leaves)]),)


def _undifferentiable(
    reason: Exception | None, values: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    with torch.enable_grad():
        return Undifferentiable.apply(reason, len(values), *values, *sources)  # type: ignore[no-any-return, no-untyped-call]


def _of_its_own(alias: OutputAlias, bases: Sequence[BaseResult]) -> bool:
    """Whether an output has the gradient of its result: here no joint graph gives bases that are none."""
    unbased = alias.base is not None and bases[alias.base].result is None
    return alias.kind is AliasKind.RESULT or alias.own_gradient or unbased


def _computed(
    metadata: ProgramMetadata, inputs: Sequence[Any], given: dict[int, Any], further: Mapping[int, Any] = _NONE
) -> Computed:
    """Results, by position; ``further``: the values of bases that are no results.

    Raises where the data gave a size that tracing took for another (a broadcast asks for one).
    """
    results = [given.get(position) for position in range(metadata.graph.outputs)]
    if metadata.graph.decisions:
        check(metadata.graph.decisions, results)
    if metadata.symbols.asserted:
        _check_asserted(metadata, inputs, results)
    return Computed(results, further)


def _check_asserted(metadata: ProgramMetadata, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Raise where the data gave sizes that operators of the program do not take."""
    bindings = metadata.symbols.bind(inputs, results)
    for condition in metadata.symbols.asserted:
        if not bindings.holds(condition):
            raise _unsupported_sizes(f"data-dependent sizes ({bindings}) do not satisfy {condition}")


@contextlib.contextmanager
def _sizes_explained() -> Iterator[None]:
    try:
        yield
    except Diverged:
        raise
    except (RuntimeError, IndexError) as error:
        raise _unsupported_sizes("an operator of the graph rejects data-dependent sizes") from error


def _told_of_sizes(metadata: ProgramMetadata) -> AbstractContextManager[None]:
    """Have an operator that fails say that it may be for the sizes, of a program that took some for granted."""
    return _sizes_explained() if metadata.symbols.asserted else contextlib.nullcontext()


def _unsupported_sizes(what: str) -> DataDependentError:
    return DataDependentError(
        what,
        why="the operator supports only such sizes, or the trace assumed them: where a data-dependent size met a "
        "constant, the trace assumed that both are equal, but eager may broadcast",
        hint="state what you know about the size before (torch._check), or expand the tensor of one element explicitly",
    )
