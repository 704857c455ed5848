"""An exported program as ONNX takes it: a pure function of tensors, whose state is among its arguments and results.

Invariant: each tensor that the program writes is an argument and a result; all that it returns is a result, each of
its own; what it asserts is a result as well, for ONNX has no assertions. Limits: constants among arguments and results
are in the convention alone.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
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
from functionalize._torch.symbols.sizes import hint_of
from functionalize._torch.symbols.symbols import sizes_of
from functionalize.backends.export.numbers import NUMBER
from functionalize.backends.export.signature.layouts import counts_from_storage, layout_of, serves_layouts
from functionalize.backends.onnx.convention.metadata import Argument, Check, Convention, Layout, Result, State, spec_of
from functionalize.backends.onnx.convention.naming import Names, argument_names, result_names
from functionalize.backends.onnx.convention.sizes import Sizes, evaluate
from functionalize.backends.onnx.options import Options, named
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

    def __init__(self, exported: ExportedProgram, options: Options) -> None:
        self._exported, self._options = exported, options
        specs = exported.graph_signature.output_specs
        self._mutated = {spec.target for spec in specs if spec.kind in _MUTATIONS}
        inputs = [self._now(spec) for spec in self._exported.graph_signature.input_specs]
        self._inputs = sorted(inputs, key=lambda spec: spec.kind is InputKind.USER_INPUT)
        self._graph, self._checks, self._layouts = Graph(), list[tuple[Any, str]](), list[Layout]()
        self.names = Names()  # of inputs and outputs: arguments claim theirs first, then results, then state
        self.convention = Convention()
        self.input_names = self._named_arguments()  # by the names of placeholders
        self._results = self._copied()
        self._outputs: list[Node] = []
        self.output_names: list[str] = []
        self._describe()
        self.program = self._assembled()

    def _now(self, spec: InputSpec) -> InputSpec:
        if spec.target in self._mutated and spec.kind is not InputKind.USER_INPUT:
            return InputSpec(InputKind.USER_INPUT, spec.arg, spec.target)
        return spec

    def _named_arguments(self) -> dict[str, str]:
        """What arguments are called, by their placeholders."""
        whole = self._exported.module_call_graph[0].signature
        parameters = self.convention.names = list((whole and whole.forward_arg_names) or [])
        specs = [spec for spec in self._exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
        own = argument_names(self._exported.call_spec.in_spec, parameters)
        wanted = {spec.arg.name: name for spec, name in zip(specs, own, strict=True)}
        tensors = [spec.arg.name for spec in specs if not isinstance(spec.arg, ConstantArgument)]
        names = named(self._options.input_names, [wanted[placeholder] for placeholder in tensors], "input_names")
        given = dict(zip(tensors, names, strict=True))
        return {placeholder: self.names.claim(name) for placeholder, name in (given | wanted | given).items()}

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

    def _note_layout(self, placeholder: str, look: Any) -> None:
        """How an argument lies: to ONNX it is its elements, and these begin where its storage does."""
        name = self.input_names[placeholder]
        if isinstance(look, int) and look and counts_from_storage(self._placeholders[placeholder]):
            cause = UnsupportedExportError.cause(
                f"as_strided of `{name}`, which has the storage offset {look}",
                why="an ONNX tensor has only its own elements, and no storage around them",
                hint="capture with a clone of the tensor (.clone()), or use views by dimension",
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
                raise ValueError(f"the structure changes when it is saved and loaded: {unlike[0]}")
        except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
            cause = UnsupportedExportError.cause(
                "the arguments or the results contain an object, or a key, of a class that files cannot name",
                why=str(error),
                hint="use tuples, lists and dicts whose keys are strings or numbers, or register the class with a "
                "serialized_type_name",
            )
            raise UnsupportedExportError("ONNX", [cause]) from error
        for spec in self._exported.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                constant = isinstance(spec.arg, ConstantArgument)
                value = spec.arg.value if constant else None
                convention.arguments.append(Argument(self.input_names[spec.arg.name], value, constant))
        convention.layouts = self._layouts
        self.describe_sizes()
        self._describe_outputs()

    def describe_sizes(self) -> None:
        """Say what is taken for granted of sizes by now: decompositions ask more than the program did."""
        state = {state.input for state in self.convention.state}
        named = [(self.input_names[node.name], node) for node in self._graph.find_nodes(op="placeholder")
                 if node.name in self.input_names]  # fmt: skip
        looks = {name: node.meta["val"] for name, node in named if name not in state}
        sizes = self.convention.sizes = Sizes(*sizes_of(looks))
        hints = {name: hint_of(size) for look in looks.values() for size in look.size()
                 if isinstance(size, torch.SymInt) and (name := str(size.node.expr)).isidentifier()}  # fmt: skip
        for text in (*sizes.conditions, *(one for several in sizes.arguments.values() for one in several)):
            try:
                evaluate(str(text), hints)
            except ValueError as error:
                cause = UnsupportedExportError.cause(
                    f"the program supports only sizes with {text}",
                    why=f"an ONNX file cannot hold this condition: {error}",
                    hint="capture it without dynamic_shapes",
                )
                raise UnsupportedExportError("ONNX", [cause]) from error

    def _describe_outputs(self) -> None:
        """What each output is; an argument that is written, and state, get new values."""
        convention, specs = self.convention, self._exported.graph_signature.output_specs
        written = [spec for spec in specs if spec.kind is not OutputKind.USER_OUTPUT]
        returned = self._results[len(written) :]
        names = self._named_results(returned)
        self._describe_state()
        states, same = {state.target: state for state in convention.state}, dict[Node, str]()
        for spec, result in zip(written, self._results, strict=False):
            target = str(spec.target)
            if spec.kind in _MUTATIONS:
                self._add(result, states[target].output)
            else:
                argument = self.input_names[target]
                convention.writes[argument] = self._add(result, self.names.claim(f"new.{argument}"))
                same[result] = argument
        arguments = {argument.name for argument in convention.arguments}
        same |= {node: name for node in self._graph.find_nodes(op="placeholder")
                 if (name := self.input_names.get(node.name)) in arguments and name is not None}  # fmt: skip
        for result, name in zip(returned, names, strict=True):
            convention.results.append(self._result(result, name, same))
        for number, (node, message) in enumerate(self._checks):
            if isinstance(node, Node):
                convention.checks.append(Check(self._add(node, self.names.claim(f"check_{number}")), message))

    def _named_results(self, results: Sequence[Any]) -> list[str | None]:
        """What each leaf of the results is called; None where it is no output."""
        given = self._options.output_names
        wanted = result_names(self._exported.call_spec.out_spec)
        own = [name for name, result in zip(wanted, results, strict=True) if isinstance(result, Node)]
        names = named(given, own, "output_names")
        claimed = [self.names.claim(name) for name in names]
        if given is not None and claimed != names:
            taken = next(name for name, claim in zip(names, claimed, strict=True) if name != claim)
            raise ValueError(
                f"output_names has {taken!r}, the name of an input, but names in a graph are unique\n"
                "    try  another name for it, or input_names for that input"
            )
        remaining = iter(claimed)
        return [next(remaining) if isinstance(result, Node) else None for result in results]

    def _describe_state(self) -> None:
        for spec in self._inputs:
            if spec.kind is InputKind.USER_INPUT and spec.target is not None:
                value, target = self._value(spec.target), str(spec.target)
                name = self.input_names[spec.arg.name] = self.names.claim(target)
                dtype, new = str(value.dtype).removeprefix("torch."), self.names.claim(f"new.{name}")
                self.convention.state.append(State(target, name, new, dtype, list(value.size())))

    def _value(self, target: str) -> torch.Tensor:
        state = self._exported.state_dict
        found: torch.Tensor = state[target] if target in state else self._exported.constants[target]
        return found

    def initial(self) -> dict[str, torch.Tensor]:
        """What the state is before the first call, by its paths."""
        return {state.target: self._value(state.target).detach() for state in self.convention.state}

    def _result(self, result: Any, name: str | None, same: dict[Node, str]) -> Result:
        """A leaf of the results. ``same``: the arguments, and earlier results, that nodes are; gets this one."""
        if name is None:
            return Result("value", value=result)
        value = result.meta["val"]
        kind = "number" if isinstance(value, SYMBOLS) or NUMBER in result.meta else "tensor"
        known = same.setdefault(result, name) if kind == "tensor" else name
        return Result(kind, self._add(result, name), same_as=None if known == name else known)

    def _add(self, node: Node, name: str) -> str:
        """Make a node an output, of this name."""
        node = self._as_tensor(node)
        if node.op == "placeholder" or node in self._outputs:
            look, node = node.meta["val"], self._graph.call_function(aten.clone.default, (node,))
            node.meta = {"val": look}
        self._outputs.append(node)
        self.output_names.append(name)
        return name

    def _as_tensor(self, node: Node) -> Node:
        """A number as a tensor without dimensions."""
        value, made = node.meta["val"], None
        if isinstance(value, (*SYMBOLS, bool, int, float)):
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
            self._add(node, self.names.claim("nothing"))
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
    def passed(self) -> list[str]:
        """The names of the inputs, in their order."""
        specs = [spec for spec in self._inputs if spec.kind is InputKind.USER_INPUT]
        return [self.input_names[spec.arg.name] for spec in specs if not isinstance(spec.arg, ConstantArgument)]


def _is_an_empty_part(node: Node) -> bool:
    """Whether it is a result of several that never has an element: where torch gives none, ONNX's operators may."""
    look = node.meta.get("val") if node.target is operator.getitem else None
    return isinstance(look, torch.Tensor) and any(type(size) is int and size == 0 for size in look.size())
