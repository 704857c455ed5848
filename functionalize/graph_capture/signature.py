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
# By the kind of an input: outputs that are written back to it, and its new gradient.
MUTATIONS = {
    InputKind.PARAMETER: OutputKind.PARAMETER_MUTATION,
    InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
    InputKind.CONSTANT_TENSOR: OutputKind.BUFFER_MUTATION,
    InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
}
GRADIENTS = dict.fromkeys(MUTATIONS, OutputKind.GRADIENT_TO_PARAMETER) | {
    InputKind.USER_INPUT: OutputKind.GRADIENT_TO_USER_INPUT
}


class GraphOutputs:
    """The outputs of a graph, and what each is."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.specs: list[OutputSpec] = []

    def add(self, node: Any, kind: OutputKind, target: str | None = None) -> int:
        """One more output, a node or a plain value; its position."""
        if isinstance(node, Node):
            argument = _ARGUMENTS.get(type(node.meta.get("val")), TensorArgument)(name=node.name)
        else:
            node = node if isinstance(node, (int, float, bool, str)) else None
            argument = ConstantArgument(name="", value=node)
        self.nodes.append(node)
        self.specs.append(OutputSpec(kind, argument, target))
        return len(self.nodes) - 1


def signature_of(inputs: Sequence[GraphInput], outputs: Sequence[OutputSpec]) -> ExportGraphSignature:
    """The signature of a graph that takes some inputs."""
    specs = []
    for entry in inputs:
        constant = ConstantArgument(name=entry.name, value=entry.constant)
        argument = TensorArgument(name=entry.name) if entry.is_tensor else constant
        specs.append(InputSpec(entry.kind, argument, entry.target, entry.persistent))
    return ExportGraphSignature(specs, list(outputs))
