"""An exported program as ONNX takes it: a pure function of tensors, whose state is among its arguments and results.

Invariant: each tensor that the program writes is an argument and a result; what it asserts is a result as well, for
ONNX has no assertions. Limits: constants among arguments and results are in the convention alone.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node

from functionalize._torch import SYMBOLS, pytree
from functionalize._torch.sizes import hint_of
from functionalize._torch.symbols import sizes_of
from functionalize.backends.export.layouts import counts_from_storage, layout_of, serves_layouts
from functionalize.backends.export.numbers import NUMBER
from functionalize.backends.onnx.convention import Argument, Check, Convention, Layout, Result, State, spec_of
from functionalize.backends.onnx.sizes import Sizes, evaluate
from functionalize.errors import UnsupportedExportError

aten = torch.ops.aten
_ASSERTIONS = {aten._assert_scalar.default, aten._assert_async.msg}
_DROPPED = {
    aten._assert_tensor_metadata.default,
    aten._linalg_check_errors.default,  # of operators that have no translation
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


class Prepared:
    """One program, with its calling convention."""

    def __init__(self, exported: ExportedProgram) -> None:
        self._exported, self._signature = exported, exported.graph_signature
        specs = self._signature.output_specs
        self._mutated = {spec.target for spec in specs if spec.kind in _MUTATIONS}
        inputs = [self._now(spec) for spec in self._signature.input_specs]
        self._inputs = sorted(inputs, key=lambda spec: spec.kind is InputKind.USER_INPUT)
        self._graph, self._checks, self._layouts = Graph(), list[tuple[Any, str]](), list[Layout]()
        self._results = self._copied()
        self._outputs: list[Node] = []  # each once
        self.output_names: list[str] = []
        self.state_inputs: list[str] = []  # names of placeholders
        self.convention = Convention()
        self._describe()
        self.program = self._assembled()

    def _now(self, spec: InputSpec) -> InputSpec:
        if spec.target in self._mutated and spec.kind is not InputKind.USER_INPUT:
            return InputSpec(InputKind.USER_INPUT, spec.arg, spec.target)
        return spec

    def _copied(self) -> list[Any]:
        """The graph, its inputs in their new order, without assertions; its results."""
        olds = self._placeholders = {node.name: node for node in self._exported.graph.find_nodes(op="placeholder")}
        known: dict[Node, Any] = {}
        for spec in self._inputs:
            old = olds[spec.arg.name]
            if isinstance(spec.arg, ConstantArgument):
                known[old] = spec.arg.value
                continue
            known[old] = self._graph.placeholder(old.name)
            known[old].meta, known[old].name = copy.copy(old.meta), old.name
        for node in self._exported.graph.nodes:
            if node.op == "output":
                return list(pytree.tree_map_only(Node, known.__getitem__, list(node.args[0])))
            look = layout_of(node)
            if look is not None:
                self._note_layout(*look)
            elif serves_layouts(node):
                continue
            elif node.target in _ASSERTIONS:
                self._checks.append((known[node.args[0]], node.args[1]))
            elif _is_an_empty_part(node):
                known[node] = self._empty(node)
            elif node.op != "placeholder" and node.target not in _DROPPED:
                known[node] = self._graph.node_copy(node, lambda other: known[other])
        raise AssertionError("a graph without an output")

    def _note_layout(self, name: str, look: Any) -> None:
        """How an argument lies: to ONNX it is its elements, and these begin where its storage does."""
        if isinstance(look, int) and look and counts_from_storage(self._placeholders[name]):
            cause = UnsupportedExportError.cause(
                f"as_strided of `{name}`, which begins at {look} in its storage",
                why="to ONNX a tensor is its elements, without others that its storage has",
                hint="capture with a tensor of its own memory (.clone()), or use views by dimension",
            )
            raise UnsupportedExportError("ONNX", [cause])
        if not isinstance(look, tuple):
            self._layouts.append(Layout(name, look))
            return
        strides = next((one.look for one in self._layouts if one.argument == name and isinstance(one.look, list)), None)
        if strides is None:
            strides = []
            self._layouts.append(Layout(name, strides))
        strides.append(look[1])  # dimension by dimension, in their order

    def _empty(self, node: Node) -> Node:
        look = node.meta["val"]
        made = self._graph.call_function(aten.full.default, (list(look.size()), 0), {"dtype": look.dtype})
        made.meta, made.name = dict(node.meta), node.name
        return made

    # The convention

    def _describe(self) -> None:
        convention, exported = self.convention, self._exported
        specs = (exported.call_spec.in_spec, exported.call_spec.out_spec)
        try:
            convention.in_spec, convention.out_spec = texts = [*map(pytree.treespec_dumps, specs)]
            unlike = [text for text, spec in zip(texts, specs, strict=True) if spec_of(text) != spec]
            if unlike:
                raise ValueError(f"the text of the nesting is read as another one: {unlike[0]}")
        except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
            cause = UnsupportedExportError.cause(
                "the arguments or the results hold an object of a class that has no name in files, or such a key",
                why=str(error),
                hint="use tuples, lists and dicts with text or numbers for keys, or register the class with a "
                "serialized_type_name",
            )
            raise UnsupportedExportError("ONNX", [cause]) from error
        whole = exported.module_call_graph[0].signature
        convention.names = list(whole.forward_arg_names or []) if whole is not None else []
        for spec in self._signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                constant = isinstance(spec.arg, ConstantArgument)
                value = spec.arg.value if constant else None
                convention.arguments.append(Argument(spec.arg.name, value, constant))
        convention.layouts = self._layouts
        self.describe_sizes()
        self._describe_outputs()

    def describe_sizes(self) -> None:
        """Say what is taken for granted of sizes by now: decompositions ask more than the program did."""
        names = {argument.name for argument in self.convention.arguments if not argument.constant}
        looks = {node.name: node.meta["val"] for node in self._graph.find_nodes(op="placeholder") if node.name in names}
        sizes = self.convention.sizes = Sizes(*sizes_of(looks))
        hints = {name: hint_of(size) for look in looks.values() for size in look.size()
                 if isinstance(size, torch.SymInt) and (name := str(size.node.expr)).isidentifier()}  # fmt: skip
        for text in (*sizes.conditions, *(one for several in sizes.arguments.values() for one in several)):
            try:
                evaluate(str(text), hints)
            except ValueError as error:
                cause = UnsupportedExportError.cause(
                    f"the program is right for sizes with {text}",
                    why=f"no file can say so: {error}",
                    hint="write it without dynamic_shapes",
                )
                raise UnsupportedExportError("ONNX", [cause]) from error

    def _describe_outputs(self) -> None:
        convention, finals = self.convention, dict[str, str]()
        for spec, result in zip(self._signature.output_specs, self._results, strict=True):
            if spec.kind in _MUTATIONS:
                name = self._output(result, f"new.{spec.target}")
                finals[str(spec.target)] = name
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                convention.writes[str(spec.target)] = self._output(result, f"new.{spec.target}")
        for spec in self._inputs:
            if spec.kind is InputKind.USER_INPUT and spec.target is not None:
                value = self._value(spec.target)
                dtype = str(value.dtype).removeprefix("torch.")
                name = str(spec.target)
                convention.state.append(State(name, spec.arg.name, finals[name], dtype, list(value.size())))
                self.state_inputs.append(spec.arg.name)
        mutations = len(finals) + len(convention.writes)
        for number, result in enumerate(self._results[mutations:]):
            convention.results.append(self._result(number, result))
        for number, (node, message) in enumerate(self._checks):
            if isinstance(node, Node):
                convention.checks.append(Check(self._output(self._as_tensor(node), f"check_{number}"), message))

    def _value(self, target: str) -> torch.Tensor:
        state = self._exported.state_dict
        found: torch.Tensor = state[target] if target in state else self._exported.constants[target]
        return found

    def initial(self) -> dict[str, torch.Tensor]:
        """What the state is before the first call, by the names of the inputs."""
        return {one.input: self._value(one.target).detach() for one in self.convention.state}

    def _output(self, node: Any, name: str) -> str:
        """The name of the output that a node is; ``name``: what it is called if it is none yet."""
        if node in self._outputs:
            return self.output_names[self._outputs.index(node)]
        inputs = {known for spec in self._inputs for known in (spec.arg.name, spec.target)}
        while name in inputs or name in self.output_names:
            name += "_"
        self._outputs.append(node)
        self.output_names.append(name)
        return name

    def _result(self, number: int, result: Any) -> Result:
        if not isinstance(result, Node):
            return Result("value", value=result)
        arguments = {argument.name for argument in self.convention.arguments}
        if result.op == "placeholder" and result.name in arguments:
            return Result("argument", result.name)
        value = result.meta["val"]
        kind = "number" if isinstance(value, SYMBOLS) or NUMBER in result.meta else "tensor"
        return Result(kind, self._output(self._as_tensor(result), f"output_{number}"))

    def _as_tensor(self, node: Node) -> Node:
        value, made = node.meta["val"], None
        if node.op == "placeholder":
            made = self._graph.call_function(aten.clone.default, (node,))
            made.meta = {"val": value}
        elif isinstance(value, (*SYMBOLS, bool, int, float)):
            dtype = {torch.SymInt: torch.int64, int: torch.int64, torch.SymFloat: torch.float64, float: torch.float64}
            options: dict[str, Any] = {"dtype": dtype.get(type(value), torch.bool)}
            made = self._graph.call_function(aten.scalar_tensor.default, (node,), options)
            mode = next(v.fake_mode for n in self._graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode"))
            with mode:
                made.meta = {"val": torch.empty([], **options)}
        return made or node

    def _assembled(self) -> ExportedProgram:
        if not self._outputs:  # an engine wants one
            node = self._graph.call_function(aten.full.default, ([], 0))
            node.meta["val"] = torch.zeros([], dtype=torch.int64)
            self._output(node, "nothing")
        self._graph.output(tuple(self._outputs))
        self._graph.eliminate_dead_code()
        inputs = [spec for spec in self._inputs if not isinstance(spec.arg, ConstantArgument)]
        inputs = [InputSpec(s.kind, s.arg, None if s.kind is InputKind.USER_INPUT else s.target, s.persistent)
                  for s in inputs]  # fmt: skip
        outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in self._outputs]
        count = sum(spec.kind is InputKind.USER_INPUT for spec in inputs)
        in_spec = pytree.tree_structure((tuple(range(count)), {}))
        out_spec = pytree.tree_structure(tuple(range(len(outputs))))
        whole = ModuleCallSignature([], [], in_spec, out_spec)
        kept = {spec.target for spec in inputs}
        return ExportedProgram(
            root=self._exported.graph_module,
            graph=self._graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict={name: value for name, value in self._exported.state_dict.items() if name in kept},
            range_constraints=dict(self._exported.range_constraints),
            module_call_graph=[ModuleCallEntry(fqn="", signature=whole)],
            constants={name: value for name, value in self._exported.constants.items() if name in kept},
        )

    @property
    def input_names(self) -> list[str]:
        """The names of what is passed: state by its paths, arguments as they are called."""
        paths = {one.input: one.target for one in self.convention.state}
        given = [s.arg.name for s in self._inputs
                 if s.kind is InputKind.USER_INPUT and not isinstance(s.arg, ConstantArgument)]  # fmt: skip
        return [paths.get(name, name) for name in given]


def _is_an_empty_part(node: Node) -> bool:
    """Whether it is a result of several that never has an element: where torch gives none, ONNX's operators may."""
    look = node.meta.get("val") if node.target is operator.getitem else None
    return isinstance(look, torch.Tensor) and any(type(size) is int and size == 0 for size in look.size())
