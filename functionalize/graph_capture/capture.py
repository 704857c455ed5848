"""``capture``: a program without mutation, recorded in one run on fake tensors, with an account of every write.

Invariant: the objects that the program reaches are, after the capture, as they were before it.
Limits: one thread captures a module at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import is_symbolic, pytree
from functionalize._torch.fakes import (
    FakeFactory,
    FakeTensor,
    below_dispatch,
    fake_mode_of,
    is_data_dependent,
    new_fake_mode,
)
from functionalize._torch.tracing import new_placeholder, recording, track
from functionalize.errors import DataDependentError, check_remove
from functionalize.graph_capture.dynamic_shapes import DynamicSizes, dims_of
from functionalize.graph_capture.finalize import Outcome
from functionalize.graph_capture.observers import heard
from functionalize.graph_capture.provenance import Provenance
from functionalize.graph_capture.training import make_state
from functionalize.runtime.autograd import TANGENTS, with_gradients
from functionalize.runtime.captured_program import CapturedProgram
from functionalize.runtime.graph_inputs import Lifted, Source, Supposed, reached
from functionalize.runtime.side_effects import Aftermath
from functionalize.runtime.state_walk import is_module
from functionalize.tracing.fakeify import fakes_of
from functionalize.tracing.recording_mode import RecordingMode
from functionalize.transform.api import new_program, run_call, unheard


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    remove: str = "mutations_and_views",
    dynamic_shapes: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    on_guard_failure: str = "raise",
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
    return _Subject(fn, remove, dynamic_shapes, optimizer, on_guard_failure == "recapture").capture(
        args, dict(kwargs or {})
    )


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is captured, for the first inputs and for others."""

    func: Callable[..., Any]
    remove: str
    dynamic_shapes: Any
    optimizer: torch.optim.Optimizer | None
    recaptures: bool

    def capture(self, args: Any, kwargs: Any) -> CapturedProgram:
        """The program for some inputs."""
        program = self._captured(args, kwargs)
        program.again, program.recaptures = self.capture, self.recaptures
        program.backward_of = self._backward
        return program

    def _roots(self) -> dict[str, Any]:
        roots: dict[str, Any] = {"": self.func} if is_module(self.func) else reached(self.func)
        if self.optimizer is not None and not any(root is self.optimizer for root in roots.values()):
            roots["optimizer"] = self.optimizer
        return roots

    def _captured(self, args: Any, kwargs: Any) -> CapturedProgram:
        roots = self._roots()
        for root in roots.values():
            if isinstance(root, torch.optim.Optimizer):
                make_state(root)
        steps = self.optimizer is not None and is_module(self.func)
        func = training_step(self.func, self.optimizer) if steps else self.func
        program = _Capture(func, Lifted(self.func, roots, args, kwargs), self.remove, self.dynamic_shapes).run()
        if not program.leaves_gradients or program.has_all_gradients:
            return program
        # The next call will find the gradients that this one leaves. A program that drops them first is right for both.
        lifted = Lifted(self.func, roots, args, kwargs, suppose_gradients=True)
        supposed = _Capture(func, lifted, self.remove, self.dynamic_shapes).run()
        return supposed if supposed.serves_without_gradients(program) else program

    def _backward(
        self, constants: list[Source], tangents: list[torch.Tensor], args: Any, kwargs: Any
    ) -> CapturedProgram:
        """The gradients of a call's results, for tangents like those given."""
        lifted = Lifted(self.func, self._roots(), args, {**kwargs, TANGENTS: tangents})
        return _Capture(self.func, lifted, self.remove).gradients(constants)


