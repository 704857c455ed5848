"""What a call needs to know of a captured program: plain data, frozen when the capture ends; symbols as expressions.

Invariant: nothing here holds a tracer, a fake tensor or an example input. Tensors are identified by numbers: inputs by
their position, results by their position among the graph's outputs, tensors that the caller gets by their position in
``outputs``. Limits: constants of the program are held as tensors; a symbol is solved only from a size that is linear in
it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from functionalize._torch import pytree
from functionalize._torch.subclasses.wrappers import Wrapping, plain_part
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.view_rules import OpCall
from functionalize.python_state.reconstruct import GraphNumber
from functionalize.python_state.slots import Slot
from functionalize.refusals.values import OTHER_RANK
from functionalize.runtime.decisions import Answers, Decision
from functionalize.runtime.outputs.side_effects import LeftInObjects, ScheduleStep, SideEffect


def frozen_number(number: Any) -> Any:
    """A size as an integer, or as an expression of symbols."""
    return number.node.expr if isinstance(number, torch.SymInt) else number


def frozen_layout(layout: Layout) -> Layout:
    """A layout with integers and expressions for its sizes."""
    return layout if layout.static else _with_numbers(layout, frozen_number)


def _with_numbers(layout: Layout, number: Callable[[Any], Any]) -> Layout:
    size, stride = tuple(map(number, layout.size)), tuple(map(number, layout.stride))
    return replace(layout, size=size, stride=stride, offset=number(layout.offset))


@dataclass(frozen=True)
class SymbolSources:
    """Where a call reads the values of symbols: from sizes of inputs and outputs, and from those that are numbers."""

    inputs: tuple[tuple[int, Layout], ...] = ()
    numbers: tuple[tuple[int, Any], ...] = ()  # inputs that are numbers
    outputs: tuple[tuple[int, Layout], ...] = ()  # of the graph
    computed: tuple[tuple[int, Any], ...] = ()  # outputs of the graph that are symbols, which no size has
    asserted: tuple[Any, ...] = ()  # conditions on symbols, which a call must meet

    def bind(self, inputs: Sequence[Any], results: Sequence[Any]) -> SymbolBindings:
        """The bindings of one call, from its inputs and the results of its graph."""
        if not (self.inputs or self.numbers or self.outputs or self.computed):
            return _NONE
        bindings = SymbolBindings()
        for number, expression in self.numbers:
            bindings.bind_size(expression, inputs[number])
        for number, layout in self.inputs:
            bindings.bind_layout(layout, inputs[number])
        for output, layout in self.outputs if results else ():
            if results[output] is not None:
                bindings.bind_layout(layout, results[output])
        for output, expression in self.computed if results else ():
            bindings.bind_size(expression, results[output])
        return bindings

    @property
    def learned(self) -> set[Any]:
        """The symbols whose values a call learns."""
        learned: set[Any] = set()
        sizes = [size for _, layout in (*self.inputs, *self.outputs) for size in layout.size if type(size) is not int]
        for expression in [*(number for _, number in (*self.numbers, *self.computed)), *sizes]:
            unknown = expression.free_symbols - learned
            if len(unknown) == 1 and _slope(expression, *unknown):
                learned |= unknown
        return learned

    def unlearned(self, layouts: Iterable[Layout], numbers: Iterable[Any]) -> list[Any]:
        """The symbols of layouts and numbers whose values a call does not learn, sorted by name."""
        needed = [n for layout in layouts for n in (*layout.size, *layout.stride, layout.offset)]
        free = {s for number in (*needed, *numbers) if hasattr(number, "free_symbols") for s in number.free_symbols}
        return sorted(free - self.learned if free else free, key=str)


class SymbolBindings:
    """The integers that symbols stand for in a call."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def bind_layout(self, layout: Layout, tensor: torch.Tensor) -> None:
        """Learn symbols from the sizes of a tensor that has a layout."""
        if tensor.dim() != len(layout.size):
            raise OTHER_RANK.error(now=tensor.dim(), before=len(layout.size))
        for expression, number in zip(layout.size, tensor.size(), strict=True):
            if type(expression) is not int:
                self.bind_size(expression, number)

    def bind_size(self, expression: Any, number: int) -> None:
        """Learn a symbol from the value of an expression that is linear in it."""
        unknown = expression.free_symbols.difference(self._known)
        if len(unknown) != 1:
            return
        (symbol,) = unknown
        linear = expression.xreplace(self._known)
        slope = _slope(linear, symbol)
        rest = number - linear.xreplace({symbol: 0}) if slope else 1  # an expression with slope 0 may divide by it
        if slope and rest % slope == 0:
            value = int(rest / slope)
            if linear.xreplace({symbol: value}) == number:
                self._known[symbol] = value

    def number(self, size: Any) -> Any:
        """A size in this call; the expression itself if one of its symbols is unknown."""
        if type(size) is int or not hasattr(size, "xreplace"):
            return size
        value = size.xreplace(self._known)
        return int(value) if type(value) is int or value.is_number else size

    def holds(self, condition: Any) -> bool:
        """Whether a condition may hold: it may if one of its symbols is unknown."""
        if not all(symbol.is_integer for symbol in condition.free_symbols.difference(self._known)):
            return True  # with unknown floats nothing is decided, and sympy would take long to find that out
        return str(condition.xreplace(self._known)) != "False"

    def __str__(self) -> str:
        return ", ".join(f"{symbol} = {number}" for symbol, number in self._known.items())

    def layout(self, layout: Layout) -> Layout:
        """A layout in this call."""
        return layout if layout.static else _with_numbers(layout, self.number)


