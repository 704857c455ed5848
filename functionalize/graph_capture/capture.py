"""``capture``: a program without mutation, recorded in one run on fake tensors, with an account of every write.

Invariant: the objects that the program reaches are, after the capture, as they were before it; the tracer and the fake
tensors live as long as the session. Limits: one thread captures a module at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from functionalize._torch.symbols.tracing import answers_of_export
from functionalize.call_stack import with_room_for_frames
from functionalize.errors import OverlappingInputsError, UnsupportedProgramError, check_choice, check_remove
from functionalize.graph_capture.agreement import agree_on_capture
from functionalize.graph_capture.backward.missing_gradients import serves_without_gradients
from functionalize.graph_capture.inputs.dynamic_shapes import DynamicShapes, with_dims
from functionalize.graph_capture.inputs.hyperparameters import ChangingNumbers
from functionalize.graph_capture.inputs.training import training_step
from functionalize.graph_capture.parallel_modules import FirstForward
from functionalize.graph_capture.refusals.changed_lines import LineWanted
from functionalize.graph_capture.refusals.leaks import Traced
from functionalize.graph_capture.refusals.schedules import NumberRead
from functionalize.graph_capture.refusals.torch_errors import is_bool_as_option
from functionalize.graph_capture.request import CaptureRequest
from functionalize.graph_capture.session import CaptureSession
from functionalize.python_state.walk import is_module
from functionalize.runtime.autograd.partition import PartitionFn
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.calls.specialization import Capture, Recorded
from functionalize.runtime.capturing import CAPTURING, garbage_kept
from functionalize.runtime.communication import logging_capture
from functionalize.runtime.decisions import Answers
from functionalize.transform.functions.numbers import Conversions


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    remove: str = "mutations_and_views",
    dynamic_shapes: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    on_guard_failure: str = "raise",
    cache_size: int = 8,
    partition_fn: PartitionFn | None = None,
    on_data: str = "decide",
    is_exporting: bool = False,
    gradients: str = "when_needed",
) -> CapturedProgram:
    """Record what a module or a function computes as a program without mutation.

    Nothing is computed and no data are allocated: parameters, buffers and inputs are replaced by fake tensors that
    alias one another as the originals do, the program runs once, and what it dispatches is recorded.

    Args:
        fn: a module, or a function of tensors, pytrees of tensors, and other values. Modules and optimizers
            that a function reaches by its variables are state of the program, as those of a module are.
        args: example inputs, a tuple or a list. The program is right for inputs of the same shapes, dtypes, devices
            and aliasing.
        kwargs: example inputs by name.
        remove: ``"mutations_and_views"`` (the default here; that of ``functionalize`` is ``"mutations"``) replaces
            view ops by their ``*_copy`` variants; ``"mutations"`` keeps view ops.
        dynamic_shapes: as in ``torch.export.export``: which sizes may differ from call to call. A program that is
            right for a part of a ``Dim``'s sizes only is an error; with ``Dim.AUTO`` it takes the sizes that it can.
            A name is a ``Dim``: ``{"x": {0: "batch"}}``, as torch.onnx has it; sizes of one name are equal.
        optimizer: of a function, an optimizer whose state it updates. With a module that returns a loss (a scalar, or
            an output with a ``loss``), the program is a training step: ``zero_grad()``, forward,
            ``backward()`` and ``step()``.
        on_guard_failure: ``"raise"``, or ``"recapture"`` to capture one more program for a call that the guards
            refuse (other shapes, strides, modes of torch, Python state; see ``program.guards``).
        cache_size: how many programs are kept at most; the one that was not called for longest goes. Of each of these
            as many variants, which differ in the branches they take; more are an error.
        partition_fn: as in AOTAutograd: cuts the joint graph of forward and backward in two when a call is first
            differentiated. Unless given, ``min_cut_rematerialization_partition``.
        on_data: where the program branches on tensor values (``if x.sum() > 0``): with ``"decide"`` the capture takes
            the branch of the example inputs, each call checks its outcome, and another outcome is captured as a
            further variant; ``"raise"`` refuses such a program.
        is_exporting: what ``torch.compiler.is_compiling()`` and ``is_exporting()`` answer while a capture runs.
            Libraries ask, to avoid Python's caches and decisions; eager gets ``False``.
        gradients: when the backward is captured. With ``"when_needed"`` the first call whose results require
            gradients runs the program on fake tensors once more, before it changes anything, and captures forward and
            backward together; exports need no backward. ``"now"`` captures it at once, and raises at once if the
            program has no gradients that a captured program can give.

    Returns:
        The program: called as the original is, it does what the original does.

    Raises:
        TypeError: ``args`` is neither a tuple nor a list.
        ValueError: an option has no such value.
        InputMismatchError: the program is not right for all sizes that ``dynamic_shapes`` asks for.
        UnsupportedMutationError: the program writes what no functional program can express.
        UnsupportedProgramError: it has tensors or modules that no captured program can have.
        DataDependentError: it branches on tensor values, and the example inputs are fake or ``on_data="raise"``.
        RuntimeError: with ``gradients="now"``, the backward cannot be captured; the message says why.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> def bump(x):
        ...     x[0].add_(1)
        ...     return x.sum()
        >>> program = capture(bump, (torch.zeros(3),))
        >>> [write.target for write in program.mutations]
        ['x']
        >>> x = torch.zeros(3)
        >>> program(x), x
        (tensor(1.), tensor([1., 0., 0.]))
        >>> program = capture(bump, (torch.zeros(3),), dynamic_shapes={"x": {0: "length"}})
        >>> program(torch.zeros(5))
        tensor(1.)
        >>> x = torch.ones(3, requires_grad=True)
        >>> program = capture(lambda x: (x * x).sum(), (x,), gradients="now")
        >>> program(x).backward()
        >>> x.grad
        tensor([2., 2., 2.])
    """
    check_remove(remove)
    _check_options(args, on_guard_failure, on_data, cache_size, gradients)
    dynamic_shapes = with_dims(dynamic_shapes)
    if isinstance(fn, CapturedProgram):
        fn = fn.original
    numbers, name = ChangingNumbers(), getattr(fn, "__qualname__", type(fn).__name__)

    def recapture(args: Any, kwargs: Any, order: int = 1, answers: Answers | None = None, **how: Any) -> Capture:
        numbers.expect(how.get("changing", ()))
        request = CaptureRequest(
            function=how.get("function", fn),
            args=args,
            kwargs=kwargs,
            remove=remove,
            sizes=DynamicShapes(dynamic_shapes, strict=how.get("strict", False)),
            optimizer=optimizer,
            order=order,
            answers=answers,
            numbers=numbers if on_data == "decide" else None,
            **{option: how[option] for option in ("as_views", "adapt") if option in how},
        )
        exporting = answers_of_export() if is_exporting else contextlib.nullcontext()
        with CAPTURING, garbage_kept(), exporting, logging_capture(f"{name}, again"):
            return with_room_for_frames(partial(_captured, request))

    with logging_capture(name) as log:
        try:
            first = recapture(args, dict(kwargs or {}), order=1 if gradients == "now" else 0, strict=True)
        except Exception as error:
            agree_on_capture(log, None, error)
            raise
        agree_on_capture(log, first.recorded.graph)
    reason = first.recorded.joint
    if gradients == "now" and isinstance(reason, Exception) and not isinstance(reason, OverlappingInputsError):
        raise reason
    return CapturedProgram(
        first,
        remove=remove,
        recapture=recapture,
        partition_fn=partition_fn,
        on_guard_failure=on_guard_failure,
        cache_size=cache_size,
        original=training_step(fn, optimizer) if optimizer is not None and is_module(fn) else fn,
        is_exporting=is_exporting,
    )


def _check_options(args: Any, on_guard_failure: str, on_data: str, cache_size: int, gradients: str) -> None:
    check_choice("gradients", gradients, ("when_needed", "now"))
    check_choice("on_guard_failure", on_guard_failure, ("raise", "recapture"))
    check_choice("on_data", on_data, ("decide", "raise"))
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of example inputs, not {type(args).__name__}: write capture(fn, (x,))")
    if cache_size < 1:
        raise ValueError(f"cache_size must be at least 1, not {cache_size}")


def _captured(request: CaptureRequest) -> Capture:
    """The capture of a request, by as many runs of the program as it takes."""
    traced: list[Traced] = []  # one for each run
    converted, numbers = Conversions.count, request.numbers
    try:
        with Conversions.deciding(numbers is not None and not numbers.converts):
            captured = _run(request, traced)
    except NumberRead:
        _empty_caches(traced)
        numbers.follows_steps = True  # type: ignore[union-attr]
        return _captured(request)
    except FirstForward as first:
        _empty_caches(traced)
        first.shards.initialize()
        return _captured(request)
    except LineWanted as wanted:
        refusal = wanted.refusal(partial(_run, request, traced))
        _empty_caches(traced)
        raise refusal from None
    except Exception as error:
        _empty_caches(traced)
        needs_plain = Conversions.count > converted or is_bool_as_option(error)
        if numbers is not None and numbers.converts and needs_plain and request.answers is None:
            return numbers.without_conversions(partial(_captured, request))
        if not (numbers is not None and isinstance(error, UnsupportedProgramError) and numbers.give_up()):
            raise
        return _captured(request)
    for run in traced:
        run.check()
    return captured


def _empty_caches(traced: Iterable[Traced]) -> None:
    for run in traced:
        run.empty_caches()


def _run(request: CaptureRequest, traced: list[Traced]) -> Capture:
    """Run the program, with the hooks and the gradients that it needs; ``traced`` gets what each run traced."""

    def new_session(*, hooked: bool, suppose_gradients: bool = False) -> CaptureSession:
        session = CaptureSession(request, hooked=hooked, suppose_gradients=suppose_gradients)
        traced.append(session.traced)
        return session

    first = new_session(hooked=False)
    recorded = first.run_unless_hooked()
    hooked = recorded is None
    if recorded is None:
        first.empty_caches()
        first = new_session(hooked=True)
        recorded = first.run()
    if not recorded.metadata.gradients or first.has_all_gradients:
        return first.capture(recorded)
    # The next call will find the gradients that this one leaves. A program that drops them first is right for both.
    first.empty_caches()
    second = new_session(hooked=hooked, suppose_gradients=True)
    supposing = _run_unless_raising(second)
    if supposing is not None and serves_without_gradients(supposing, recorded):
        return second.capture(supposing)
    return first.capture(recorded)


def _run_unless_raising(session: CaptureSession) -> Recorded | None:
    """The record of a run that supposes gradients; None if it raises, which the call's own run did not."""
    try:
        return session.run()
    except Exception:
        session.empty_caches()
        return None
