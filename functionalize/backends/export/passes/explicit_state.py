"""An exported program whose state is among its arguments and its results, for engines that drop what a program writes.

Invariant: it computes what it computed, and writes nothing. Limits: programs that write to no argument.
"""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec
from torch.fx import Graph

from functionalize._torch import pytree
from functionalize.backends.export.passes.views import keep_names
from functionalize.errors import UnsupportedExportError

_OF_STATE = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def with_explicit_state(exported: ExportedProgram) -> ExportedProgram:
    """The program `(*state, *args, **kwargs) -> (*new_state, result)`; the first state is in its example inputs.

    Raises:
        UnsupportedExportError: it writes to its arguments.
    """
    signature = exported.graph_signature
    _refuse_written_arguments(signature)
    new = {str(spec.target): spec.arg for spec in signature.output_specs if spec.kind in _OF_STATE}
    state = [spec for spec in signature.input_specs if spec.target in new and spec.kind is not InputKind.USER_INPUT]
    given = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    kept = [spec for spec in signature.input_specs if spec not in state and spec not in given]
    passed = [InputSpec(InputKind.USER_INPUT, spec.arg, None) for spec in state]
    inputs = [*kept, *passed, *given]
    values = {name: value for held in (exported.constants, exported.state_dict) for name, value in held.items()}
    returned = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    results = [*(new[str(spec.target)] for spec in state), *returned]
    names = {str(spec.target) for spec in kept}
    args, kwargs = exported.example_inputs or ((), {})
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, arg, None) for arg in results]
    first = [values[str(spec.target)].detach().clone() for spec in state]
    return ExportedProgram(
        root=exported.graph_module,
        graph=_reordered(exported, [spec.arg.name for spec in inputs], [arg.name for arg in results[: len(state)]]),
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={name: value for name, value in exported.state_dict.items() if name in names},
        range_constraints=dict(exported.range_constraints),
        module_call_graph=[_whole(exported, [spec.arg.name for spec in state]), *exported.module_call_graph[1:]],
        example_inputs=((*first, *args), kwargs),
        constants={name: value for name, value in exported.constants.items() if name in names},
    )


def _refuse_written_arguments(signature: ExportGraphSignature) -> None:
    written = [spec.target for spec in signature.output_specs if spec.kind is OutputKind.USER_INPUT_MUTATION]
    if written:
        causes = [
            UnsupportedExportError.cause(
                f"the program writes to its argument `{name}`",
                why="with explicit state, an exported program writes nothing: it returns only new values of its state",
                hint="clone it in the program, and return the new value",
            )
            for name in written
        ]
        raise UnsupportedExportError("an ExportedProgram with explicit state", causes)


def _reordered(exported: ExportedProgram, inputs: list[str], new: list[str]) -> Graph:
    """The graph with its inputs in another order, and other results first."""
    graph = Graph()
    results: Any = graph.graph_copy(exported.graph, {})
    keep_names(exported.graph, graph)
    known = {node.name: node for node in graph.nodes}
    for name in reversed(inputs):
        next(iter(graph.nodes)).prepend(known[name])
    written = len(exported.graph_signature.output_specs) - len(exported.graph_signature.user_outputs)
    olds = list(exported.graph.output_node().args[0])[:written]
    by_name = {old.name: copy for old, copy in zip(olds, results, strict=False)}
    graph.output((*(by_name[name] for name in new), *results[written:]))
    return graph


def _whole(exported: ExportedProgram, state: list[str]) -> ModuleCallEntry:
    """How the program is called."""
    spec = exported.call_spec
    args, kwargs = spec.in_spec.children()
    leaves = [pytree.treespec_leaf()] * len(state)
    takes = pytree.treespec_tuple([pytree.treespec_tuple([*leaves, *args.children()]), kwargs])
    gives = pytree.treespec_tuple([*leaves, spec.out_spec])
    before = exported.module_call_graph[0].signature
    names = None if before is None or before.forward_arg_names is None else [*state, *before.forward_arg_names]
    return ModuleCallEntry(fqn="", signature=ModuleCallSignature([], [], takes, gives, names))
