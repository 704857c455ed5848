"""The graph of an exported program: state and arguments in, whole new tensors and what the caller gets out.

Invariant: an output that is a mutation is a node of its own, neither an input nor a view of one; an output of the
caller's is an input's node only where the original returns that very input. Limits: tensors whose sizes stay.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from functionalize._torch import BEGIN, LAYOUT, OFFSET, SYMBOLS, pytree
from functionalize._torch.exporting import ExportFakes, viewing
from functionalize.backends.decompositions.decompose import for_export, without_scales
from functionalize.backends.export.emitter import Emitter
from functionalize.backends.export.numbers import NUMBER, Numbers
from functionalize.backends.export.passes.views import views_of
from functionalize.backends.export.refused_nodes import refused_nodes
from functionalize.backends.export.signature.inputs import ExportInputs
from functionalize.backends.export.signature.layouts import assert_arguments, counts_from_storage
from functionalize.backends.export.signature.returned import InputTensor, Returned
from functionalize.backends.export.signature.shared_places import GraphValue
from functionalize.backends.export.signature.state import CONSTANTS, Arguments
from functionalize.backends.export.signature.steady import Exportable
from functionalize.backends.preparation.new_values import arguments_with_gradients, is_replaced, unlike_memory
from functionalize.backends.preparation.shared_memory import with_shared_memory
from functionalize.errors import UnsupportedExportError, UnsupportedProgramError
from functionalize.runtime.decisions import Decision, same_answer
from functionalize.runtime.metadata import AliasKind, InputMutation, ProgramMetadata
from functionalize.tracing.metas import METAS_OF_EXPORTS

aten = torch.ops.aten
_UNSEEN = ("profiler",)  # operators that only measure
_SIZES_STAY = (
    "an exported program can write elements of its inputs, but not change their size, strides or memory",
    "copy into a tensor of the final size, or return a new tensor",
)


class ExportGraph:
    """One graph that is being exported: what goes in, what is written, what the caller gets."""

    def __init__(
        self, found: Exportable, *, copies: bool, by_value: bool, scales: bool, floats: bool, layouts: bool
    ) -> None:
        """``copies``: whether views are to be copied; others: see :func:`to_exported_program`."""
        self.found, recorded = found, found.program.recorded
        self._graph, self.root = for_export(recorded.graph, recorded.root)
        self.causes: list[str] = []
        if not scales:
            try:
                self._graph, self.root = without_scales(self._graph, self.root)
            except UnsupportedProgramError as error:
                self.causes.append(str(error))
        if by_value:
            pattern = found.program.capture.guards.aliasing
            self._graph, unseen = with_shared_memory(self._graph, self._metadata, pattern)
            for what, why in (*unseen, *unlike_memory(self._metadata, pattern)):
                self._refuse(
                    what, why, ("keep one tensor that covers the memory, and make views of it inside the program")
                )
        self.arguments = Arguments(found.call)
        self.causes += [*self.arguments.causes, *found.effects.causes]
        self.inputs = ExportInputs(found, self.arguments)
        self.fakes = ExportFakes(self._graph.nodes, METAS_OF_EXPORTS)
        self.emitter = Emitter(self.fakes, copies=copies)
        self.numbers = Numbers(self.emitter, floats=floats)
        self._nodes: dict[int, Node] = {}  # of the program's inputs
        self._results = self._copied(layouts=layouts)
        self._after: dict[str, Node] = {}  # what is in tensors that are written, by the names that the inputs had
        self.written: dict[str, Node] = {}  # the final values of inputs, by the inputs' names
        self.outputs: list[Any] = []  # nodes and constants
        self.spec: pytree.TreeSpec = found.program.metadata.spec
        self._check()
        if found.returned is not None and not self.causes:
            self._write()
            self._decide()
            self._return(found.returned)

    @property
    def _metadata(self) -> ProgramMetadata:
        return self.found.program.metadata

    def _copied(self, *, layouts: bool) -> list[Any]:
        """The program's nodes, after all inputs; its results. ``layouts``: whether how these lie is asserted."""
        graph = self._graph
        olds = dict(zip(self._metadata.taken, graph.find_nodes(op="placeholder"), strict=True))
        known: dict[Node, Any] = {}
        for one in self.inputs.all:
            old, look = None if one.number is None else olds.get(one.number), one.value  # None: the graph reads none
            if old is not None:
                look = self.fakes.value(old.meta["val"])
            elif isinstance(look, torch.Tensor):
                look = self.fakes.mode.from_tensor(look, static_shapes=one.kind is not InputKind.USER_INPUT)
            made = self.emitter.placeholder(one.name, look)
            self._nodes |= {} if one.number is None else {one.number: made}
            known |= {} if old is None else {old: made}
        if layouts:
            self._assert_arguments({number for number, old in olds.items() if counts_from_storage(old)})
        for number, value in self.inputs.numbers.items():
            known[olds[number]] = value
        for number, argument in self.inputs.passed.items():
            known[olds[number]] = self._nodes[number] = self._nodes[argument]
        for node in graph.nodes:
            if node.op == "output":
                return list(pytree.tree_map_only(Node, known.__getitem__, list(node.args[0])))
            if node.op != "placeholder" and getattr(node.target, "namespace", None) not in _UNSEEN:
                known[node] = self._copy(node, known)
        raise AssertionError("a graph without an output")

    def _assert_arguments(self, counted: set[int]) -> None:
        """``counted``: inputs of which elements are taken by their places in storages."""
        asked, answers = self.found.program.recorded.asked, self.found.program.guards.asked
        for one, node in zip(self.inputs.all, list(self.emitter.graph.nodes), strict=True):
            if one.number is None or one.kind is not InputKind.USER_INPUT:
                continue
            if not isinstance(node.meta["val"], torch.Tensor):
                continue
            begins = (one.number, BEGIN) in asked or one.number in counted
            begin = answers.get((one.number, OFFSET), 0) if begins else None
            layout = (one.number, LAYOUT) in asked
            self.causes += assert_arguments(self.emitter.graph, node, begin, layout=layout)

    def _copy(self, node: Node, known: dict[Node, Any]) -> Any:
        read = known.get(node.args[0]) if node.target is aten._local_scalar_dense.default else None  # type: ignore[arg-type]
        if isinstance(read, torch.Tensor):  # a number that is a constant here
            self.fakes.is_known(node.meta.get("val"), read.item())
            return read.item()
        return (self.numbers if self.numbers.takes(node, known) else self.emitter).copy(node, known)

    def _check(self) -> None:
        """Find all that no exported program can do."""
        inputs = self._metadata.inputs
        for mutation in self._metadata.mutations:
            what = self._refused(mutation)
            if what:
                why, hint = _SIZES_STAY
                self._refuse(f"the program {what} {inputs[mutation.input].label}", why, hint)
        self._check_state_among_arguments()
        for refusal in refused_nodes(self.emitter.graph, self.root, self.found.program.recorded):
            self._refuse(*refusal)
        for label in arguments_with_gradients(self._metadata):
            self._refuse(
                f"the program leaves a gradient at {label}",
                "the arguments of an exported program have no gradients, so the gradient would be lost",
                "return the gradient (torch.autograd.grad)",
            )
        for number, _ in self._metadata.requiring:
            self._refuse(
                f"the program changes whether {inputs[number].label} requires gradients",
                "an exported program cannot change requires_grad",
                "set it before the program is captured",
            )
        for name, value in self.found.program.capture.modes_left.items():
            self._refuse(
                f"the program sets the {name} to {value}",
                "an exported program cannot change settings of torch",
                "set it before the program is called, or restore it before the program ends",
            )

    def _check_state_among_arguments(self) -> None:
        inputs = self._metadata.inputs
        for number in {one.input for one in self.found.effects.rebindings} & self.inputs.passed.keys():
            self._refuse(
                f"the program replaces {inputs[number].label} by another tensor, but this tensor is also passed as "
                "an argument",
                "an exported program cannot replace its arguments, and here state and argument are the same tensor",
                "capture with a copy as the argument",
            )
        entries = {entry.name: entry for entry in inputs}
        for group in self.found.program.recorded.shared if self._metadata.mutations else ():
            given = [name for name in group if self.inputs.is_argument(entries[name].name)]
            arguments = [entries[name].label for name in given]
            state_names = [entries[name].label for name in group if name not in given]
            if arguments and state_names:
                self._refuse(
                    f"{arguments[0]} shares memory with {state_names[0]}, and the program writes",
                    "an exported program has its own copy of the state",
                    "pass a copy, or use the tensor only as state",
                )

    def _refused(self, mutation: InputMutation) -> str | None:
        """What a mutation does that is no new value of the same tensor."""
        if mutation.layout is not None:
            return "writes memory beyond"
        if mutation.overlaps or mutation.after:
            return "writes to positions that share memory in"
        name = self._metadata.inputs[mutation.input].name
        replaced = is_replaced(mutation, self._metadata)
        if replaced and self.inputs.is_argument(name):  # the caller's very tensor
            layouts = [one[mutation.input] for one in (self._metadata.layouts_before, self._metadata.layouts_after)]
            replaced = layouts[0].stride == layouts[1].stride
        shared = any(name in group for group in self.found.program.recorded.shared)
        if mutation.metadata and (shared or not replaced):
            return "changes the size, strides or memory of"
        return None

    def _refuse(self, what: str, why: str, hint: str, at: object = None) -> None:
        self.causes.append(UnsupportedExportError.cause(what, why=why, hint=hint, at=at))

    # What is written

    def _write(self) -> None:
        for mutation in self._metadata.mutations:
            one, value = self.inputs.by_number[mutation.input], self._nodes[mutation.input]
            for write in mutation.writes:
                given = self._results[write.result]
                self.emitter.at(given)
                value = self._after[one.name] = self.emitter.written(value, write.path, given)
        finals = dict(self._after)
        for rebinding in self.found.effects.rebindings:
            one = self.inputs.by_number[rebinding.input]
            finals[one.name] = self._value(rebinding.value, one.value)
        finals |= self._gradients()
        for one in self.inputs.all:
            if one.name in finals:
                self.written[one.name] = self._own(finals[one.name])
        self.emitter.at(None)

    def _gradients(self) -> dict[str, Node]:
        """The gradients that the program leaves, by the names of the buffers that they go to."""
        finals: dict[str, Node] = {}
        for number, gradient in self._metadata.gradients.items():
            buffer = self.inputs.gradient(number)
            if buffer is None:
                continue
            if gradient is not None:
                finals[buffer.name] = self._value(GraphValue(alias=gradient), buffer.value)
            elif buffer.number is not None:
                finals[buffer.name] = self.emitter.call(aten.zeros_like.default, self._nodes[buffer.number])
        return finals

    def _value(self, value: GraphValue, like: torch.Tensor) -> Any:
        """A tensor that the caller would get, or a number as a tensor."""
        if value.alias is not None:
            alias = self._metadata.outputs[value.alias]
            if alias.result is not None:
                return self._results[alias.result]
            return self._content(alias.input)  # type: ignore[arg-type]
        number = self._results[value.result]  # type: ignore[index]
        if number in self.numbers.tensors:
            return self.emitter.call(aten._to_copy.default, number, dtype=like.dtype)
        return self.emitter.call(aten.scalar_tensor.default, number, dtype=like.dtype)

    def _own(self, value: Any) -> Node:
        """A node that no other mutation has, and that is no input: its memory is written by nobody."""
        root = value
        while root.op == "call_function" and getattr(root.target, "is_view", False):
            root = root.args[0]
        self.emitter.at(value)
        if root.op == "placeholder" or value in self.written.values():
            return self.emitter.call(aten.clone.default, value)
        needs = any(isinstance(one.value, torch.nn.Parameter) and one.value.requires_grad for one in self.inputs.all)
        if needs and not self.trains and value.meta["val"].is_floating_point():
            return self.emitter.detached(value)
        return value  # type: ignore[no-any-return]

    @property
    def trains(self) -> bool:
        """Whether the program takes gradients itself."""
        written = [self._metadata.inputs[mutation.input] for mutation in self._metadata.mutations]
        kept = any(entry.kind.name == "PARAMETER" or entry.gradient_of is not None for entry in written)
        return bool(self._metadata.gradients) or kept

    # Branches on tensor values

    def _decide(self) -> None:
        """Assert the branches on tensor values that the program took."""
        for decision in self._metadata.graph.of_forward:
            value = self._results[decision.output]
            if not isinstance(value, Node):
                if not same_answer(value, decision.answer):
                    self._refuse(
                        f"the program now takes another branch than when it was captured ({decision.answer!r})",
                        "a number of its state has changed since",
                        "call the program once before the export, or capture it again",
                        decision.location,
                    )
                continue
            if "val" not in value.meta:
                self._refuse(
                    f"the program branches on a {type(decision.answer).__name__} number",
                    "torch's graphs have no such numbers, so its value cannot be asserted",
                    "branch on the real and the imaginary part separately",
                    decision.location,
                )
                continue
            with self.emitter.behind(value):  # before what fails where it does not hold
                self._assert(value, decision)

    @property
    def asserted(self) -> list[Decision]:
        """The decisions that the graph asserts: all but those that are known ahead of a call."""
        decisions = self._metadata.graph.of_forward
        return [decision for decision in decisions if isinstance(self._results[decision.output], Node)]

    def _assert(self, value: Node, decision: Decision) -> None:
        if value in self.numbers.tensors:
            self.numbers.assert_equal(value, decision.answer, str(decision))
            return
        agrees = self._agrees(value, decision.answer)
        self.emitter.graph.call_function(aten._assert_scalar.default, (agrees, str(decision))).meta["val"] = None

    def _agrees(self, value: Node, answer: Any) -> Node:
        """Whether an answer is the one of the capture; no symbol is compared with True."""
        if answer is True:
            return value
        op, args = (torch.sym_not, (value,)) if answer is False else (operator.eq, (value, answer))
        agrees = self.emitter.graph.call_function(op, args)
        looks = [node.meta["val"] if isinstance(node, Node) else node for node in args]
        agrees.meta = dict(value.meta) | {"val": op(*looks)}
        agrees.meta.pop("unbacked_bindings", None)
        return agrees

    # What the caller gets

    def _content(self, number: int) -> Node:
        """What is, after the call, in the tensor that an input was: another may be in its place."""
        return self._after.get(self.inputs.by_number[number].name, self._nodes[number])

    def _final(self, number: int) -> Node:
        """An output that is the tensor of an input: the input itself, unless the program puts another in its place."""
        name = self.inputs.by_number[number].name
        return (
            self._own(self._content(number)) if name in self._replaced else self.written.get(name, self._nodes[number])
        )

    @functools.cached_property
    def _replaced(self) -> set[str]:
        """The names of inputs in whose places other tensors are after the call."""
        rebound = {self.inputs.by_number[rebinding.input].name for rebinding in self.found.effects.rebindings}
        buffers = map(self.inputs.gradient, self._metadata.gradients)
        return rebound | {buffer.name for buffer in buffers if buffer is not None}

    def _return(self, returned: Returned) -> None:
        self.spec = returned.spec
        for leaf in returned.leaves:
            if isinstance(leaf, InputTensor):
                self.outputs.append(self._final(leaf.number))
            elif isinstance(leaf, GraphValue):
                self.outputs.append(self._output(leaf))
            elif isinstance(leaf, CONSTANTS):
                self.outputs.append(leaf)
            else:
                self._refuse(
                    f"the program returns an object of class {type(leaf).__name__}",
                    "the results of an exported program are tensors, numbers, and containers that are registered "
                    "with pytree",
                    "return its tensors, or register its class with torch.export.register_dataclass or "
                    "torch.utils.pytree",
                )

    def _output(self, value: GraphValue) -> Any:
        if value.alias is None:
            return self._number(value.result)  # type: ignore[arg-type]
        alias = self._metadata.outputs[value.alias]
        if alias.kind is AliasKind.INPUT:
            return self._final(alias.input)  # type: ignore[arg-type]
        node = self._results[alias.result]  # type: ignore[index]
        changed = alias.input is not None and self.inputs.by_number[alias.input].name in self.written
        if alias.kind is AliasKind.VIEW_OF_INPUT and not changed and alias.layout.static:
            return self._view(alias, node)
        if node.op == "placeholder" or node in self.written.values():
            return self.emitter.call(aten.clone.default, node)
        return node

    def _number(self, result: int) -> Any:
        """A number among the results; one that is a tensor here has the dtype of integers if it is an integer."""
        number, given = self._results[result], self._graph.output_node().args[0][result]  # type: ignore[index]
        whole = number in self.numbers.tensors and isinstance(given.meta["val"], torch.SymInt)  # type: ignore[union-attr]
        made = self.numbers.whole(number) if whole else number
        if made in self.numbers.tensors or whole:
            made.meta[NUMBER] = True
        return made

    def _view(self, alias: Any, node: Node) -> Node:
        """An output that is a view of an input which stays as it is: by views, where the graph copies them."""
        steps: list[Node] = []
        while node.op == "call_function" and viewing(node.target) is not None:
            steps.insert(0, node)
            node = node.args[0]  # type: ignore[assignment]
        if not steps:
            return node
        views = views_of(steps, self._metadata.layouts_after[alias.input], alias.layout)
        if node is not self._nodes[alias.input] or not views:
            return steps[-1]
        for op, args, kwargs, meta in views:
            node = self.emitter.graph.call_function(op, (node, *args), kwargs)
            node.meta = dict(meta)
        return node


def symbolic_sizes(look: Any) -> list[tuple[int, Any]]:
    """The dimensions of a tensor whose sizes are symbols, with these."""
    if not isinstance(look, torch.Tensor):
        return []
    sizes: Iterable[tuple[int, Any]] = enumerate(look.size())
    return [(dim, size.node.expr) for dim, size in sizes if isinstance(size, SYMBOLS) and size.node.expr.is_symbol]
