"""Captured programs as ``torch.export.ExportedProgram``, and these as captured programs.

Invariant: torch's verifier has accepted what is returned; nothing that the program writes is left out. Limits: one way
by data, whose decisions are assertions; state of fixed sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim, ExportedProgram, ModuleCallEntry, ModuleCallSignature
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

from functionalize._torch import pytree
from functionalize._torch.exporting import symbols_of
from functionalize.backends.decompositions.own import ROUNDED
from functionalize.backends.export.graph import ExportGraph, symbolic_sizes
from functionalize.backends.export.passes.core_aten import in_core, unshared, without_differing
from functionalize.backends.export.passes.explicit_state import with_explicit_state
from functionalize.backends.export.passes.taking_apart import sizes_stay_free, taken_apart
from functionalize.backends.export.passes.views import with_views
from functionalize.backends.export.refused_nodes import refused_layouts
from functionalize.backends.export.signature.first_call import check_first_call
from functionalize.backends.export.signature.shared_places import GraphValue
from functionalize.backends.export.signature.state import ExportInput
from functionalize.backends.export.signature.steady import exportable
from functionalize.backends.preparation.stopped_gradients import has_floats, stopped_gradients
from functionalize.errors import UnsupportedExportError
from functionalize.graph_capture.capture import capture
from functionalize.runtime.calls.program import CapturedProgram
from functionalize.runtime.decisions import warn_of_assertions
from functionalize.runtime.guards.modes import GRAD_MODE

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


def to_exported_program(
    program: CapturedProgram,
    *,
    explicit_state: bool = False,
    to: str = "an ExportedProgram",
    by_value: bool = False,
    scales: bool = True,
    floats: bool = False,
    layouts: bool = True,
    warns: bool = True,
) -> ExportedProgram:
    """See :meth:`CapturedProgram.to_exported_program`.

    ``to``: what messages call the backend; ``by_value``: whether it gets inputs without the memory that they share;
    ``scales``: whether interpolations may have some, beside the sizes that they give; ``floats``: whether those that
    Python makes of integers are tensors; ``layouts``: whether it asserts how its arguments lie in memory;
    ``warns``: whether it says what decisions it asserts.
    """
    refused = refused_layouts(program.graph)
    if refused:
        causes = [UnsupportedExportError.cause(what, why=why, hint=hint, at=at) for what, why, hint, at in refused]
        raise UnsupportedExportError(to, causes)
    found = exportable(program, to)
    by_value = by_value or explicit_state
    options = {"by_value": by_value, "scales": scales, "floats": floats, "layouts": layouts}
    graph = ExportGraph(found, copies=program.remove == "mutations_and_views", **options)
    if graph.causes:
        raise UnsupportedExportError(to, graph.causes)
    _end_gradients(graph)
    graph.inputs.settle(graph.written, trains=graph.trains)
    check_first_call(found, to)
    made = _assembled(graph)
    if warns:
        warn_of_assertions(graph.asserted, is_exporting=program.is_exporting)
    return with_explicit_state(made) if explicit_state else made


def to_core_aten(program: CapturedProgram, *, explicit_state: bool = False) -> ExportedProgram:
    """See :meth:`CapturedProgram.to_core_aten`."""
    # Not by memory: torch takes no program apart whose state shares any.
    how: Any = {"by_value": True, "scales": False, "layouts": False}
    exported = to_exported_program(program, explicit_state=explicit_state, **how)
    with sizes_stay_free(exported, "core ATen"):
        exported = unshared(without_differing(with_views(exported), ROUNDED.keys()))
        return in_core(taken_apart(exported, None, "core ATen"))


def from_exported_program(exported: ExportedProgram) -> CapturedProgram:
    """Capture a program that ``torch.export`` exported: without mutation, and with explicit write-backs.

    Args:
        exported: a program from ``torch.export.export`` or ``torch.export.load``, with its example inputs.

    Returns:
        The captured program: it takes the arguments of ``exported.module()``, and has the state of ``exported``. Its
        dynamic sizes are those of ``exported``.

    Raises:
        ValueError: ``exported`` has no example inputs.

    Example:
        >>> import torch
        >>> from functionalize import from_exported_program
        >>> exported = torch.export.export(torch.nn.BatchNorm1d(3), (torch.randn(4, 3),))
        >>> program = from_exported_program(exported)
        >>> [write.target for write in program.mutations]
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    if exported.example_inputs is None:
        raise ValueError("the exported program has no example inputs\n    try  export it again with example inputs")
    args, kwargs = exported.example_inputs
    module: Any = exported.module(check_guards=False)
    module.validate_inputs = False  # a captured program has guards of its own
    module.range_constraints = {}  # which validation reads: its keys are objects of sympy's, and no state
    return capture(module, tuple(args), kwargs, dynamic_shapes=_dynamic_shapes(exported))


