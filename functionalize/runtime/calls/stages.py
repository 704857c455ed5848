"""The stages of a call up to its results: each wraps a computation, and a program has the stages that it needs.

A stage is a function whose last arguments are the computation that it wraps and the program's inputs; bound to all but
the inputs, it is a computation again. :func:`composed` binds the stages that captured programs and compiled Dynamo
graphs share; a ``Specialization`` binds those that only captured programs have.

Invariant: a call that a stage refuses has changed nothing, and has drawn no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from functionalize.errors import DataDependentError, UnsupportedMutationError, in_words
from functionalize.refusals.values import SIZES_BROKEN, SIZES_REJECTED
from functionalize.runtime.autograd.joint import called
from functionalize.runtime.calls.computation import Computed
from functionalize.runtime.decisions import Diverged, check
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.random_state import RandomState

Compute = Callable[[list[Any]], Computed]  # from the program's inputs


class RunAsWritten(Exception):
    """An operator raised, and the program has handlers, so the call runs the program; not seen by callers."""


def composed(metadata: ProgramMetadata, compute: Compute) -> Compute:
    """A computation in the stages for data-dependent sizes, and for inputs that the program makes require gradients."""
    if metadata.symbols.asserted:
        compute = partial(assuming_sizes, metadata, compute)
    numbers = [number for number, requires in metadata.requiring if requires]
    return partial(requiring_gradients, numbers, compute) if numbers else compute


def requiring_gradients(numbers: Sequence[int], compute: Compute, inputs: list[Any]) -> Computed:
    """Make some inputs require gradients, as the program does; this is undone if the call is refused."""
    changed = [tensor for tensor in map(inputs.__getitem__, numbers) if not tensor.requires_grad]
    for tensor in changed:
        tensor.requires_grad_()
    try:
        return compute(inputs)
    except BaseException:
        for tensor in changed:
            tensor.requires_grad_(False)
        raise


def assuming_sizes(metadata: ProgramMetadata, compute: Compute, inputs: list[Any]) -> Computed:
    """Check the conditions on data-dependent sizes that the trace assumed; an operator may fail if they do not hold.

    Raises:
        DataDependentError: the sizes of a call do not satisfy the conditions.
    """
    try:
        computed = compute(inputs)
    except (Diverged, UnsupportedMutationError):
        raise
    except (RuntimeError, IndexError) as error:
        if type(error) not in (RuntimeError, IndexError):  # a matrix is singular, or memory is full
            raise
        raise SIZES_REJECTED.error(error=error) from error
    bindings = metadata.symbols.bind(inputs, computed.results)
    for condition in metadata.symbols.asserted:
        if not bindings.holds(condition):
            raise SIZES_BROKEN.error(sizes=bindings, condition=condition)
    return computed


def comparing_decisions(
    metadata: ProgramMetadata, function: Callable[..., Any], compute: Compute, inputs: list[Any]
) -> Computed:
    """Compare the decisions among the results with those of the capture.

    ``function``: the graph, which compares each decision as soon as it is computed.

    Raises:
        Diverged: a decision differs.
    """
    random = _random_state(metadata.graph.draws, metadata, inputs)
    try:
        computed = compute(inputs)
        check(metadata.graph.decisions, computed.results)
        return computed
    except Diverged as error:
        diverged = error
    except Exception:  # perhaps raised by what the program does only on the captured branches
        with random.again():
            divergence = _divergence(function, [inputs[number] for number in metadata.taken])
        if divergence is None:
            raise
        diverged = divergence
    random.restore()
    raise diverged


def _divergence(function: Callable[..., Any], inputs: Sequence[Any]) -> Diverged | None:
    """The decision that differs; None if none does, or the graph fails before one does."""
    try:
        with torch.no_grad():
            called(function, inputs)
    except Diverged as error:
        return error
    except Exception:
        return None
    return None


def after_precheck(precheck: Callable[[Sequence[Any]], None], compute: Compute, inputs: list[Any]) -> Computed:
    """Check decisions on numbers among the inputs before anything is computed."""
    precheck(inputs)
    return compute(inputs)


def catching(metadata: ProgramMetadata, draws: Sequence[Any], compute: Compute, inputs: list[Any]) -> Computed:
    """If an operator raises, have the call run the program as written, which has handlers.

    Errors of this package pass: to run the program would hide what is wrong with its graph.

    Raises:
        RunAsWritten: an operator raised; the generators are as they were.
    """
    random = _random_state(draws, metadata, inputs)
    try:
        return compute(inputs)
    except Diverged:
        raise
    except Exception as error:
        if in_words(error) and not isinstance(error, DataDependentError):
            raise
    random.restore()
    raise RunAsWritten


def adding_gradients(
    missing: Callable[[Sequence[Any]], Mapping[int, torch.Tensor]],
    metadata: ProgramMetadata,
    compute: Compute,
    inputs: list[Any],
) -> Computed:
    """Give inputs without gradients zeros, to which the program adds; ``missing``: computes the zeros, by input."""
    zeros = missing(inputs)
    for number, gradient in zeros.items():
        inputs[number] = gradient
    computed = compute(inputs)
    for number, gradient in zeros.items():  # nothing is refused from here on
        inputs[metadata.inputs[number].gradient_of].grad = gradient  # type: ignore[index]
    return computed


def _random_state(draws: Sequence[Any], metadata: ProgramMetadata, inputs: Sequence[Any]) -> RandomState:
    if not draws:
        return _DRAWS_NOTHING
    return RandomState.now(draws, {metadata.inputs[n].name: inputs[n] for n in metadata.taken})


_DRAWS_NOTHING = RandomState()