def training_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Forward, backward and update of a module that returns a loss: a scalar, or an output that has one."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer.zero_grad()
        output = model(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError(
                f"with an optimizer, {type(model).__name__} must return a loss: a tensor without dimensions, or an "
                "output with such a `loss`. Else capture a function that computes it, calls backward() and then "
                "optimizer.step()"
            )
        loss.backward()
        optimizer.step()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    return step


class _Capture:
    """One run of a program on fake tensors."""

    def __init__(self, func: Callable[..., Any], lifted: Lifted, remove: str, dynamic_shapes: Any = None) -> None:
        self._func, self._lifted, self._remove = func, lifted, remove
        self._dims = dims_of(lifted, dynamic_shapes) if dynamic_shapes else {}
        self._symbolic = bool(self._dims)
        tensors = [source.value for source in lifted.sources if isinstance(source.value, torch.Tensor)]
        self._fake_mode = fake_mode_of(tensors) or new_fake_mode(symbolic=self._symbolic)
        self._factory = FakeFactory(self._fake_mode)
        self._fakes = fakes_of(tensors, self._factory, self._dims.keys(), self._with_symbols)
        for source in lifted.sources:
            if isinstance(source.value, Supposed):
                with below_dispatch():
                    self._fakes[id(source.value)] = self._factory.like_real(source.value.of)
        self._provenance = Provenance(lifted.state.modules, run_call.__code__)
        self._recorder = RecordingMode(self._factory, heard(self._provenance.note), symbolic=self._symbolic)

    def _with_symbols(self, tensor: torch.Tensor) -> torch.Tensor:
        from functionalize._torch.symbols import with_symbols  # here: loads sympy

        return with_symbols(self._fake_mode, tensor, f"input{id(tensor)}", list(self._dims.get(id(tensor), ())))

    def run(self) -> CapturedProgram:
        """Record the program."""
        lifted, tracer = self._lifted, self._recorder.tracer
        for source, node in [(source, self._placeholder(source)) for source in lifted.sources]:
            self._track(source, node)
        sizes = DynamicSizes(self._dims, self._fakes)
        with lifted.state.lent(self._fakes), lifted.arguments.lent(self._fakes):
            self._give_gradients()
            aftermath = Aftermath([lifted.state, lifted.arguments])
            around = recording(tracer, self._fake_mode, symbolic=self._symbolic)
            with around, self._provenance.watched():
                sizes.relate()
                with self._recorder:
                    outcome = self._recorded(aftermath)
        sizes.check_free()
        if self._symbolic:
            outcome.environment = self._fake_mode.shape_env
        self._provenance.write(tracer.graph)
        return CapturedProgram(lifted, outcome, remove=self._remove)

    def gradients(self, constants: list[Source]) -> CapturedProgram:
        """Record the gradients of the program's results, given tangents, instead of the program."""
        inputs = [s for s in self._lifted.sources if isinstance(s.value, torch.Tensor)]
        leaves = {id(s.value): s for s in [*inputs, *constants] if s.value.requires_grad}
        self._func = with_gradients(
            self._func, lambda: [self._fakes.get(key, source.value) for key, source in leaves.items()]
        )
        program = self.run()
        program.differentiated = list(leaves.values())
        return program

    def _placeholder(self, source: Source) -> Node:
        node = new_placeholder(self._recorder.tracer.graph, source.name)
        node.meta["val"] = source.value
        return node

    def _track(self, source: Source, node: Node) -> None:
        """Let a fake tensor stand for its placeholder."""
        fake, tracer = self._fakes.get(id(source.value)), self._recorder.tracer
        if fake is None:
            return
        if isinstance(fake, FakeTensor) and not is_symbolic(fake):
            with below_dispatch():
                node.meta["val"] = self._factory.snapshot(fake)
            if fake not in tracer.tensor_tracker:
                track(tracer, fake, node)
        else:
            from functionalize._torch.symbols import track_input  # here: loads sympy

            with self._fake_mode:
                track_input(tracer, fake, node)

    def _give_gradients(self) -> None:
        """Let the fakes have the gradients that the originals have."""
        for source in self._lifted.sources:
            if source.grad_of is not None:
                self._fakes[id(source.grad_of.value)].grad = self._fakes[id(source.value)]

    def _recorded(self, aftermath: Aftermath) -> Outcome:
        mode = new_program(self._remove == "mutations_and_views")
        outcome = Outcome(mode.program, self._recorder.tracer, self._lifted.sources, self._fakes, self._provenance.here)
        outcome.snapshot = self._factory.like

        self._provenance.follow(mode.program)

        def end(program: Any, inputs: Any, outputs: Any) -> None:
            program.origin = None
            changes = aftermath.changes(outcome.number)
            outcome.find_gradients()
            with unheard():
                outcome.settle(inputs, outputs, changes)

        args, kwargs = self._lifted.args, self._lifted.kwargs
        inputs = [fake for source in self._lifted.sources if (fake := self._fakes.get(id(source.value))) is not None]
        try:
            run_call(mode, self._func, args, kwargs, end, reached=inputs)
        except Exception as error:
            if is_data_dependent(error):
                raise DataDependentError.of(error) from error
            raise
        return outcome
