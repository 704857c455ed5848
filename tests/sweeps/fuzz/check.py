"""One program in one configuration, held against eager. Invariant: the verdict depends on these two alone.

Direct use is compared in everything a caller can see, and in what ``backward`` of the outputs gives. A traced case
counts when plain `make_fx` traces the program and its graph does what eager does; then ours must trace, be functional,
and do the same. The way ``calls`` is that of `tests.sweeps.fuzz.check_calls`. A clear refusal is a verdict of its own,
never a pass.
"""

from __future__ import annotations

import contextlib
import io
import operator
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functionalize import capture, functionalize
from functionalize._torch.fakes import data_dependent
from functionalize.errors import (
    DataDependentError,
    NotFunctionalError,
    UnsupportedMutationError,
    UnsupportedProgramError,
)
from functionalize.verify import assert_functional
from functionalize.verify.observation import Observation, differences, leaf_differences, observe, raises_alike
from tests.sweeps.fuzz import check_calls
from tests.sweeps.fuzz.program import Program
from tests.sweeps.fuzz.verdict import (
    FAILED,
    NOT_COUNTED,
    PASSED,
    Verdict,
    line_of,
    reads_past_a_storage,
    refusal,
    visible_differences,
)

REMOVES = {"mutations": "mutations", "views": "mutations_and_views"}
MODES = tuple(
    f"{mode}/{remove}" for remove in REMOVES for mode in ("direct", "real", "fake", "symbolic", "capture", "calls")
)


def check(program: Program, mode: str, implementation: Any = functionalize) -> Verdict:
    """Run a program in a mode such as ``fake/views`` and compare with eager."""
    way, remove = mode.split("/")
    if way != "calls" and "checkpoint(" in program.body():
        return Verdict(NOT_COUNTED, "draws random numbers")  # only calls are seeded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = program.function()
        if way in ("capture", "calls"):

            def made(function: Any) -> Any:
                return function if implementation is functionalize else implementation(function, remove=REMOVES[remove])

            if way == "calls":
                return check_calls.check_calls(program, REMOVES[remove], made)
            return _captured(program, function, made(function), REMOVES[remove])
        transformed = implementation(function, remove=REMOVES[remove])
        eager = observe(function, program.arguments())
        past = reads_past_a_storage(eager)
        if past is not None:
            return past
        if way == "direct":
            return _direct(program, transformed, eager)
        return _traced(program, function, transformed, eager, way, REMOVES[remove])


