"""A program as one capture recorded it: its guards, its graph, and the stages of a call, made when first needed.

Invariant: a call that is refused has changed nothing. Limits: one call at a time of a program that writes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx import Graph, GraphModule, Node

from functionalize._torch import pytree
from functionalize._torch.fakes import substitutes
from functionalize.aliasing.history import Historian
from functionalize.call_stack import Location
from functionalize.errors import DataDependentError, InputMismatchError, OverlappingInputsError
from functionalize.python_state.walk import StateWalk
from functionalize.refusals.calls import CHANGES_STATE_TWICE, COMPUTES_SOMETHING_ELSE
from functionalize.runtime.arguments import CallArguments, CallingConvention
from functionalize.runtime.autograd.joint import Backward, Derivative, ForwardCall, JointGraph, Orders
from functionalize.runtime.autograd.partition import PartitionFn, partition
from functionalize.runtime.call_tree import CallTree
from functionalize.runtime.calls.computation import Computed, DifferentiableComputation, GraphComputation
from functionalize.runtime.calls.fast_call import CallFunction, FastCall
from functionalize.runtime.calls.finalizer import finishing
from functionalize.runtime.calls.precheck import precheck_of
from functionalize.runtime.calls.stages import (
    Compute,
    RunAsWritten,
    adding_gradients,
    after_precheck,
    catching,
    comparing_decisions,
    composed,
)
from functionalize.runtime.capturing import CAPTURING
from functionalize.runtime.communication import run_as_written
from functionalize.runtime.decisions import Answers, Decision, agree
from functionalize.runtime.graphs.graph_forms import executable, made_executable, reinplace
from functionalize.runtime.guards.guard import FastCode, Passes
from functionalize.runtime.guards.guards import Guards
from functionalize.runtime.guards.modes import set_modes
from functionalize.runtime.guards.sizes import Sizes
from functionalize.runtime.metadata import ProgramMetadata
from functionalize.runtime.random_state import sources

_NUMBERS = itertools.count()  # of specializations, as they are made
# Captures a program for arguments, for a number of derivatives, and, if given, on the branches of some answers.
Recapture = Callable[..., "Capture"]


_VIEWING = 8  # how many captures with inputs as views of one tensor are kept; the oldest is dropped


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded program: its graph and everything that describes it."""

    graph: Graph
    root: torch.nn.Module  # the module that holds the graph's attributes
    metadata: ProgramMetadata
    joint: JointGraph | Exception | Backward | None  # or why it is missing; None: no result requires gradients
    signature: Callable[[], ExportGraphSignature]
    historian: Historian
    written: Sequence[tuple[OutputKind, str, Any]]  # the written inputs and state, each with its base in the history
    shared: list[list[str]]  # names of graph inputs that share a storage
    asked: Mapping[tuple[int, str], Location | None]  # questions on inputs, by number, with the lines that ask
    endings: Sequence[tuple[frozenset[Node], str]] = ()  # where gradients end: nodes, and the place in words
    refused: Mapping[int, Exception] = field(default_factory=dict)  # results without gradients, and the reason
    reaches_made: bool = False  # whether gradients of results would reach a leaf that the program makes and keeps


@dataclass(frozen=True, eq=False)
class Capture:
    """The result of one capture: everything that a :class:`Specialization` is made of."""

    recorded: Recorded
    guards: Guards
    state: StateWalk
    convention: CallingConvention
    modes_left: Mapping[str, Any]  # modes that the program leaves changed
    tree: CallTree  # of the arguments
    original: Callable[..., Any]  # the program as the user wrote it
    catches: bool  # whether the program's own code catches errors
    converts: bool  # whether `float` and `int` of data-dependent numbers were no decisions
    runs_as_written: bool  # whether calls run the original, which does what a graph cannot tell
    unread: Sequence[Callable[[], Any]]  # draws from Python's or NumPy's generators whose numbers are never read


def _answers_by_line(earlier: Sequence[Decision], asked: Sequence[Decision]) -> Answers:
    """Answers to ``asked``: those that the same lines had in ``earlier``; for other lines, their own."""
    before: dict[str, list[Any]] = {}
    for decision in earlier:
        before.setdefault(decision.location, []).append(decision.answer)
    lines = {location: iter(answers) for location, answers in before.items()}
    return tuple(next(lines.get(decision.location, iter(())), decision.answer) for decision in asked)


def _executed(half: GraphModule) -> Callable[..., Any]:
    return made_executable(half.graph, half).forward


def _passes_none(arguments: CallArguments) -> None:
    """Have the guards check every call."""


