"""``capture``: a program without mutation, recorded in one run on fake tensors, with an account of every write.

Invariant: the objects that the program reaches are, after the capture, as they were before it; the tracer and the fake
tensors live as long as the session. Limits: one thread captures a module at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from functionalize._torch.symbols.tracing import answers_of_export
from functionalize.errors import UnsupportedProgramError, check_choice, check_remove
from functionalize.graph_capture.backward.missing_gradients import serves_without_gradients
from functionalize.graph_capture.inputs.dynamic_shapes import DynamicShapes, with_dims
from functionalize.graph_capture.inputs.hyperparameters import ChangingNumbers
from functionalize.graph_capture.inputs.inputs import ProgramInputs
from functionalize.graph_capture.inputs.training import training_step
from functionalize.graph_capture.inputs.view_inputs import with_roots
from functionalize.graph_capture.refusals.changed_lines import LineWanted
from functionalize.graph_capture.refusals.leaks import Traced
from functionalize.graph_capture.refusals.schedules import NumberRead
from functionalize.graph_capture.session import ByData, CaptureSession
from functionalize.python_state.walk import is_module
from functionalize.runtime.autograd.partition import PartitionFn
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.calls.specialization import Capture, Recorded
from functionalize.runtime.capturing import CAPTURING
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
            Libraries ask, to go a way without Python's caches and without decisions; eager gets ``False``.

    Returns:
        The program: called as the original is, it does what the original does.

    Raises:
        TypeError: ``args`` is neither a tuple nor a list.
        ValueError: an option has no such value.
        InputMismatchError: the program is not right for all sizes that ``dynamic_shapes`` asks for.
        UnsupportedMutationError: the program writes what no functional program can express.
        UnsupportedProgramError: it has tensors or modules that no captured program can have.
        DataDependentError: it branches on tensor values, and the example inputs are fake or ``on_data="raise"``.

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
    """
    check_remove(remove)
    _check_options(args, on_guard_failure, on_data, cache_size)
    dynamic_shapes = with_dims(dynamic_shapes)
    if isinstance(fn, CapturedProgram):
        fn = fn.original
    numbers = ChangingNumbers()

    def recapture(args: Any, kwargs: Any, order: int = 1, answers: Answers | None = None, **how: Any) -> Capture:
        numbers.expect(how.get("changing", ()))
        by_data = on_data == "decide", answers, numbers if on_data == "decide" else None
        exporting = answers_of_export() if is_exporting else contextlib.nullcontext()
        sizes = DynamicShapes(dynamic_shapes, strict=how.get("strict", False))
        with CAPTURING, exporting:
            func, as_views = how.get("function", fn), how.get("as_views", False)
            return _captured(func, args, kwargs, as_views, remove, sizes, optimizer, order, by_data)

    return CapturedProgram(
        recapture(args, dict(kwargs or {}), strict=True),
        remove=remove,
        recapture=recapture,
        partition_fn=partition_fn,
        on_guard_failure=on_guard_failure,
        cache_size=cache_size,
        original=training_step(fn, optimizer) if optimizer is not None and is_module(fn) else fn,
        is_exporting=is_exporting,
    )


def _check_options(args: Any, on_guard_failure: str, on_data: str, cache_size: int) -> None:
    check_choice("on_guard_failure", on_guard_failure, ("raise", "recapture"))
    check_choice("on_data", on_data, ("decide", "raise"))
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of example inputs, not {type(args).__name__}: write capture(fn, (x,))")
    if cache_size < 1:
        raise ValueError(f"cache_size must be at least 1, not {cache_size}")


def _captured(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    as_views: bool,
    remove: str,
    dynamic_shapes: DynamicShapes,
    optimizer: torch.optim.Optimizer | None,
    order: int,
    by_data: ByData,
) -> Capture:
    """What one capture gives for some inputs; ``order``: how often the program is differentiated.

    ``as_views``: whether inputs that overlap are views of what autograd knows them for views of.
    """
    traced: list[Traced] = []  # by each run
    converted, numbers = Conversions.count, by_data[2]
    again = partial(_captured, func, args, kwargs, as_views, remove, dynamic_shapes, optimizer, order, by_data)
    try:
        with Conversions.deciding(numbers is not None and not numbers.converts):
            found = _found(func, args, kwargs, as_views, remove, dynamic_shapes, optimizer, order, by_data, traced)
    except NumberRead:
        for run in traced:
            run.empty_caches()
        numbers.follows_steps = True  # type: ignore[union-attr]
        return again()
    except LineWanted as wanted:
        found_so = partial(_found, func, args, kwargs, as_views, remove, dynamic_shapes, optimizer, order)
        another_run = partial(found_so, by_data, traced)
        refusal = wanted.refusal(another_run)
        for run in traced:
            run.empty_caches()
        raise refusal from None
    except Exception as error:
        for run in traced:
            run.empty_caches()
        if numbers is not None and numbers.converts and Conversions.count > converted and by_data[1] is None:
            return numbers.without_conversions(again)
        if not (numbers is not None and isinstance(error, UnsupportedProgramError) and numbers.give_up()):
            raise
        return again()
    for run in traced:
        run.check()
    return found


def _found(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    as_views: bool,
    remove: str,
    dynamic_shapes: DynamicShapes,
    optimizer: torch.optim.Optimizer | None,
    order: int,
    by_data: ByData,
    traced: list[Traced],
) -> Capture:
    """What :func:`_captured` gives; ``traced`` gets what was traced on the way."""
    roots: dict[str, Any] = {"": func} if is_module(func) else {}
    if optimizer is not None:
        roots["optimizer"] = optimizer
    step = training_step(func, optimizer) if optimizer is not None and is_module(func) else func

    def begun(**options: bool) -> CaptureSession:
        inputs = ProgramInputs(func, roots, args, kwargs, numbers=by_data[2], **options)
        inputs.inputs = with_roots(inputs.inputs) if as_views else inputs.inputs
        session = CaptureSession(step, inputs, remove, dynamic_shapes, order, by_data)
        traced.append(session.traced)
        return session

    first = begun()
    found = first.run_unless_hooked()
    hooked = found is None
    if found is None:
        first.empty_caches()
        first = begun(hooked=True)
        found = first.run()
    if not found.metadata.gradients or first.has_all_gradients:
        return first.capture(found)
    # The next call will find the gradients that this one leaves. A program that drops them first is right for both.
    first.empty_caches()
    second = begun(hooked=hooked, suppose_gradients=True)
    assuming = _run_unless_raising(second)
    if assuming is not None and serves_without_gradients(assuming, found):
        return second.capture(assuming)
    return first.capture(found)


def _run_unless_raising(session: CaptureSession) -> Recorded | None:
    """What a run finds that supposes more than this call has; None if it raises, which is then not this call's."""
    try:
        return session.run()
    except Exception:
        session.empty_caches()
        return None