@lru_cache(maxsize=1024)
def _slope(expression: Any, symbol: Any) -> Any:
    """The slope of an expression that is linear in a symbol; zero if it is not linear."""
    if not expression.is_polynomial(symbol):  # `Min` of two sizes may look linear at the points below
        return 0
    at_zero, at_one, at_two = (expression.xreplace({symbol: value}) for value in (0, 1, 2))
    return at_one - at_zero if at_one - at_zero == at_two - at_one else 0


_NONE = SymbolBindings()


@dataclass(frozen=True)
class PartOfWrapper:
    """Where an input is held."""

    wrapper: int  # the input that holds it
    path: tuple[str, ...]  # the attributes that lead to it


@dataclass(eq=False)  # making a frozen one takes three times as long, and a large model has thousands
class GraphInput:
    """One input of a program: a tensor of its state, a gradient, or a leaf of its arguments."""

    kind: InputKind
    name: str  # of the placeholder
    target: str | None  # the path of a state tensor
    is_tensor: bool
    slot: Slot | None = None  # where a call finds a state tensor
    argument: int | None = None  # its position among the leaves of the arguments
    constant: Any = None  # a tensor or plain value that the program itself holds
    persistent: bool | None = None
    gradient_of: int | None = None  # the input whose gradient it is
    base_of: int | None = None  # an input that autograd takes for a view of this one
    root: int | None = None  # the input that autograd takes this one for a view of; both share a version counter
    requires_grad: bool | None = None  # whether it requires gradients after the call, if the program changes that
    writes: int = 0  # by how much its version grows
    wrapping: Wrapping | None = None  # of a wrapper, which the graph does not take: its parts are inputs
    part: PartOfWrapper | None = None  # where a wrapper holds this input; `slot` and `argument` are the wrapper's

    @property
    def label(self) -> str:
        """Its name in messages, with "input" or "state"."""
        return f"the {'input' if self.target is None else 'state'} {self.quoted}"

    def now(self) -> Any:
        """What is now in its place in an object; of a tensor or value that the program itself holds, that."""
        value = self.constant if self.slot is None else self.slot.get()
        return value if self.part is None else plain_part(value, self.part.path)

    @property
    def quoted(self) -> str:
        """Its quoted name alone."""
        return f"`{self.name if self.target is None else self.target}`"


class AliasKind(enum.Enum):
    """How a tensor that the caller gets relates to the program's inputs and results."""

    RESULT = "a separate tensor"
    INPUT = "that input itself"
    VIEW_OF_INPUT = "a view of the storage that an input has after the call"
    VIEW_OF_OLD_STORAGE = "a view of the storage that an input had before the call, and no longer has"
    VIEW_OF_NEW_STORAGE = "a view of the storage that the call gives to an input"
    VIEW_OF_BASE = "a view of another output, or of a result that is not an output"
    SHARED = "in one storage with other outputs, where no output covers the storage"
    WRAPPER = "a wrapper of other outputs"


