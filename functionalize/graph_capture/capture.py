"""``capture``: a program without mutation, recorded in one run on fake tensors, with an account of every write.

Invariant: the objects that the program reaches are, after the capture, as they were before it; the tracer and the fake
tensors live as long as the session. Limits: one thread captures a module at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from functionalize._torch import ASKED_PROPERTIES, GRADIENT, HOOKS, FakeTensor, has_gradient_hooks
from functionalize._torch.fakes import (
    CaptureFakeMode,
    below_dispatch,
    fake_mode_of,
    new_fake_mode,
)
from functionalize._torch.tracing import answers_of_export
from functionalize.errors import UnsupportedProgramError, check_choice, check_remove
from functionalize.graph_capture.classes_of_stand_ins import classes_of_stand_ins
from functionalize.graph_capture.decisions import Decider
from functionalize.graph_capture.dynamic_shapes import check_free, dims_of, relate, size_guards
from functionalize.graph_capture.example_data import NoDataError
from functionalize.graph_capture.gradient_hooks import HooksTakenBack, check_hooks, lend
from functionalize.graph_capture.inputs import MissingGradient, ProgramInputs, is_leaf
from functionalize.graph_capture.leaks import Traced, take_back
from functionalize.graph_capture.numbers import ChangingNumbers, Numbers
from functionalize.graph_capture.provenance import Provenance
from functionalize.graph_capture.random_sources import RandomSources, refuse_drawn
from functionalize.graph_capture.recording_session import RecordingSession
from functionalize.graph_capture.symbol_text import text_of_symbols
from functionalize.graph_capture.symbolic_math import math_of_symbols
from functionalize.graph_capture.tracing_errors import OTHERWISE, otherwise
from functionalize.graph_capture.training import serves_without_gradients, training_step
from functionalize.runtime.call_tree import CallTree
from functionalize.runtime.captured_program import CapturedProgram
from functionalize.runtime.containers import NumberSlot
from functionalize.runtime.decisions import Answers
from functionalize.runtime.guards import Assumptions, Guards
from functionalize.runtime.modes import modes_now
from functionalize.runtime.partition import PartitionFn
from functionalize.runtime.side_effects import SideEffectRecorder
from functionalize.runtime.specialization import CAPTURING, Capture, Recorded
from functionalize.runtime.state_walk import is_module
from functionalize.tracing.fakeify import fakes_of
from functionalize.tracing.metas import METAS
from functionalize.transform.api import run_call

# Whether data decide; instead of them, what is to be answered; the numbers that data of their own decide by.
ByData = tuple[bool, Answers | None, ChangingNumbers | None]


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
        remove: ``"mutations_and_views"`` to compute by ``*_copy`` ops what view ops would alias, or ``"mutations"``.
        dynamic_shapes: as in ``torch.export.export``: which sizes may differ from call to call.
        optimizer: of a function, an optimizer whose state it updates. With a module that returns a loss (a scalar, or
            an output with a ``loss``), the program is a training step: forward, ``backward()`` and ``step()``.
        on_guard_failure: ``"raise"``, or ``"recapture"`` to capture one more program for a call that the guards
            refuse (other shapes, strides, modes of torch, Python state; see ``program.guards``).
        cache_size: how many programs are kept at most; the one that was not called for longest goes. Of each of these
            as many variants, which differ in what the data decide; more are an error.
        partition_fn: as in AOTAutograd: cuts the joint graph of forward and backward in two when a call is first
            differentiated. Unless given, ``min_cut_rematerialization_partition``.
        on_data: where the program decides by data (``if x.sum() > 0``): ``"decide"`` as the example inputs do, to check
            at each call whether it decides alike, and to capture another variant where it does not; or ``"raise"``.
        is_exporting: what ``torch.compiler.is_compiling()`` and ``is_exporting()`` answer while a capture runs.
            Libraries ask, to go a way without Python's caches and without decisions; eager gets ``False``.

    Returns:
        The program: called as the original is, it does what the original does.

    Raises:
        TypeError: ``args`` is neither a tuple nor a list.
        ValueError: an option has no such value.
        UnsupportedMutationError: the program writes what no functional program can express.
        UnsupportedProgramError: it has tensors or modules that no captured program can have.
        DataDependentError: it decides by data, and has none (fake example inputs), or is not to.

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
    """
    check_remove(remove)
    check_choice("on_guard_failure", on_guard_failure, ("raise", "recapture"))
    check_choice("on_data", on_data, ("decide", "raise"))
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of example inputs, not {type(args).__name__}: write capture(fn, (x,))")
    if cache_size < 1:
        raise ValueError(f"cache_size must be at least 1, not {cache_size}")

    numbers = ChangingNumbers()

    def captured(args: Any, kwargs: Any, order: int = 1, answers: Answers | None = None) -> Capture:
        by_data = on_data == "decide", answers, numbers if on_data == "decide" else None
        with answers_of_export() if is_exporting else contextlib.nullcontext():
            return _captured(fn, args, kwargs, remove, dynamic_shapes, optimizer, order, by_data)

    with CAPTURING:
        first = captured(args, dict(kwargs or {}))
    return CapturedProgram(
        first,
        remove=remove,
        recapture=captured,
        partition_fn=partition_fn,
        on_guard_failure=on_guard_failure,
        cache_size=cache_size,
        original=training_step(fn, optimizer) if optimizer is not None and is_module(fn) else fn,
    )


