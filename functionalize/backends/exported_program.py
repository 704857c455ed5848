"""Captured programs as ``torch.export.ExportedProgram``, and these as captured programs.

Invariant: torch's verifier has accepted what is returned; nothing that the program writes is left out. Limits: one way
by data, whose decisions are assertions; state of fixed sizes.
"""

from __future__ import annotations

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
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Node

from functionalize._torch.exporting import symbols_of
from functionalize.backends.export.first_call import check_first_call
from functionalize.backends.export.graph import ExportGraph, symbolic_sizes
from functionalize.backends.export.steady import exportable
from functionalize.errors import UnsupportedExportError
from functionalize.runtime.captured_program import CapturedProgram

_ARGUMENTS: dict[type, Any] = {
    torch.SymInt: SymIntArgument,
    torch.SymFloat: SymFloatArgument,
    torch.SymBool: SymBoolArgument,
}
_MUTATIONS = {
    InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}


def to_exported_program(program: CapturedProgram, *, to: str = "an ExportedProgram") -> ExportedProgram:
    """See :meth:`CapturedProgram.to_exported_program`; ``to``: what messages call the backend."""
    found = exportable(program)
    graph = ExportGraph(found, copies=program.remove == "mutations_and_views")
    if graph.causes:
        raise UnsupportedExportError(to, graph.causes)
    graph.inputs.settle(graph.written, trains=graph.trains)
    made = _assembled(graph)
    if found.made:
        check_first_call(graph, made.graph_module, to)
    return made


def _assembled(graph: ExportGraph) -> ExportedProgram:
    written, kinds = list(graph.written.items()), {one.name: one for one in graph.inputs.all}
    outputs = [node for _, node in written] + graph.outputs
    graph.emitter.graph.output(tuple(outputs))
    for node in reversed(graph.emitter.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not node.is_impure():
            graph.emitter.graph.erase_node(node)
    inputs = [
        InputSpec(one.kind, _argument(one.name, one, graph), one.target, one.persistent) for one in graph.inputs.all
    ]
    results = [
        OutputSpec(_MUTATIONS[kinds[name].kind], TensorArgument(node.name), kinds[name].target or name)
        for name, node in written
    ]
    results += [OutputSpec(OutputKind.USER_OUTPUT, _output(value), None) for value in graph.outputs]
    state, constants = _values(graph)
    return ExportedProgram(
        root=graph.found.program.recorded.root,
        graph=graph.emitter.graph,
        graph_signature=ExportGraphSignature(inputs, results),
        state_dict=state,
        range_constraints=_ranges(graph),
        module_call_graph=_module_calls(graph),
        example_inputs=(graph.arguments.args, graph.arguments.kwargs),
        constants=constants,
    )


def _argument(name: str, one: Any, graph: ExportGraph) -> Any:
    if one.target is None and one.number is None:
        return ConstantArgument(name=name, value=one.value)
    return TensorArgument(name=name)


def _output(value: Any) -> Any:
    if not isinstance(value, Node):
        return ConstantArgument(name="", value=value)
    return _ARGUMENTS.get(type(value.meta["val"]), TensorArgument)(name=value.name)


def _values(graph: ExportGraph) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict, and what else the program holds."""
    state: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for one in graph.inputs.all:
        if one.target is not None:
            kept = one.kind is InputKind.PARAMETER or (one.kind is InputKind.BUFFER and one.persistent)
            (state if kept else constants)[one.target] = one.value
    return state, constants


def _ranges(graph: ExportGraph) -> dict[Any, Any]:
    """The ranges of the graph's symbols; guards on them learn where the arguments have them."""
    placeholders = {node.name: node for node in graph.emitter.graph.find_nodes(op="placeholder")}
    for one in graph.inputs.all:
        for dim, symbol in symbolic_sizes(placeholders[one.name].meta["val"]) if one.path else ():
            graph.fakes.locate(symbol, one.path, dim)
    nodes = graph.emitter.graph.nodes
    return graph.fakes.ranges({symbol for node in nodes for symbol in symbols_of(node.meta.get("val"))})


def _module_calls(graph: ExportGraph) -> list[ModuleCallEntry]:
    """One entry for the program, and one for each module whose nodes the graph has."""
    arguments = graph.arguments
    whole = ModuleCallSignature([], [], arguments.spec, graph.spec, arguments.names)
    stacks = [node.meta.get("nn_module_stack") or {} for node in graph.emitter.graph.nodes]
    paths = dict.fromkeys(path for stack in stacks for path, _ in stack.values() if path)
    return [ModuleCallEntry(fqn="", signature=whole), *(ModuleCallEntry(fqn=path) for path in paths)]
