"""``capture``: a program without mutation, recorded in one run on fake tensors, with an account of every write.

Invariant: the objects that the program reaches are, after the capture, as they were before it.
Limits: one thread captures a module at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch.fakes import below_dispatch, fake_mode_of, new_fake_mode
from functionalize.errors import check_remove
from functionalize.graph_capture.dynamic_shapes import DynamicSizes, dims_of, size_guards
from functionalize.graph_capture.finalize import Finalized
from functionalize.graph_capture.inputs import MissingGradient, ProgramInputs, is_leaf, reached
from functionalize.graph_capture.observers import notify
from functionalize.graph_capture.provenance import Provenance
from functionalize.graph_capture.session import RecordingSession
from functionalize.graph_capture.training import make_state, training_step
from functionalize.runtime.captured_program import Capture, CapturedProgram
from functionalize.runtime.guards import Guards
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.partition import PartitionFn
from functionalize.runtime.side_effects import SideEffectRecorder
from functionalize.runtime.state_walk import is_module
from functionalize.tracing.fakeify import fakes_of
from functionalize.tracing.metas import METAS
from functionalize.transform.api import run_call


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    remove: str = "mutations_and_views",
    dynamic_shapes: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    on_guard_failure: str = "raise",
    partition_fn: PartitionFn | None = None,
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
        on_guard_failure: ``"raise"``, or ``"recapture"`` to capture again when a call brings other inputs.
        partition_fn: as in AOTAutograd: cuts the joint graph of forward and backward in two when a call is first
            differentiated. Unless given, ``min_cut_rematerialization_partition``.

    Returns:
        The program: called as the original is, it does what the original does.

    Raises:
        TypeError: ``args`` is neither a tuple nor a list.
        ValueError: an option has no such value.
        UnsupportedMutationError: the program writes what no functional program can express.

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
    if on_guard_failure not in ("raise", "recapture"):
        raise ValueError(f"on_guard_failure must be 'raise' or 'recapture', not {on_guard_failure!r}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of example inputs, not {type(args).__name__}: write capture(fn, (x,))")
    request = CaptureRequest(fn, remove, dynamic_shapes, optimizer, on_guard_failure, partition_fn)
    return request.capture(args, dict(kwargs or {}))


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """What is captured, for the first inputs and for others."""

    func: Callable[..., Any]
    remove: str
    dynamic_shapes: Any
    optimizer: torch.optim.Optimizer | None
    on_guard_failure: str
    partition_fn: PartitionFn | None

    def capture(self, args: Any, kwargs: Any) -> CapturedProgram:
        """The program for some inputs."""
        return CapturedProgram(
            self._captured(args, kwargs),
            remove=self.remove,
            partition_fn=self.partition_fn,
            recapture=self.capture,
            on_guard_failure=self.on_guard_failure,
        )

    def _roots(self) -> dict[str, Any]:
        roots: dict[str, Any] = {"": self.func} if is_module(self.func) else reached(self.func)
        if self.optimizer is not None and not any(root is self.optimizer for root in roots.values()):
            roots["optimizer"] = self.optimizer
        return roots

    def _captured(self, args: Any, kwargs: Any) -> Capture:
        roots = self._roots()
        for root in roots.values():
            if isinstance(root, torch.optim.Optimizer):
                make_state(root)
        steps = self.optimizer is not None and is_module(self.func)
        func = training_step(self.func, self.optimizer) if steps else self.func
        inputs = ProgramInputs(self.func, roots, args, kwargs)
        first = CaptureSession(func, inputs, self.remove, self.dynamic_shapes)
        found = first.run()
        if not found.metadata.gradients or first.has_all_gradients:
            return first.capture(found)
        # The next call will find the gradients that this one leaves. A program that drops them first is right for both.
        inputs = ProgramInputs(self.func, roots, args, kwargs, suppose_gradients=True)
        second = CaptureSession(func, inputs, self.remove, self.dynamic_shapes)
        assuming = second.run()
        serves = serves_without_gradients(assuming.metadata, found.metadata)
        return second.capture(assuming) if serves else first.capture(found)


def serves_without_gradients(assuming: ProgramMetadata, found: ProgramMetadata) -> bool:
    """Whether a program captured as if there were gradients does what one does that was captured without."""
    read = {assuming.inputs[number].name for number in assuming.gradients_read}
    left = {found.inputs[number].name for number in found.gradients}
    return not read or (read <= left and assuming.only_accumulates)


class CaptureSession:
    """One run of a program on fake tensors in the places of its inputs."""

    def __init__(
        self, func: Callable[..., Any], inputs: ProgramInputs, remove: str, dynamic_shapes: Any = None
    ) -> None:
        self._func, self._inputs = func, inputs
        self._dims = {} if dynamic_shapes is None else dims_of(inputs, dynamic_shapes)
        tensors = [entry.value for entry in inputs.inputs if isinstance(entry.value, torch.Tensor)]
        symbolic = bool(self._dims)
        fake_mode = fake_mode_of(tensors) or new_fake_mode(symbolic=symbolic, metas=METAS)
        self._provenance = Provenance(inputs.state.modules, run_call.__code__)
        self._session = RecordingSession(
            fake_mode, notify(self._provenance.note), remove_views=remove == "mutations_and_views", symbolic=symbolic
        )
        self._fakes = fakes_of(tensors, self._session.factory, self._dims.keys(), self._with_symbols)
        for entry in inputs.inputs:
            entry.fake = self._fakes.get(id(entry.value))
            if isinstance(entry.value, MissingGradient):
                with below_dispatch():
                    entry.fake = self._session.factory.like_real(entry.value.of)

    def _with_symbols(self, tensor: torch.Tensor) -> torch.Tensor:
        from functionalize._torch.symbols import with_symbols  # here: loads sympy

        dims = list(self._dims.get(id(tensor), ()))
        return with_symbols(self._session.fake_mode, tensor, f"input{id(tensor)}", dims)

    @property
    def has_all_gradients(self) -> bool:
        """Whether every leaf had a gradient."""
        given = {id(entry.gradient_of) for entry in self._inputs.inputs if entry.gradient_of is not None}
        return given == {id(entry) for entry in self._inputs.inputs if is_leaf(entry.value)}

    def run(self) -> Finalized:
        """Record the program."""
        inputs, session = self._inputs, self._session
        session.add_inputs(inputs.inputs)
        sizes = DynamicSizes(self._dims, self._fakes)
        with inputs.state.substituted(self._fakes), inputs.arguments.substituted(self._fakes):
            for entry in inputs.inputs:
                if entry.gradient_of is not None and entry.gradient_of.fake is not None:
                    entry.gradient_of.fake.grad = entry.fake
            effects = SideEffectRecorder([inputs.state, inputs.arguments])
            with session.active(), self._provenance.watched():
                sizes.relate()
                with session.recorder:
                    found = session.record(
                        lambda: self._func(*inputs.args, **inputs.kwargs),
                        inputs.inputs,
                        effects.side_effects,
                        self._provenance.here,
                        self._provenance.follow,
                    )
        sizes.check_free()
        self._provenance.write(found.graph)
        return found

    def capture(self, found: Finalized) -> Capture:
        """What the run gave, with what it takes for granted."""
        metadata, inputs = found.metadata, self._inputs
        values = [e.value.of if isinstance(e.value, MissingGradient) else e.value for e in found.inputs]
        matter = bool(metadata.gradients) and not self.has_all_gradients
        guards = Guards(
            metadata,
            inputs.state,
            inputs.arguments,
            values,
            sizes=size_guards(self._session.fake_mode.shape_env, metadata),
            gradients_matter=not metadata.only_accumulates if metadata.gradients_read else matter,
        )
        parts = (metadata, guards, inputs.state, inputs.names, found.joint, found.account)
        return Capture(found.graph, found.root, *parts)