def run_in_eager(program: Program, mode: str) -> None:
    """The part of eager in `check`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mode.startswith("calls/"):
            return check_calls.run_in_eager(program)
        eager = observe(program.function(), program.arguments())
        list(_backward_differences(eager, eager, ()))


def _direct(program: Program, transformed: Any, eager: Observation) -> Verdict:
    actual = observe(transformed, program.arguments())
    if isinstance(actual.error, UnsupportedMutationError) and eager.error is None:
        return refusal(actual.error)
    found = list(_compare(eager, actual, direct=True))
    compared = _initialized(eager, program)
    if not found:
        found = [*_visible_differences(eager, actual), *_backward_differences(eager, actual, compared)]
    if eager.error is not None and actual.error is not None and not found:
        for index in compared:
            lines = leaf_differences(eager.inputs[index], actual.inputs[index], strides=True)
            found += [f"input {index} after the error: {line}" for line in lines]
    return _verdict(found, actual)


NEW = 1  # the version of an input as it is made
_VISIBLE = ("storage_offset", "stride", "is_contiguous", "_is_view", "is_conj", "is_neg", "requires_grad", "is_leaf")


def _visible_differences(eager: Observation, actual: Observation) -> Iterator[str]:
    """Differences in what the tensors themselves say, and in which of the inputs say that they were written."""
    yield from visible_differences(eager, actual, _VISIBLE)
    for index, (want, got) in enumerate(zip(eager.inputs, actual.inputs, strict=True)):
        if isinstance(want, torch.Tensor) and (want._version > NEW) != (got._version > NEW):
            yield f"inputs {index}: _version {got._version}, eager gives {want._version}"


def _initialized(eager: Observation, program: Program) -> list[int]:
    """The inputs whose values can be compared: where eager raises, it may have made room and written nothing there."""
    before = [argument.untyped_storage().nbytes() for argument in program.arguments()]
    after = [argument.untyped_storage().nbytes() for argument in eager.inputs]
    return [n for n, grown in enumerate(map(operator.gt, after, before)) if eager.error is None or not grown]


def _backward_differences(eager: Observation, actual: Observation, compared: Sequence[int]) -> Iterator[str]:
    """Differences in the gradients, or the error, that a caller gets who calls ``backward`` on the outputs."""
    errors: list[Exception | None] = []
    for seen in (eager, actual):
        errors.append(None)
        try:
            tensors = [t for t in (*seen.outputs, *seen.inputs) if isinstance(t, torch.Tensor)]
            roots = [t for t in tensors if t.grad_fn is not None]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except Exception as error:
            errors[-1] = error
    if type(errors[0]) is not type(errors[1]):
        yield f"backward afterwards: {line_of(errors[1])}, eager gives {line_of(errors[0])}"
        return
    for index in compared:
        lines = leaf_differences(eager.inputs[index], actual.inputs[index], strides=False)
        yield from (f"input {index} after backward: {line}" for line in lines)


def _compare(eager: Observation, actual: Observation, *, direct: bool) -> Any:
    return differences(eager, actual, strides=direct, aliasing=direct, rtol=None, atol=None)


def _verdict(found: list[str], actual: Observation) -> Verdict:
    if not found:
        return Verdict(PASSED)
    return Verdict(FAILED, "raises" if actual.error is not None else "differs", "; ".join(found))


def _traced(program: Program, function: Any, transformed: Any, eager: Observation, way: str, remove: str) -> Verdict:
    plain, plain_error = _trace(function, program, way)
    if plain is None:
        if eager.error is None or type(plain_error) is not type(eager.error):
            return Verdict(NOT_COUNTED, "make_fx raises")
        graph, error = _trace(transformed, program, way)
        if graph is None and raises_alike(eager.error, error):
            return Verdict(PASSED)
        if isinstance(error, UnsupportedMutationError) and "at other positions" in str(error):
            return refusal(error)  # eager runs that write, and raises later
        return Verdict(FAILED, "no error", f"{line_of(error)}, plain make_fx raises {line_of(plain_error)}")
    if eager.error is not None:
        return Verdict(NOT_COUNTED, "eager raises, make_fx does not")
    wrong = list(_traced_differences(eager, _run(plain, program)))
    graph, error = _trace(transformed, program, way)
    if isinstance(error, UnsupportedMutationError):
        return refusal(error)
    if graph is None and _has_no_complex_symbol(error):
        return Verdict(NOT_COUNTED, "torch makes no complex number of a symbol")
    if graph is None:
        return Verdict(NOT_COUNTED, "make_fx wrong, ours raises") if wrong else Verdict(FAILED, "trace", line_of(error))
    try:
        assert_functional(graph, remove)
    except NotFunctionalError as impure:
        return Verdict(FAILED, "purity", str(impure))
    actual = _run(graph, program)
    found = list(_traced_differences(eager, actual))
    return Verdict(NOT_COUNTED, "both wrong") if wrong and found else _verdict(found, actual)


def _has_no_complex_symbol(error: Exception | None) -> bool:
    """Whether torch's own kernel refused a number of the data beside complex tensors, where it knows only real symbols.

    It does not come that far where a tensor's sizes are symbols yet, as those of one that was written in place are.
    """
    kernels = [frame.name for frame in traceback.extract_tb(error.__traceback__)] if error is not None else []
    return isinstance(error, data_dependent()) and "_maybe_convert_to_dtype" in kernels


def _captured(program: Program, function: Any, made: Any, remove: str) -> Verdict:
    """A captured program is called as eager is, and compared in values, strides and aliasing."""
    plain, _ = _trace(function, program, "fake")
    eager = observe(function, program.arguments())
    if plain is None or eager.error is not None:
        return Verdict(NOT_COUNTED, "make_fx or eager raises")
    wrong = list(_traced_differences(eager, _run(plain, program)))
    try:
        captured = capture(made, program.arguments(), remove=remove)
        assert_functional(captured.graph_module, remove)
    except NotFunctionalError as impure:
        return Verdict(FAILED, "purity", str(impure))
    except UnsupportedProgramError as error:
        return refusal(error)
    except Exception as error:
        return Verdict(NOT_COUNTED, "make_fx wrong, ours raises") if wrong else Verdict(FAILED, "trace", line_of(error))
    actual = observe(captured, program.arguments())
    if isinstance(actual.error, (DataDependentError, UnsupportedProgramError)):
        return refusal(actual.error)
    found = list(_compare(eager, actual, direct=True))
    return Verdict(NOT_COUNTED, "both wrong") if wrong and found else _verdict(found, actual)


def _run(graph: Any, program: Program) -> Observation:
    """Gradients are computed by the graph's nodes, and its write-backs go to leaves too: nothing for autograd to do."""
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # FX prints where a graph raises
        return observe(graph, program.arguments())


def _traced_differences(eager: Observation, actual: Observation) -> Iterator[str]:
    yield from _compare(eager, actual, direct=False)
    for index, (want, got) in enumerate(zip(eager.inputs, actual.inputs, strict=True)):
        if want.storage_offset() != got.storage_offset():
            yield f"input {index}: storage_offset {got.storage_offset()}, eager gives {want.storage_offset()}"


def _trace(function: Any, program: Program, way: Any) -> tuple[Any, Exception | None]:
    torch.manual_seed(0)
    try:
        return make_fx(function, tracing_mode=way)(*program.arguments()), None
    except Exception as error:
        return None, error
