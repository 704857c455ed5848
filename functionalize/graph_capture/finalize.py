"""What a recorded program gives: the graph's outputs, and what a call does with them.

Invariant: the graph's outputs are values alone; what they are to the caller (an input, a view of one, a part to copy)
is said beside it. Limits: strided tensors of plain sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Node

from functionalize._torch import pytree, storage_key, unwrap_functorch
from functionalize._torch.tracing import SYMBOLS, symbol_node, tracked_node
from functionalize.aliasing.bases import Base
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.history import Historian
from functionalize.aliasing.view_rules import OpCall
from functionalize.call_stack import Origin
from functionalize.runtime.graph_inputs import Source, Supposed, fresh, is_leaf
from functionalize.runtime.side_effects import Change, Output, Result
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.epilogue import Epilogue, Input, WriteBack


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
class Piece:
    """A value to copy: the graph's output, and the view ops that lead to where it goes."""

    output: int
    path: tuple[OpCall, ...] = ()


@dataclass(frozen=True, eq=False)
class Back:
    """What a call does to one of its tensors."""

    source: int
    metadata: tuple[OpCall, ...]
    pieces: tuple[Piece, ...]
    after: tuple[OpCall, ...]
    place: Layout | None = None  # if not the tensor itself is written, but another place of its storage


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor that the caller gets, as it lies in its storage."""

    place: Layout
    source: int | None = None  # of which input it is the storage
    itself: bool = False  # whether it is that very input
    output: int | None = None  # else the graph's output
    fresh: bool = False  # whether the input got that storage from the program
    left: bool = False  # whether the input had that storage, and has another now
    group: int | None = None  # whose storage it shares with others
    requires_grad: bool = False
    capacity: Any = 0  # bytes of the storage


@dataclass
class Outcome:
    """Turns what a program left into outputs of its graph."""

    program: FunctionalizationContext
    tracer: Any
    sources: list[Source]
    fakes: Mapping[int, torch.Tensor]
    here: Callable[[], Origin]  # where the program is
    handles: list[torch.Tensor] = field(default_factory=list)
    backs: list[Back] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # recipes of the leaves that the caller gets
    spec: pytree.TreeSpec | None = None
    gradients: dict[int, int | None] = field(default_factory=dict)  # of inputs: the number of the new one, if any
    output_specs: list[OutputSpec] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    snapshot: Callable[[torch.Tensor], Any] = lambda value: value
    _nodes: list[Any] = field(default_factory=list)
    places: dict[int, Layout] = field(default_factory=dict)  # of the inputs, when the program had run
    gradients_read: set[int] = field(default_factory=set)  # of which inputs
    only_accumulates: bool = True  # whether gradients are read to be added to: none is as good as zeros
    environment: Any = None  # of the symbols, where sizes are such
    unused: set[int] = field(default_factory=set)  # inputs that the graph does not take
    storages: dict[int, int] = field(default_factory=dict)  # whose they were, before it ran
    first_places: dict[int, Layout] = field(default_factory=dict)  # before it ran
    _numbers: dict[int, int] = field(default_factory=dict)  # of the inputs, by handle
    _number_of: dict[int, int] = field(default_factory=dict)  # of `handles`, by identity
    _begun: dict[int, Input] = field(default_factory=dict)  # the inputs, by handle
    _of_handle: dict[int, int] = field(default_factory=dict)
    _written: list[tuple[OutputKind, str, Base]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.historian = self.program.historian = Historian(self._name_of, self.here)
        self.program.graph.keeps_writes = True

    def _name_of(self, base: Base) -> str:
        node = None if base.root.value is None else tracked_node(self.tracer, base.root.value)
        return "storage" if node is None else str(node.name)

    def number(self, tensor: torch.Tensor) -> int:
        """A number for a tensor that the caller will get."""
        tensor = unwrap_functorch(tensor)
        number = self._number_of.setdefault(id(tensor), len(self.handles))
        if number == len(self.handles):
            self.handles.append(tensor)
        return number

    def find_gradients(self) -> None:
        """Number the gradients that the program left at its inputs."""
        before = {id(source.grad_of): self.fakes[id(source.value)] for source in self.sources if source.grad_of}
        for number, source in enumerate(self.sources):
            fake = self.fakes.get(id(source.value))
            if is_leaf(source.value) and fake is not None and fake.grad is not before.get(id(source)):
                self.gradients[number] = None if fake.grad is None else self.number(fake.grad)

    def source_of_leaf(self, number: int) -> int:
        """The input that a numbered tensor is."""
        source = self.leaves[number].source
        assert source is not None
        return source

    def settle(self, inputs: list[Input], outputs: Any, changes: list[Change]) -> None:
        """Compute what is still missing, and end the graph."""
        leaves, self.spec = pytree.tree_flatten(outputs)
        self._begun = {id(entry.handle): entry for entry in inputs}
        left = range(len(self.handles))  # in objects, by the changes
        self.changes = changes
        self.outputs = [Result(self.number(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        epilogue = Epilogue(self.program, inputs, self.handles)
        backs = epilogue.prepare()
        self._lift_constants([back.input.handle for back in backs])
        values: dict[int, Node] = {}
        for back in backs:
            self._write_back(back, values)
        for place, recipe in enumerate(self.outputs):
            if isinstance(recipe, Result):
                self._give(self.handles[recipe.number], values)
            elif isinstance(recipe, SYMBOLS):
                self.outputs[place] = Output(
                    self._output(symbol_node(self.tracer, recipe), OutputKind.USER_OUTPUT, None)
                )
            else:
                self._output(recipe, OutputKind.USER_OUTPUT, None)
        for number in left:
            of_inputs = {handle: source for source, handle in self.gradients.items()}
            self._give(self.handles[number], values, of_inputs.get(number))
        self.storages = self._first_storages()
        self._describe({id(entry.handle) for entry in epilogue.moved})
        self.tracer.graph.output(tuple(self._nodes))
        self._drop_dead()
        self._drop_gradients()

    def _drop_dead(self) -> None:
        """As ``eliminate_dead_code``, which asks each node whether it may go: here those that nobody uses."""
        graph = self.tracer.graph
        for node in reversed(graph.nodes):
            if not node.users and node.op in ("call_function", "get_attr") and not node.is_impure():
                graph.erase_node(node)

    def _drop_gradients(self) -> None:
        """Gradients that the program neither reads nor writes are no inputs."""
        written = {back.source for back in self.backs}
        placeholders = self.tracer.graph.find_nodes(op="placeholder")
        for number, (source, node) in enumerate(zip(self.sources, placeholders, strict=True)):
            if source.grad_of is None:
                continue
            if not node.users and number not in written:
                self.unused.add(number)
                self.tracer.graph.erase_node(node)
            else:
                self.gradients_read.add(self.sources.index(source.grad_of))
                self.only_accumulates &= all(user.target is torch.ops.aten.add.Tensor for user in node.users)

    @property
    def result_numbers(self) -> list[int]:
        """The numbers of the tensors that the program returns, in order."""
        return [recipe.number for recipe in self.outputs if isinstance(recipe, Result)]

    # Constants

    def _lift_constants(self, written: Sequence[torch.Tensor]) -> None:
        """Turn tensors that the program reached by other ways into inputs: buffers if it wrote them, else constants."""
        graph, root = self.tracer.graph, self.tracer.root
        own, storages = {id(fake) for fake in self.fakes.values()}, {entry.storage for entry in self._begun.values()}
        others = {id(h): h for h in written if id(h) not in own and storage_key(h) not in storages}
        others |= {id(h): h for h in self.handles if id(h) not in own and tracked_node(self.tracer, h) is None}
        for node in list(graph.find_nodes(op="get_attr")):
            value = getattr(root, str(node.target))
            if isinstance(value, torch.Tensor):
                placeholder = self._constant(value, id(value) in others)
                others.pop(id(value), None)
                node.replace_all_uses_with(placeholder)
                graph.erase_node(node)
        for name in list(root._buffers) + [key for key, item in vars(root).items() if isinstance(item, torch.Tensor)]:
            delattr(root, name)
        for handle in others.values():
            self._constant(handle, any(handle is one for one in written))

    def _constant(self, value: torch.Tensor, written: bool) -> Node:
        place = next((i for i, s in enumerate(self.sources) if s.kind is InputKind.USER_INPUT), len(self.sources))
        known = next((i for i, s in enumerate(self.sources[:place]) if s.value is value), None)
        placeholders = self.tracer.graph.find_nodes(op="placeholder")
        if known is not None:
            return placeholders[known]  # type: ignore[no-any-return]
        kind, count = (InputKind.BUFFER if written else InputKind.CONSTANT_TENSOR), len(self.constants)
        name = fresh(f"c_lifted_tensor_{count}", {source.name for source in self.sources})
        source = Source(kind, name, f"lifted_tensor_{count}", value, None, False if written else None)
        self.sources.insert(place, source)
        self.constants.append(value)
        after = placeholders[place - 1] if place else None
        with self.tracer.graph.inserting_after(after) if after is not None else self.tracer.graph.inserting_before():
            node: Node = self.tracer.graph.placeholder(name)
        # The inputs behind it have other numbers now.
        self.backs = [replace(back, source=back.source + (back.source >= place)) for back in self.backs]
        self.gradients = {key + (key >= place): number for key, number in self.gradients.items()}
        node.meta["val"] = self.snapshot(value)
        return node

    # Write-backs

    def _write_back(self, back: WriteBack, values: dict[int, Node]) -> None:
        nodes = [(self._node(part.value), part.path) for part in back.parts]
        handle, place = back.input.handle, None
        if back.data is not None:
            values[id(handle)] = self._node(back.data)
            nodes.append((values[id(handle)], ()))
        source = self.source_of(handle)
        if source is None:  # a write beyond what an input shows of its storage
            source, place = self._first_storages()[storage_key(handle)], Layout.of(handle)
        kind, target = self._mutation_of(source)
        pieces = tuple(Piece(self._output(node, kind, target), path) for node, path in nodes)
        self.backs.append(Back(source, back.metadata, pieces, back.after, place))
        view = self.program.graph.find(handle)
        if view is not None:
            self._written.append((kind, target, view.base))

    @cached_property
    def mutations(self) -> list[Mutation]:
        """Every write to an input or to state."""
        return [
            Mutation(kind, target, write.view.region, write.op, str(write.location))
            for kind, target, base in self._written
            for write in self.historian.writes_of(base)
        ]

    def _mutation_of(self, number: int) -> tuple[OutputKind, str]:
        source = self.sources[number]
        return _MUTATION.get(source.kind, OutputKind.BUFFER_MUTATION), source.target or source.name

    def source_of(self, handle: torch.Tensor) -> int | None:
        """The number of the input that a handle stands for."""
        if len(self._numbers) != len(self.sources):
            self._numbers.clear()
            for number, source in enumerate(self.sources):
                value = self.fakes.get(id(source.value), source.value)
                self._numbers.setdefault(id(value) if isinstance(value, torch.Tensor) else -number - 1, number)
            for number in range(len(self.sources) - len(self._numbers)):
                self._numbers[-len(self.sources) - number - 1] = -1  # the same tensor twice
        return self._numbers.get(id(handle))

    # Outputs

    def _node(self, value: torch.Tensor) -> Node:
        node = tracked_node(self.tracer, value)
        return self._constant(value, written=False) if node is None else node

    def _give(self, handle: torch.Tensor, values: Mapping[int, Node], gradient_of: int | None = None) -> None:
        """An output for a tensor that the caller gets, or finds as the gradient of an input."""
        number = self.number(handle)
        node = values.get(id(handle))
        if node is None:
            node = self._whole(handle)
        kind, target = OutputKind.USER_OUTPUT, None
        if gradient_of is not None:
            source = self.sources[gradient_of]
            state = source.kind is not InputKind.USER_INPUT
            kind = OutputKind.GRADIENT_TO_PARAMETER if state else OutputKind.GRADIENT_TO_USER_INPUT
            target = source.target or source.name
        self._of_handle[number] = self._output(node, kind, target)

    def _whole(self, handle: torch.Tensor) -> Node:
        """The node of a handle's current value; of an input of which parts were written it is computed here."""
        view = self.program.graph.find(handle)
        return self._node(handle if view is None else self.program.read(view))

    def _output(self, node: Any, kind: OutputKind, target: str | None) -> int:
        argument: Any
        if isinstance(node, Node) and isinstance(node.meta.get("val"), SYMBOLS):
            argument = _ARGUMENT[type(node.meta["val"])](name=node.name)
        elif isinstance(node, Node):
            argument = TensorArgument(name=node.name)
        else:
            argument = ConstantArgument(name="", value=node if isinstance(node, (int, float, bool, str)) else None)
        self.output_specs.append(OutputSpec(kind, argument, target))
        self._nodes.append(node if isinstance(node, Node) else argument.value)
        return len(self._nodes) - 1

    def _describe(self, moved: set[int]) -> None:
        """How each tensor that the caller gets lies in a storage; ``moved``: inputs whose metadata changed."""
        storages: dict[int, int] = {}  # which input has a storage, when the program has run
        for number, entry in enumerate(self.sources):
            lying = self.fakes.get(id(entry.value), entry.value)
            begun = self._begun.get(id(lying))
            if begun is not None:
                self.first_places[number] = begun.layout
            if begun is not None and id(lying) not in moved:
                self.places[number] = begun.layout
                storages.setdefault(begun.storage, number)
            elif isinstance(lying, torch.Tensor):
                self.places[number] = Layout.of(lying)
                storages.setdefault(storage_key(lying), number)
        first = self.storages
        shared = Counter(storage_key(handle) for handle in self.handles)
        groups: dict[int, int] = {}
        source: int | None
        for number, handle in enumerate(self.handles):
            key, place = storage_key(handle), Layout.of(handle)
            source, itself = self.source_of(handle), True
            left = source is None and key in first and key not in storages
            if source is None:
                source, itself = first[key] if left else storages.get(key), False
            group = groups.setdefault(key, len(groups)) if source is None and shared[key] > 1 else None
            output, new = self._of_handle.get(number), key not in first
            capacity = handle.untyped_storage().nbytes() if group is not None else 0
            self.leaves.append(Leaf(place, source, itself, output, new, left, group, handle.requires_grad, capacity))

    def _first_storages(self) -> dict[int, int]:
        """Which input had a storage, before the program ran."""
        found: dict[int, int] = {}
        for number, source in enumerate(self.sources):
            entry = self._begun.get(id(self.fakes.get(id(source.value), source.value)))
            if entry is not None:
                found.setdefault(entry.storage, number)
        return found

    @cached_property
    def symbolic(self) -> tuple[list[tuple[int, Layout]], list[tuple[int, Layout]]]:
        """The inputs, and the outputs of the graph, whose places are written in symbols."""
        inputs = [(number, place) for number, place in self.first_places.items() if not place.static]
        outputs = [(leaf.output, leaf.place) for leaf in self.leaves if leaf.output is not None]
        return inputs, [(output, place) for output, place in outputs if not place.static]

    def signature(self) -> ExportGraphSignature:
        """What each input and output of the graph is."""
        taken = [source for number, source in enumerate(self.sources) if number not in self.unused]
        return ExportGraphSignature(list(map(_input_spec, taken)), self.output_specs)


_ARGUMENT: dict[type, Any] = {
    torch.SymInt: SymIntArgument,
    torch.SymFloat: SymFloatArgument,
    torch.SymBool: SymBoolArgument,
}
_MUTATION = {
    InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}


def _input_spec(source: Source) -> InputSpec:
    if isinstance(source.value, (torch.Tensor, Supposed)):
        return InputSpec(source.kind, TensorArgument(name=source.name), source.target, source.persistent)
    return InputSpec(source.kind, ConstantArgument(name=source.name, value=_plain(source.value)), source.target)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool, str)) else None