@dataclass(frozen=True, eq=False)
class OutputAlias:
    """A tensor that the caller gets: returned, left in an object, or the new gradient of an input."""

    kind: AliasKind
    layout: Layout
    requires_grad: bool
    result: int | None = None  # the graph's output that has its value
    input: int | None = None  # whose storage it shares
    group: int | None = None  # which storage it shares with other outputs
    capacity: Any = 0  # bytes of that storage
    base: int | None = None  # of VIEW_OF_BASE: the position among the bases
    own_gradient: bool = False  # its memory is as the kind says, its gradient is the result's
    leaf: Callable[[torch.Tensor], torch.Tensor] | None = None  # makes a leaf, as the program did
    inference: bool | None = False  # whether it is an inference tensor; None: as the call's mode is
    creation: Any = None  # autograd's creation meta of a view; None: an operator that returns one view
    gradient: int | None = None  # of a tensor that the program made: the output that is its gradient
    wrapping: Wrapping | None = None  # how a wrapper is made
    parts: tuple[int, ...] = ()  # the outputs of which it is made

    @property
    def is_recorded(self) -> bool:
        """Whether it is a wrapper whose gradient goes through the graph."""
        return self.kind is AliasKind.WRAPPER and self.requires_grad


@dataclass(frozen=True, eq=False)
class BaseResult:
    """A result that other outputs are views of; their gradients flow through it."""

    layout: Layout
    requires_grad: bool
    result: int | None  # the graph's output that has its value; None: only the joint graph gives it


@dataclass(frozen=True)
class InputRef:
    """An input, as the argument of an op on another input; ``old``: with the storage that it had before the call."""

    number: int
    old: bool = False


@dataclass(frozen=True)
class NewStorage:
    """An empty tensor of a size."""

    size: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class PartialWrite:
    """A value to copy: the graph's output, and the view ops that lead from the input to its destination."""

    result: int
    path: tuple[OpCall, ...] = ()


@dataclass(frozen=True, eq=False)
class InputMutation:
    """What a call does to one of its inputs: ops on its metadata, copies, ops on its metadata again."""

    input: int
    metadata: tuple[OpCall, ...]
    writes: tuple[PartialWrite, ...]
    after: tuple[OpCall, ...]
    layout: Layout | None = None  # of the written memory, if it is another part of the input's storage
    differentiable: bool = False  # whether autograd is to see the copy
    detached: bool = False  # whether the input loses its autograd history
    overlaps: bool = False  # whether several positions of the input share memory
    inference: bool = False  # whether the input's data become an inference tensor


def needed_results(
    mutations: Iterable[InputMutation],
    outputs: Iterable[OutputAlias],
    bases: Sequence[BaseResult],
    results: Iterable[Any],
    *,
    further_bases: bool,
) -> list[int]:
    """Which of a graph's outputs a call reads; it makes the remaining outputs itself, as views.

    ``further_bases``: whether the graph also computes the values of bases that are not outputs.
    """
    needed = {write.result for mutation in mutations for write in mutation.writes}
    needed |= {base.result for base in bases if base.result is not None}
    needed |= {reconstruction.position for reconstruction in results if isinstance(reconstruction, GraphNumber)}
    outputs = list(outputs)
    parts = {number for alias in outputs if alias.is_recorded for number in alias.parts}
    needed |= {result for number in parts if (result := outputs[number].result) is not None}
    for alias in outputs:
        own = alias.kind in (AliasKind.RESULT, AliasKind.SHARED, AliasKind.VIEW_OF_NEW_STORAGE)
        unbased = alias.base is not None and bases[alias.base].result is None and not further_bases
        if alias.result is not None and (own or alias.own_gradient or unbased or not alias.layout.static):
            needed.add(alias.result)
    return sorted(needed)


def looked_up(
    mutations: Iterable[InputMutation], outputs: Iterable[OutputAlias], bases: Iterable[BaseResult]
) -> tuple[list[Layout], list[Any]]:
    """The layouts and numbers in which a call replaces symbols with integers."""
    outputs = list(outputs)
    layouts = [alias.layout for alias in outputs] + [base.layout for base in bases]
    numbers = [alias.capacity for alias in outputs]
    for mutation in mutations:
        layouts += [] if mutation.layout is None else [mutation.layout]
        for _, args in (*mutation.metadata, *mutation.after):
            for arg in pytree.tree_leaves(args):
                numbers += arg.size if isinstance(arg, NewStorage) else [arg]
    return layouts, numbers


@dataclass(frozen=True)
class GraphTraits:
    """What a call needs to know of the graph."""

    outputs: int  # how many outputs it has
    keeps_workspaces: bool  # whether an op computes what a backward in the graph needs only if grad mode is on
    decisions: tuple[Decision, ...] = ()  # on tensor values, in order
    draws: tuple[Any, ...] = ()  # the sources of random numbers of a graph with decisions, for `RandomState`
    numbers: tuple[int, ...] = ()  # its outputs that are numbers which objects hold
    sparse: frozenset[int] = frozenset()  # its outputs without strides
    differentiates: bool = False  # whether it contains gradients that the program computes itself
    lays_out_ones: bool = False  # whether dimensions of size 1 are known to have the strides of eager
    acts: bool = False  # whether it has effects beside its results, so that it must run once for each call
    communicates: bool = False  # whether it acts on other processes, see `runtime/communication.py`

    @property
    def of_forward(self) -> tuple[Decision, ...]:
        """The decisions of the forward."""
        return tuple(decision for decision in self.decisions if not decision.of_backward)

    @property
    def answers(self) -> Answers:
        """The answers to the decisions."""
        return tuple(decision.answer for decision in self.decisions)