def _runs_none(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Have every call take the general path."""


@dataclass(eq=False)
class _WarmUp:
    """What the first calls tell: how many passed the guards themselves, and the code of guards for a fast call."""

    calls: int = 0
    code: FastCode | None = None

    @property
    def is_due(self) -> bool:
        """Whether to compile the guards: at the call 2, 4, 8, ..., since that takes as long as a call."""
        return self.calls > 1 and self.calls & (self.calls - 1) == 0


class Specialization:
    """A captured graph, with the function that runs its calls."""

    def __init__(self, capture: Capture, partition_fn: PartitionFn | None, recapture: Recapture) -> None:
        self.capture, self.recorded, self.metadata = capture, capture.recorded, capture.recorded.metadata
        self.guards, self._partition_fn, self._recapture = capture.guards, partition_fn, recapture
        self.number = next(_NUMBERS)
        self.kind = object()  # the kind of calls; variants share it
        # Both return None if a call is perhaps not for this specialization, or takes longer to check.
        self.passed: Passes = _passes_none
        self.fast_call: CallFunction = _runs_none
        self._lock = threading.RLock()  # held while the sources of state are resolved and read
        self._warm_up = _WarmUp()
        self._compute: Compute | None = None  # chosen for the first call
        self._finish = finishing(self.metadata)
        self._viewing: list[Specialization] = []

    @functools.cached_property
    def graph_module(self) -> GraphModule:
        """The graph, as a module: of state and inputs, in the order of the signature."""
        return GraphModule(self.recorded.root, self.recorded.graph, "Captured")

    @property
    def awaits_gradients(self) -> bool:
        """Whether its calls have gradients, but it was captured without its backward, so that it can run no call."""
        return self.recorded.joint is Backward.UNTRACED

    @functools.cached_property
    def may_repeat(self) -> bool:
        """Whether a call may start again after it has communicated."""
        return self.metadata.graph.communicates and bool(self.decisions or self.capture.catches)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The branches on tensor values that the program takes."""
        return self.metadata.graph.decisions

    @property
    def answers(self) -> Any:
        """The answers to its decisions at the capture."""
        return self.metadata.graph.answers

    def is_like(self, other: Specialization) -> bool:
        """Whether both compute and write the same."""
        mine, others = self.recorded, other.recorded
        if self.answers != other.answers:
            return False
        return str(mine.graph) == str(others.graph) and str(mine.signature()) == str(others.signature())

    def takes_sizes_of(self, other: Specialization) -> bool:
        """Whether this one is right for all sizes for which ``other`` is right."""
        if other.guards.sizes is None:
            return True
        return self.guards.sizes is not None and set(self.guards.sizes.listed()) <= set(other.guards.sizes.listed())

    def takes_as(self, other: Specialization) -> bool:
        """Whether both have the same inputs, and branch on the same questions."""
        mine, others = [entry.name for entry in self.metadata.inputs], [entry.name for entry in other.metadata.inputs]
        return mine == others and self.capture.converts == other.capture.converts

    def again(self, args: Any, kwargs: Any) -> Specialization:
        """The same program captured once more, with the current objects of its state.

        On the same lines it takes the same branches as this one, whatever the values of the arguments.
        """

        def captured(answers: Answers | None = None) -> Specialization:
            capture = self._recapture(args, kwargs, order=0, answers=answers)
            return Specialization(capture, self._partition_fn, self._recapture)

        if not self.decisions:
            return captured()
        with contextlib.suppress(DataDependentError):
            later = captured(self.answers)
            if [asked.location for asked in later.decisions] == [asked.location for asked in self.decisions]:
                return later
        later = captured()
        answers = _answers_by_line(self.decisions, later.decisions)
        with contextlib.suppress(DataDependentError):
            return later if agree(answers, later.answers) else captured(answers)
        return later

    def checked(self, arguments: CallArguments) -> list[Any] | InputMismatchError:
        """The inputs for a call, or the error that says why this specialization cannot run it."""
        with self._lock:
            if self.capture.state.resolve():  # code generated for the old objects would read their tensors
                self.passed, self.fast_call = _passes_none, _runs_none
            try:
                inputs = self.guards.check(arguments)
            except InputMismatchError as error:
                return error
        if arguments.are_examples or self.awaits_gradients:
            return inputs
        self._warm_up.calls += 1
        if self._warm_up.is_due:
            code = self.guards.fast_code(arguments, inputs)
            if code is not None:
                self.passed, self._warm_up.code = code.function(), code if self._may_be_fast else None
        return inputs

    def run(self, inputs: list[Any], arguments: CallArguments) -> Any:
        """Compute, write back, and return what the original does.

        Raises:
            Diverged: the call takes another branch; nothing has changed.
        """
        if isinstance(self.recorded.joint, OverlappingInputsError):
            viewing = self._with_views(arguments)
            return viewing.specialization.run(viewing.inputs, arguments)
        computed = None
        if not self.capture.runs_as_written:
            compute = self._compute or self._choose_stages(inputs, arguments)
            try:
                computed = compute(inputs)
            except RunAsWritten:
                computed = None
        if computed is None:  # outside of the handler, so that an error of the program has no context
            return run_as_written(self.capture.original, arguments.args, arguments.kwargs)
        leaves = self._finish(inputs, [self.capture.state, arguments], computed)
        for draw in self.capture.unread:
            draw()
        if self.capture.modes_left:
            set_modes(self.capture.modes_left)
        if self._warm_up.code is not None:
            self._make_fast(self._warm_up.code, inputs, computed.results, leaves)
        return self._assemble(leaves)

    def _choose_stages(self, inputs: Sequence[Any], arguments: CallArguments) -> Compute:
        """The stages of a call until it writes; the arguments are those of the first call."""
        with CAPTURING:  # partitioning uses up the joint graph: another thread waits for the halves
            if self._compute is None:
                self._compute = self._stages(inputs, arguments)
        return self._compute

    def _stages(self, inputs: Sequence[Any], arguments: CallArguments) -> Compute:
        metadata, joint = self.metadata, self._joint
        compute: Compute
        if isinstance(joint, JointGraph):
            sizes_of = None if self.guards.sizes is None else self.guards.sizes.of
            orders = Orders(self._partitioned(joint), self._next_order(inputs, arguments), sizes_of)
            compute = DifferentiableComputation(metadata, orders, self.recorded.refused)
        elif joint is not None:
            compute = GraphComputation(metadata, self._pure, reason=joint)
        else:
            compute = GraphComputation(metadata, self._function)
        compute = composed(metadata, compute)
        if self.decisions and self._precheck is None:
            compute = partial(comparing_decisions, metadata, self._function, compute)
        if self._precheck is not None:
            compute = partial(after_precheck, self._precheck, compute)
        if self.capture.catches and not metadata.graph.acts:
            compute = partial(catching, metadata, self._draws, compute)
        if any(number not in metadata.unused for number in self.guards.sources.gradients):
            compute = partial(adding_gradients, self.guards.missing_gradients, metadata, compute)
        return compute

    def _with_views(self, arguments: CallArguments) -> Chosen:
        """The capture for a call in which inputs that overlap become views of one tensor.

        Only gradients need it: in an exported program, the graph has the inputs of the program and no others.
        """
        for viewing in self._viewing:
            passed = viewing.passed(arguments)
            if passed is not None:
                return Chosen(viewing, passed)
        with CAPTURING:
            for viewing in self._viewing:
                inputs = viewing.checked(arguments)
                if isinstance(inputs, list):
                    return Chosen(viewing, inputs)
            recapture = partial(self._recapture, as_views=True)
            capture = recapture(arguments.args, arguments.kwargs, answers=self.answers)
            made = Chosen.of_new(Specialization(capture, self._partition_fn, recapture), arguments)
            self._viewing = [made.specialization, *self._viewing][:_VIEWING]
        return made

    def _make_fast(
        self, guards: FastCode, inputs: Sequence[Any], results: Sequence[Any], leaves: Sequence[Any]
    ) -> None:
        """Have the next calls take the fast path, if there is one; the arguments are those of this call."""

        def general(inputs: list[Any], results: Sequence[Any]) -> Any:
            return self._assemble(self._finish(inputs, [], Computed(results)))

        graph = self._function, self.capture.catches
        made = FastCall(self.metadata, self.capture.convention, *graph, self._assemble, general)
        self.fast_call = made.call(guards, inputs, results, leaves) or self.fast_call
        self._warm_up.code = None

    @property
    def _joint(self) -> JointGraph | Exception | None:
        """The joint graph, or the reason why it is missing; None if no result requires gradients."""
        joint = self.recorded.joint
        if isinstance(joint, Backward):
            raise RuntimeError("this program was captured without its backward: CapturedProgram captures it again")
        return joint

    @functools.cached_property
    def _draws(self) -> tuple[Any, ...]:
        """The generators, devices and inputs that the graph draws random numbers from."""
        return sources(self.recorded.graph, self.recorded.root)

    @property
    def _may_be_fast(self) -> bool:
        """Whether calls may take the fast path: autograd does not record them, and they leave modes as they are.

        If the program catches errors, a call that fails must be repeatable: it has no effects and draws no numbers.
        """
        capture, is_repeatable = self.capture, not (self.metadata.graph.acts or self._draws)
        leaves_all = self.recorded.joint is None and not (
            capture.modes_left or capture.unread or capture.runs_as_written
        )
        leaves_all = leaves_all and not self.metadata.graph.communicates  # perhaps inside of a call with a log
        return leaves_all and (is_repeatable or not capture.catches)

    def _partitioned(self, joint: JointGraph) -> ForwardCall:
        return partition(joint, self._partition_fn, _executed)

    def _next_order(self, inputs: Sequence[Any], arguments: CallArguments) -> Callable[[int, Sizes], Derivative]:
        """A function that captures a derivative of an order for arguments like a call's, without holding their data."""
        tensors = [leaf for leaf in arguments.leaves if isinstance(leaf, torch.Tensor)]
        entries = zip(self.metadata.inputs, inputs, strict=True)
        substitute, state = substitutes(tensors), {id(value) for entry, value in entries if entry.slot is not None}
        answers = self.answers
        copied = _or_error(lambda: arguments.like(lambda leaf: leaf if id(leaf) in state else substitute(leaf)))

        def captured(order: int, sizes: Sizes) -> Derivative:
            if isinstance(copied, Exception):
                raise copied
            if self.metadata.left:
                raise CHANGES_STATE_TWICE.error()
            args, kwargs = copied
            examples = self.capture.convention.arguments(args, kwargs)
            values = self.guards.check(examples)
            if sizes:  # a capture makes symbols only for sizes of tensors that are not fake
                layouts = {id(values[number]): layout for number, *layout in sizes}
                args, kwargs = examples.like(lambda leaf: _empty_like(leaf, *layouts.get(id(leaf), ())))
            made = Specialization(self._recapture(args, kwargs, order, answers), self._partition_fn, self._recapture)
            joint = made.recorded.joint
            if isinstance(joint, Exception):
                raise joint
            if not isinstance(joint, JointGraph) or not made.is_like(self):
                raise COMPUTES_SOMETHING_ELSE.error()
            guards = made.guards.sizes if made.guards.dynamic == self.guards.dynamic else None
            return Derivative(self._partitioned(joint), sizes.__eq__ if guards is None else guards.holds_for)

        return captured

    @functools.cached_property
    def _precheck(self) -> Callable[[Sequence[Any]], None] | None:
        """A function that checks the decisions before anything is computed, if that is cheap, or a call runs once."""
        if not self.decisions:
            return None
        described, recorded = self.metadata.graph, self.recorded
        once = described.acts or (described.communicates and recorded.joint is not None)
        return precheck_of(recorded.graph, recorded.root, self.metadata, once=once)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        """The graph as a function. Where it can, it writes in the memory of inputs that are written back anyway."""
        root = self.recorded.root
        if self._in_place is not None:
            return executable(self._in_place.graph, root).forward
        return executable(self.recorded.graph, root, decisions=self.decisions).forward

    @functools.cached_property
    def _pure(self) -> Callable[..., Any]:
        """The graph as a function that writes nothing."""
        return executable(self.recorded.graph, self.recorded.root).forward

    @functools.cached_property
    def _in_place(self) -> GraphModule | None:
        """The graph with writes in place; None if none are possible, or if the call may still be refused after them."""
        checked = (self.decisions and self._precheck is None) or self.metadata.symbols.asserted or self.capture.catches
        if checked or not self.guards.inputs_are_disjoint:
            return None
        return reinplace(self.recorded.graph, self.recorded.root, self.metadata)

    @functools.cached_property
    def _assemble(self) -> Callable[[Sequence[Any]], Any]:
        """A function that makes what the program returns from its leaves."""
        spec = self.metadata.spec
        if spec.is_leaf():
            return itemgetter(0)
        if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
            return tuple if spec.type is tuple else list
        return partial(pytree.tree_unflatten, treespec=spec)

    def inputs_of_graph(self, inputs: list[Any]) -> list[Any]:
        """The graph's inputs, of all inputs of a call."""
        for number, zeros in self.guards.missing_gradients(inputs).items():
            inputs[number] = zeros
        return [inputs[number] for number in self.metadata.taken]


@dataclass(frozen=True, eq=False)
class Chosen:
    """A specialization for a call, and its inputs."""

    specialization: Specialization
    inputs: list[Any]

    @classmethod
    def of_new(cls, made: Specialization, arguments: CallArguments) -> Chosen:
        """A new specialization, which was captured for these arguments."""
        inputs = made.checked(arguments)
        if not isinstance(inputs, list):
            raise inputs
        return cls(made, inputs)


def _or_error(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        return error


def _empty_like(tensor: torch.Tensor, size: Any = None, stride: Any = None) -> torch.Tensor:
    """A real tensor with the size and the strides of a fake one, or with those that are passed."""
    size, stride = (tensor.size(), tensor.stride()) if size is None else (size, stride)
    with torch.enable_grad():
        made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
        made.requires_grad_(tensor.requires_grad)
        return made if tensor.is_leaf else made.clone()
