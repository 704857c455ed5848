"""A captured program: its graph, the account of its writes, and a call that does what the original does.

Invariant: a program holds neither its example inputs nor what traced it. Limits: calls with inputs of another look or
aliasing are refused, or captured anew.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx import Graph, GraphModule

from functionalize._torch import in_functorch_transform, pytree
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import AliasHistory, Historian
from functionalize.errors import InputMismatchError, StateMismatchError
from functionalize.runtime.autograd import ForwardCall, JointGraph
from functionalize.runtime.execution import (
    Computed,
    compute,
    compute_differentiably,
    compute_undifferentiably,
    finish,
)
from functionalize.runtime.graph_forms import reinplace, with_copies
from functionalize.runtime.guards import Guards
from functionalize.runtime.metadata import GraphInput, ProgramMetadata
from functionalize.runtime.partition import PartitionFn, partition
from functionalize.runtime.state_walk import StateWalk, walk_arguments

_PARTITIONING = threading.Lock()
_IN_TRANSFORM = (
    "a captured program is called inside of torch.func.grad, vmap, jvp or the like\n"
    "    why  the program runs on plain tensors: the transform would take its results for constants\n"
    "    try  capture a function that applies the transform, or transform the original"
)


@dataclass(frozen=True)
class Mutation:
    """One write to an input or to state.

    ``target``: the path of the state, or the name of the input. ``region``: the place in its storage that was
    written. ``op``: the operator. ``location``: the user's line, as ``file:line in function: text``.
    """

    kind: OutputKind
    target: str
    region: Layout
    op: str
    location: str


@dataclass(frozen=True, eq=False)
class Recorded:
    """A program that was recorded: its graph, and what a recording tells beside it."""

    graph: Graph
    root: torch.nn.Module  # what the graph's attributes are found on
    metadata: ProgramMetadata
    joint: JointGraph | Exception | None  # the backward; why there is none; None where no result requires grad
    signature: Callable[[], ExportGraphSignature]
    historian: Historian
    written: Sequence[tuple[OutputKind, str, Any]]  # inputs and state, each with its base in the history
    shared: list[list[str]]  # names of graph inputs that share a storage


@dataclass(frozen=True, eq=False)
class Capture:
    """What one capture gives: everything that a :class:`CapturedProgram` is made of."""

    recorded: Recorded
    guards: Guards
    state: StateWalk
    names: Sequence[str]  # of the positional arguments


class CapturedProgram:
    """What :func:`functionalize.capture` returns."""

    def __init__(
        self,
        capture: Capture,
        *,
        remove: str,
        partition_fn: PartitionFn | None = None,
        recapture: Callable[..., CapturedProgram] | None = None,
        on_guard_failure: str = "raise",
    ) -> None:
        """``recapture``: captures the same program for other inputs."""
        self.remove = remove
        self._recorded, self.graph = capture.recorded, capture.recorded.graph
        self._partition_fn, self._recapture, self._on_guard_failure = partition_fn, recapture, on_guard_failure
        self._forward_call: ForwardCall | None = None
        self._variants: dict[Any, CapturedProgram] = {}  # by which inputs require gradients
        self._follow(capture)

    def _follow(self, capture: Capture) -> None:
        """Do from now on what a capture says whose graph is this one's."""
        self._capture, self._metadata, self._guards = capture, capture.recorded.metadata, capture.guards

    @functools.cached_property
    def signature(self) -> ExportGraphSignature:
        """What each input and output of ``graph_module`` is, in the words of ``torch.export``."""
        return self._recorded.signature()

    @functools.cached_property
    def mutations(self) -> list[Mutation]:
        """Every write to an input or to state."""
        return [
            Mutation(kind, target, write.view.region, write.op, str(write.location))
            for kind, target, base in self._recorded.written
            for write in self._recorded.historian.writes_of(base)
        ]

    @property
    def alias_history(self) -> AliasHistory:
        """Every storage that was viewed or written, with its views and writes."""
        return self._recorded.historian.history

    @functools.cached_property
    def graph_module(self) -> GraphModule:
        """The graph, as a module: of state and inputs, in the order of the signature."""
        return GraphModule(self._recorded.root, self.graph, "Captured")

    @property
    def inputs(self) -> list[GraphInput]:
        """What the graph takes, in order."""
        return [self._metadata.inputs[number] for number in self._metadata.taken]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that the graph takes besides the user's, by the names of its inputs: state and constants."""
        found = {e.name: e.constant if e.slot is None else e.slot.get() for e in self.inputs if e.argument is None}
        return {name: value.detach() for name, value in found.items() if isinstance(value, torch.Tensor)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, write back, and return what the original does.

        Raises:
            InputMismatchError: the inputs are not such as the program was captured for.
            RuntimeError: inside of ``torch.func.grad``, ``vmap`` or ``jvp``, which would not see through the call.
        """
        if in_functorch_transform():
            raise RuntimeError(_IN_TRANSFORM)
        arguments = walk_arguments(list(args), dict(kwargs), self._capture.names)
        try:
            inputs = self._guards.inputs(arguments)
        except InputMismatchError as error:
            other = self._another(error, args, kwargs)
            if other is None:
                raise
            return other(*args, **kwargs)
        required = self._guards.new_gradients(inputs) if torch.is_grad_enabled() else None
        if required is not None and self._recapture is not None:
            if required not in self._variants:
                self._variants[required] = self._recapture(args, kwargs)
            return self._variants[required](*args, **kwargs)
        zeros = self._guards.missing_gradients(inputs)
        for number, gradient in zeros.items():
            inputs[number] = gradient
        computed = self._computed(inputs)
        for number, gradient in zeros.items():  # nothing is refused from here on
            inputs[self._metadata.inputs[number].gradient_of].grad = gradient  # type: ignore[index]
        leaves = finish(self._metadata, inputs, [self._capture.state, arguments], computed)
        return pytree.tree_unflatten(leaves, self._metadata.spec)

    def _computed(self, inputs: Sequence[Any]) -> Computed:
        """What the graph gives, known to autograd where the original's results are."""
        joint = self._capture.recorded.joint
        if joint is None or not torch.is_grad_enabled():
            return compute(self._metadata, (self._run_in_place or self.graph_module).forward, inputs)
        if isinstance(joint, Exception):
            return compute_undifferentiably(self._metadata, self.graph_module.forward, inputs, joint)
        with _PARTITIONING:  # which uses the joint graph up: another thread waits for the halves
            if self._forward_call is None:
                self._forward_call = partition(joint, self._partition_fn, lambda graph: graph)
        return compute_differentiably(self._metadata, self._forward_call, inputs)

    @functools.cached_property
    def _run_in_place(self) -> GraphModule | None:
        """The graph with writes in the memory of inputs that are written back anyway, where there are such."""
        return reinplace(self.graph, self._recorded.root, self._metadata) if self._guards.inputs_are_disjoint else None

    def _another(self, error: InputMismatchError, args: Any, kwargs: Any) -> CapturedProgram | None:
        """A program for a call that this one is not for. State that leaves the graph as it is is followed."""
        if self._recapture is None:
            return None
        if self._on_guard_failure == "recapture":
            return self._recapture(args, kwargs)
        if isinstance(error, StateMismatchError):
            other = self._recapture(args, kwargs)
            if str(other.graph) == str(self.graph) and str(other.signature) == str(self.signature):
                self._follow(other._capture)
                return self
        return None

    def flat_inputs(self, *args: Any, **kwargs: Any) -> list[Any]:
        """What ``graph_module`` takes for a call: state and the leaves of the arguments, in the signature's order.

        Raises:
            InputMismatchError: the inputs are not such as the program was captured for.
        """
        values = self._guards.inputs(walk_arguments(list(args), dict(kwargs), self._capture.names))
        for number, zeros in self._guards.missing_gradients(values).items():
            values[number] = zeros
        return [values[number] for number in self._metadata.taken]

    def with_copy_epilogue(self) -> GraphModule:
        """The same graph ending in ``copy_`` onto what it writes; it returns the caller's outputs alone."""
        return with_copies(self.graph, self._recorded.root, self._metadata)

    def print_readable(self) -> str:
        """Print the graph as Python, with shapes and the user's lines; the text is returned as well."""
        return self.graph_module.print_readable()

    def report(self, path: str | os.PathLike[str], *, title: str = "") -> Path:
        """Write one self-contained HTML page: storages over time, the code before and after, mutations, sizes.

        Args:
            path: the file to write.
            title: what the page is called; otherwise it is named after what was captured.

        Returns:
            The path of the file.

        Example:
            >>> import tempfile, torch
            >>> from pathlib import Path
            >>> from functionalize import capture
            >>> program = capture(lambda x: x.add_(1), (torch.zeros(3),))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     page = program.report(Path(folder) / "report.html", title="Add one").read_text()
            >>> "<title>Add one" in page
            True
        """
        from functionalize import report  # jinja2 is imported by those who ask for a page

        return report.write(report.build(self, title, self._metadata_writes(), self._recorded.shared), path)

    def _metadata_writes(self) -> list[tuple[str, str]]:
        """The inputs and state whose size, strides or storage a call changes, each with the op that does it."""
        named = [(self._metadata.inputs[mutation.input], mutation) for mutation in self._metadata.mutations]
        return [
            (entry.target or entry.name, str(op))
            for entry, mutation in named
            for op, _ in mutation.metadata + mutation.after
        ]
