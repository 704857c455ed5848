"""What the inputs and outputs of a captured graph are, in the words of ``torch.export``."""

from __future__ import annotations

from collections.abc import Sequence
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

from functionalize.runtime.metadata import GraphInput

_ARGUMENTS: dict[type, Any] = {
    torch.SymInt: SymIntArgument,
    torch.SymFloat: SymFloatArgument,
    torch.SymBool: SymBoolArgument,
}
_MUTATIONS = {
    InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}


def mutation_kind(kind: InputKind) -> OutputKind:
    """The kind of an output that is written back to an input."""
    return _MUTATIONS.get(kind, OutputKind.BUFFER_MUTATION)


def gradient_kind(kind: InputKind) -> OutputKind:
    """The kind of an output that is the new gradient of an input."""
    user = kind is InputKind.USER_INPUT
    return OutputKind.GRADIENT_TO_USER_INPUT if user else OutputKind.GRADIENT_TO_PARAMETER


class GraphOutputs:
    """The outputs of a graph, and what each is."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.specs: list[OutputSpec] = []

    def add(self, node: Any, kind: OutputKind, target: str | None = None) -> int:
        """One more output, a node or a plain value; its position."""
        argument: Any
        if not isinstance(node, Node):
            node = node if isinstance(node, (int, float, bool, str)) else None
            argument = ConstantArgument(name="", value=node)
        else:
            made = _ARGUMENTS.get(type(node.meta.get("val")), TensorArgument)
            argument = made(name=node.name)
        self.nodes.append(node)
        self.specs.append(OutputSpec(kind, argument, target))
        return len(self.nodes) - 1


def signature_of(inputs: Sequence[GraphInput], outputs: Sequence[OutputSpec]) -> ExportGraphSignature:
    """The signature of a graph that takes some inputs."""
    return ExportGraphSignature(list(map(_input_spec, inputs)), list(outputs))


def _input_spec(entry: GraphInput) -> InputSpec:
    if entry.is_tensor:
        return InputSpec(entry.kind, TensorArgument(name=entry.name), entry.target, entry.persistent)
    return InputSpec(entry.kind, ConstantArgument(name=entry.name, value=entry.constant), entry.target)