def _captured(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    remove: str,
    dynamic_shapes: Any,
    optimizer: torch.optim.Optimizer | None,
    order: int,
    by_data: ByData,
) -> Capture:
    """What one capture gives for some inputs; ``order``: how often the program is differentiated."""
    traced: list[Traced] = []  # by each run
    try:
        found = _found(func, args, kwargs, remove, dynamic_shapes, optimizer, order, by_data, traced)
    except UnsupportedProgramError:
        for run in traced:
            run.empty_caches()
        if by_data[2] is None or not by_data[2].give_up():
            raise
        return _captured(func, args, kwargs, remove, dynamic_shapes, optimizer, order, by_data)
    except Exception:
        for run in traced:
            run.empty_caches()
        raise
    for run in traced:
        run.check()
    return found


def _found(
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    remove: str,
    dynamic_shapes: Any,
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
    assuming = second.run()
    serves = serves_without_gradients(assuming.metadata, found.metadata)
    return second.capture(assuming) if serves else first.capture(found)


class CaptureSession(RecordingSession):
    """One run of a program on fake tensors in the places of its inputs."""

    def __init__(
        self,
        func: Callable[..., Any],
        inputs: ProgramInputs,
        remove: str,
        dynamic_shapes: Any = None,
        order: int = 1,
        by_data: ByData = (False, None, None),
    ) -> None:
        self._func, self._inputs = func, inputs
        self._modes = modes_now()
        self._asked: set[str] = set()  # what the program has asked tensors
        self._constants = dict[int, tuple[torch.Tensor, int]]()  # tensors of no state that it wrote, their versions
        self._dims = {} if dynamic_shapes is None else dims_of(inputs, dynamic_shapes)
        tensors = [entry.value for entry in inputs.inputs if isinstance(entry.value, torch.Tensor)]
        symbolic = bool(self._dims)
        fake_mode = fake_mode_of(tensors) or new_fake_mode(symbolic=symbolic, metas=METAS)
        self._provenance = Provenance(inputs.state.modules, run_call.__code__)
        remove_views = remove == "mutations_and_views"
        super().__init__(fake_mode, self._provenance.note, remove_views=remove_views, symbolic=symbolic, order=order)

        def with_symbols(tensor: torch.Tensor) -> torch.Tensor:
            from functionalize._torch.symbols import with_symbols  # here: loads sympy

            return with_symbols(fake_mode, tensor, f"input{id(tensor)}", list(self._dims.get(id(tensor), ())))

        self.states = inputs.state, inputs.arguments
        self._fakes = fakes_of(tensors, self.factory, self._dims.keys(), with_symbols)
        for entry in inputs.inputs:
            entry.fake = self._fakes.get(id(entry.value))
            if isinstance(entry.value, MissingGradient):
                with below_dispatch():
                    entry.fake = self.factory.like_real(entry.value.of)
        self._numbers = Numbers(
            [(e.slot, e.fake) for e in inputs.inputs if isinstance(e.slot, NumberSlot)], inputs.tied
        )
        if by_data[0]:
            self.decider = Decider(self.recorder, self.regions, self._example, self._provenance.now, by_data[1])

    @property
    def traced(self) -> Traced:
        """The tensors that the run traces."""
        given = (entry.value for entry in self._inputs.inputs if isinstance(entry.value, FakeTensor))
        return Traced(self.recorder.tracer.tensor_tracker, given)

    def empty_caches(self) -> None:
        """Empty caches by arguments that the run filled, if anything but the inputs outlives it."""
        fakes = [entry.fake for entry in self._inputs.inputs if entry.fake is not None]
        own = {id(one) for fake in fakes for one in (fake, fake.grad if fake.is_leaf else None)}
        if any(id(tensor) not in own for tensor, _ in self.traced.alive()):
            self.traced.empty_caches()

    def _example(self, placeholder: Any) -> Any:
        """What an input of the graph is for the example inputs; of others than the program's there is nothing."""
        entry = next((one for one in self._inputs.inputs if one.name == placeholder.target), None)
        if entry is None:
            raise NoDataError(f"`{placeholder.target}` is no input of the program")
        missing = isinstance(entry.value, MissingGradient)
        return torch.zeros_like(entry.value.of) if missing else entry.value

    @property
    def _misses_hooks(self) -> bool:
        held = (slot.get() for slot in self._inputs.state.tensors)
        return HOOKS in self._asked and not self._inputs.hooked and any(map(has_gradient_hooks, held))

    @property
    def has_all_gradients(self) -> bool:
        """Whether every leaf had a gradient."""
        given = {id(entry.gradient_of) for entry in self._inputs.inputs if entry.gradient_of is not None}
        return given >= {id(entry) for entry in self._inputs.inputs if is_leaf(entry.value)}

    def run_unless_hooked(self) -> Recorded | None:
        """Record the program; None if it took gradients without the hooks that its state has on them."""
        try:
            found = self.run()
        except Exception:
            if not self._misses_hooks:
                raise
        return None if self._misses_hooks else found

    def run(self) -> Recorded:
        """Record the program, and put the sources of random numbers back."""
        inputs = self._inputs
        values = [slot.get() for slot in (*inputs.state.constants, *inputs.arguments.constants)]
        sources, drawn = RandomSources(values), list[str]()
        try:
            found = self._recorded()
        finally:
            drawn = sources.restore()
            take_back(self._constants.values(), self._lifted())
        refuse_drawn(drawn)
        return found

    def _lifted(self) -> list[torch.Tensor]:
        """The tensors that the program has reached in another way than through state."""
        tracer: Any = self.recorder.tracer  # of stubs that know another kind, too
        root, inputs = tracer.root, self._inputs.inputs
        own = (entry.value for entry in inputs if entry.slot is None and entry.fake is entry.value)
        return [one for one in (*own, *vars(root).values(), *root.buffers()) if isinstance(one, torch.Tensor)]

    def _recorded(self) -> Recorded:
        inputs = self._inputs
        self.add_inputs(inputs.inputs)
        mode = self.fake_mode
        alone = mode.of_this_thread() if isinstance(mode, CaptureFakeMode) else contextlib.nullcontext()
        stood_in = inputs.state.substituted(self._fakes), inputs.arguments.substituted(self._fakes)
        # Around all: hooks on all modules are among what the program changes.
        with alone, self._provenance.watched(), self._numbers.restored(), stood_in[0], stood_in[1]:
            for entry in inputs.inputs:
                if entry.gradient_of is not None and entry.gradient_of.fake is not None:
                    entry.gradient_of.fake.grad = entry.fake
            if inputs.hooked:
                lend(inputs.inputs)
            effects = SideEffectRecorder([inputs.state, inputs.arguments], inputs.follower.is_log, inputs.walk_again)
            symbols = math_of_symbols(self.recorder.tracer), text_of_symbols(mode.shape_env)
            classes = classes_of_stand_ins(mode.shape_env, inputs.follower.asking.values(), at_once=bool(self._dims))
            with self.active(), symbols[0], symbols[1], classes, HooksTakenBack(inputs.state):
                if self._dims:
                    relate(self._dims, self._fakes)
                with self.recorder:
                    found = self.record(
                        self._program,
                        inputs.inputs,
                        effects.side_effects,
                        self._provenance.here,
                        self._follow,
                    )
        if self._dims:
            check_free(self._dims, self._fakes)
        self._provenance.write(found.graph)
        self._numbers.check()
        changed = inputs.settings.changed_inside()
        if changed is not None:
            raise UnsupportedProgramError(
                f"the program changes what `{changed.path}` holds, a {type(changed.value).__name__}",
                why="objects of this class keep what they hold to themselves: a call could not do the same",
                hint="keep it in an attribute, a list or a dict",
            )
        return found

    def _follow(self, context: Any) -> None:
        self._provenance.follow(context)
        context.notes.unused.update(id(entry.fake) for entry in self._inputs.inputs if entry.optional)
        self._asked, context.notes.constants = context.notes.asked, self._constants

    def _program(self) -> Any:
        if self._numbers.places:
            self._numbers.place()
            self._inputs.state.begin()
        return self._func(*self._inputs.args, **self._inputs.kwargs)

    def _check_stand_ins(self, found: Recorded) -> None:
        """Raise where the program asked of an input what its stand-in says otherwise, or left a hook there."""
        for entry in self._inputs.inputs:
            if isinstance(entry.value, torch.Tensor) and entry.fake is not None:
                for name in sorted(found.asked & OTHERWISE.keys()):
                    if ASKED_PROPERTIES[name](entry.value) and not ASKED_PROPERTIES[name](entry.fake):
                        raise otherwise(name, entry.target or entry.name)
        check_hooks(self._inputs.inputs, found.asked)

    def capture(self, found: Recorded) -> Capture:
        """What the run gave, with what it takes for granted."""
        metadata, inputs = found.metadata, self._inputs
        self._check_stand_ins(found)
        supposed = any(isinstance(entry.value, MissingGradient) for entry in inputs.inputs)
        leaves_new = bool(metadata.gradients) and not self.has_all_gradients
        matter = not supposed and (leaves_new or GRADIENT in found.asked)
        assumptions = Assumptions(
            self._modes,
            inputs.settings,
            inputs.state,
            inputs.call,
            [e.value.of if isinstance(e.value, MissingGradient) else e.value for e in inputs.inputs],
            sizes=size_guards(self.fake_mode.shape_env, metadata),
            gradients_matter=matter or (bool(metadata.gradients_read) and not metadata.only_accumulates),
            asked=found.asked,
            written={number for number, entry in enumerate(inputs.inputs) if entry.writes},
        )
        ways = inputs.convention, self.modes_left, CallTree.of(inputs.call)
        return Capture(found, Guards(metadata, assumptions), inputs.state, *ways)