@dataclass(frozen=True, eq=False)
class ProgramMetadata:
    """All that a call needs to pass its inputs to the graph, and to act on the graph's outputs."""

    inputs: tuple[GraphInput, ...]
    unused: frozenset[int]  # inputs that the graph does not take
    graph: GraphTraits
    mutations: tuple[InputMutation, ...]
    outputs: tuple[OutputAlias, ...]
    bases: tuple[BaseResult, ...]
    results: tuple[Any, ...]  # how the leaves of the returned value are made
    spec: pytree.TreeSpec
    gradients: Mapping[int, int | None]  # by input: the output that is its new gradient; None: its gradient is removed
    gradients_read: frozenset[int]  # the inputs whose gradients the program reads
    only_accumulates: bool  # whether gradients are only added to, so that zeros may replace a missing one
    left: LeftInObjects
    layouts_before: Mapping[int, Layout]
    layouts_after: Mapping[int, Layout]
    symbols: SymbolSources = field(default_factory=SymbolSources)

    @property
    def gives_gradients(self) -> bool:
        """Whether tensors that the program made have gradients, which no graph can attach to them."""
        return any(alias.gradient is not None for alias in self.outputs)

    @property
    def side_effects(self) -> Sequence[SideEffect]:
        """The changes to Python objects that a call makes."""
        return self.left.side_effects

    @property
    def steps(self) -> Sequence[ScheduleStep]:
        """The steps of schedulers that a call makes at the end."""
        return self.left.steps

    @cached_property
    def taken(self) -> list[int]:
        """The inputs that the graph takes, in order."""
        return [number for number in range(len(self.inputs)) if number not in self.unused]

    @cached_property
    def arguments(self) -> dict[int, int]:
        """The inputs that are leaves of the arguments, by the positions of these: wrappers, not their parts."""
        inputs = enumerate(self.inputs)
        return {e.argument: number for number, e in inputs if e.argument is not None and e.part is None}

    @cached_property
    def versions(self) -> dict[int, int]:
        """By how much the versions of written inputs grow."""
        return {number: entry.writes for number, entry in enumerate(self.inputs) if entry.writes}

    @cached_property
    def uncounted_writes(self) -> dict[int, int]:
        """The growth of versions, without the writes that autograd counts when a call writes back."""
        counts = dict(self.versions)
        for mutation in self.mutations:
            root = self.inputs[mutation.input].root
            number = mutation.input if root is None else root
            if mutation.differentiable and number in counts:
                counts[number] -= len(mutation.writes) + len(mutation.metadata) + len(mutation.after)
        return counts

    @cached_property
    def requiring(self) -> list[tuple[int, bool]]:
        """The inputs whose `requires_grad` a call sets, each with the value."""
        return [(n, entry.requires_grad) for n, entry in enumerate(self.inputs) if entry.requires_grad is not None]

    @property
    def detached(self) -> set[int]:
        """The inputs that a call detaches in place."""
        written = {mutation.input for mutation in self.mutations if mutation.detached}
        return written | {number for number, requires in self.requiring if not requires}

    @property
    def has_backward(self) -> bool:
        """Whether the graph contains a backward that the program runs, which gives inputs new gradients."""
        parts = (self.inputs[mutation.input].part for mutation in self.mutations)
        added = any(part is not None and self.inputs[part.wrapper].gradient_of is not None for part in parts)
        leaves = added or any(number is not None for number in self.gradients.values())
        return self.graph.differentiates and leaves

    @property
    def leaves_sparse_gradients(self) -> bool:
        """Whether it leaves gradients without strides: added to zeros, they would become strided."""
        outputs = [self.outputs[number] for number in self.gradients.values() if number is not None]
        return any(alias.result in self.graph.sparse for alias in outputs)

    @cached_property
    def moves_storages(self) -> bool:
        """Whether inputs get other storages or metadata, or memory of a storage is written outside its input."""
        return any(mutation.metadata or mutation.layout is not None for mutation in self.mutations)
