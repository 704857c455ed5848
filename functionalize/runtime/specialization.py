"""One way in which a program may be called: what one capture gave, compiled when it is first needed.

Invariant: a call that is refused has changed nothing. Limits: one call of a program that writes at a time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx import Graph, GraphModule

from functionalize._torch import pytree
from functionalize.aliasing.history import Historian
from functionalize.errors import InputMismatchError
from functionalize.runtime.autograd import ForwardCall, JointGraph
from functionalize.runtime.call_arguments import CallArguments, CallingConvention
from functionalize.runtime.execution import (
    Computed,
    compute,
    compute_differentiably,
    compute_undifferentiably,
    finish,
)
from functionalize.runtime.fast_guards import FastGuards
from functionalize.runtime.graph_forms import reinplace
from functionalize.runtime.guards import Guards
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.modes import set_modes
from functionalize.runtime.partition import PartitionFn, partition
from functionalize.runtime.state_walk import StateWalk

_PARTITIONING = threading.Lock()


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
    asks_offsets: bool  # whether the program asked where in their storages tensors lie
    asks_leaves: bool  # whether it asked which tensors are leaves


@dataclass(frozen=True, eq=False)
class Capture:
    """What one capture gives: everything that a :class:`Specialization` is made of."""

    recorded: Recorded
    guards: Guards
    state: StateWalk
    convention: CallingConvention
    modes_left: Mapping[str, Any]  # modes that the program leaves otherwise than it found them


class Specialization:
    """A captured graph, and what runs it."""

    def __init__(self, capture: Capture, partition_fn: PartitionFn | None) -> None:
        self.capture, self.recorded, self.metadata = capture, capture.recorded, capture.recorded.metadata
        self.guards, self._partition_fn = capture.guards, partition_fn
        self._fast: FastGuards | None = None
        self._forward_call: ForwardCall | None = None

    @functools.cached_property
    def graph_module(self) -> GraphModule:
        """The graph, as a module: of state and inputs, in the order of the signature."""
        return GraphModule(self.recorded.root, self.recorded.graph, "Captured")

    def is_like(self, other: Specialization) -> bool:
        """Whether both compute and write the same."""
        one, two = self.recorded, other.recorded
        return str(one.graph) == str(two.graph) and str(one.signature()) == str(two.signature())

    def passed(self, arguments: CallArguments) -> list[Any] | None:
        """The inputs for a call that is for sure one of this program's; None for another, or where it takes longer."""
        return None if self._fast is None else self._fast.passes(arguments)

    def checked(self, arguments: CallArguments) -> list[Any] | InputMismatchError:
        """The inputs for a call, or why it is none of this program's."""
        try:
            inputs = self.guards.check(arguments)
        except InputMismatchError as error:
            return error
        self._fast = FastGuards(self.guards, arguments, inputs)
        return inputs

    def run(self, inputs: list[Any], arguments: CallArguments) -> Any:
        """Compute, write back, and return what the original does."""
        metadata, zeros = self.metadata, self.guards.missing_gradients(inputs)
        for number, gradient in zeros.items():
            inputs[number] = gradient
        computed = self._computed(inputs)
        for number, gradient in zeros.items():  # nothing is refused from here on
            inputs[metadata.inputs[number].gradient_of].grad = gradient  # type: ignore[index]
        leaves = finish(metadata, inputs, [self.capture.state, arguments], computed)
        set_modes(self.capture.modes_left)
        return pytree.tree_unflatten(leaves, metadata.spec)

    def _computed(self, inputs: Sequence[Any]) -> Computed:
        """What the graph gives, known to autograd where the original's results are."""
        joint = self.recorded.joint
        if joint is None or not torch.is_grad_enabled():
            return compute(self.metadata, (self._run_in_place or self.graph_module).forward, inputs)
        if isinstance(joint, Exception):
            return compute_undifferentiably(self.metadata, self.graph_module.forward, inputs, joint)
        if self._forward_call is None:
            with _PARTITIONING:  # which uses the joint graph up: another thread waits for the halves
                if self._forward_call is None:
                    self._forward_call = partition(joint, self._partition_fn, lambda graph: graph)
        return compute_differentiably(self.metadata, self._forward_call, inputs)

    @functools.cached_property
    def _run_in_place(self) -> GraphModule | None:
        """The graph with writes in the memory of inputs that are written back anyway, where there are such."""
        disjoint = self.guards.inputs_are_disjoint
        return reinplace(self.recorded.graph, self.recorded.root, self.metadata) if disjoint else None

    def inputs_of_graph(self, inputs: list[Any]) -> list[Any]:
        """What the graph takes, of the inputs of a call."""
        for number, zeros in self.guards.missing_gradients(inputs).items():
            inputs[number] = zeros
        return [inputs[number] for number in self.metadata.taken]