def _dynamic_shapes(exported: ExportedProgram) -> Any:
    """Which sizes of the arguments may differ, as ``dynamic_shapes`` says it."""
    looks = {node.name: node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")}
    names = [one.arg.name for one in exported.graph_signature.input_specs if one.kind is InputKind.USER_INPUT]
    dims: dict[str, Any] = {}
    leaves = [_dims(exported, name, looks.get(name), dims) for name in names]
    if not any(leaves):
        return None
    args, kwargs = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
    return (*args, *kwargs.values())


def _dims(exported: ExportedProgram, tensor: str, look: Any, dims: dict[str, Any]) -> dict[int, Any] | None:
    if not isinstance(look, torch.Tensor):
        return None
    found: dict[int, Any] = {}
    plain = dict(symbolic_sizes(look))
    for dim, size in enumerate(look.size()):
        if type(size) is int:
            continue
        bounds = exported.range_constraints.get(plain.get(dim))
        if bounds is None:
            found[dim] = Dim.AUTO
            continue
        name = str(plain[dim])
        upper = int(bounds.upper) if bounds.upper < 2**31 else None
        found[dim] = dims.setdefault(name, Dim(f"{tensor}_dim_{dim}", min=max(int(bounds.lower), 0), max=upper))
    return found or None


def _end_gradients(graph: ExportGraph) -> None:
    """Have results require none where the program ends gradients on its own: its graph does not show at which place."""
    capture, returned = graph.found.program.capture, graph.found.returned
    if returned is None or not capture.guards.modes[GRAD_MODE]:
        return
    outputs = capture.recorded.metadata.outputs
    values = [leaf for leaf in returned.leaves if isinstance(leaf, GraphValue)]
    positions = {value.result if value.alias is None else outputs[value.alias].result for value in values}
    if stopped_gradients(capture, {position for position in positions if position is not None}):
        inputs = {*graph.written.values(), *graph.emitter.graph.find_nodes(op="placeholder")}
        for place, node in enumerate(graph.outputs):
            tensor = isinstance(node, Node) and isinstance(node.meta["val"], torch.Tensor)
            if tensor and node not in inputs and has_floats(node):
                graph.outputs[place] = graph.emitter.detached(node)


def _assembled(graph: ExportGraph) -> ExportedProgram:
    written, kinds = list(graph.written.items()), {one.name: one for one in graph.inputs.all}
    outputs = [node for _, node in written] + graph.outputs
    graph.emitter.graph.output(tuple(outputs))
    for node in reversed(graph.emitter.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not node.is_impure():
            graph.emitter.graph.erase_node(node)
    inputs = [InputSpec(one.kind, _argument(one), one.target, one.persistent) for one in graph.inputs.all]
    results = [
        OutputSpec(_MUTATIONS[kinds[name].kind], TensorArgument(node.name), kinds[name].target or name)
        for name, node in written
    ]
    results += [OutputSpec(OutputKind.USER_OUTPUT, _output(value), None) for value in graph.outputs]
    state, constants = _values(graph)
    return ExportedProgram(
        root=graph.root,
        graph=graph.emitter.graph,
        graph_signature=ExportGraphSignature(inputs, results),
        state_dict=state,
        range_constraints=_ranges(graph),
        module_call_graph=_module_calls(graph),
        example_inputs=(graph.arguments.args, graph.arguments.kwargs),
        constants=constants,
    )


def _argument(one: ExportInput) -> Any:
    if one.target is None and one.number is None:
        return ConstantArgument(name=one.name, value=one.value)
    return TensorArgument(name=one.name)


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
