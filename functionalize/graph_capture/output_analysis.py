"""What the outputs of a captured graph are: in the words of ``torch.export``, and to the caller.

The tensors that a caller gets are related to the program's inputs and to one another.

Invariant: an output is described as a view where eager returns a view, and gradients flow through it as in eager.
Limits: strided tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

from functionalize._torch import storage_key
from functionalize._torch.tensors import autograd_base
from functionalize.aliasing.geometry import Layout, hint
from functionalize.aliasing.strided_layout import is_differentiable
from functionalize.graph_capture.inputs import TracedInput
from functionalize.runtime.metadata import AliasKind, BaseResult, GraphInput, OutputAlias, frozen_layout, frozen_number

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


@dataclass
class InputLayouts:
    """Where the inputs lay before the program ran and where they lie now, by position; and who has which storage."""

    before: dict[int, Layout] = field(default_factory=dict)
    after: dict[int, Layout] = field(default_factory=dict)
    old_storages: dict[int, int] = field(default_factory=dict)  # a storage: the first input that had it
    storages: dict[int, int] = field(default_factory=dict)  # a storage: the first input that has it


class OutputAnalysis:
    """Finds the kind of each output."""

    def __init__(self, inputs: Sequence[TracedInput], layouts: InputLayouts, differentiable: bool) -> None:
        self._numbers = {id(entry.fake): number for number, entry in reversed(list(enumerate(inputs)))}
        self._inputs, self._layouts, self._differentiable = inputs, layouts, differentiable
        self.bases: list[BaseResult] = []
        self.base_handles: list[torch.Tensor] = []

    def outputs(self, handles: Sequence[torch.Tensor], results: Mapping[int, int]) -> list[OutputAlias]:
        """What each of some handles is; ``results`` are the graph's outputs that have their values, by number."""
        together: dict[int, list[int]] = defaultdict(list)
        for number, handle in enumerate(handles):
            key = storage_key(handle)
            if key not in self._layouts.storages and key not in self._layouts.old_storages:
                together[key].append(number)
        groups = {key: group for key, group in together.items() if len(group) > 1}
        bases = {key: self._base(handles, group, results) for key, group in groups.items()}
        names = {key: position for position, key in enumerate(groups)}
        found = []
        for number, handle in enumerate(handles):
            key, layout = storage_key(handle), frozen_layout(Layout.of(handle))
            alias = OutputAlias(AliasKind.RESULT, layout, handle.requires_grad, results.get(number))
            if key in groups:
                found.append(self._in_group(handle, alias, bases[key], names[key]))
            else:
                kind, source = self._alone(handle, key)
                found.append(replace(alias, kind=kind, input=source))
        return found

    def _alone(self, handle: torch.Tensor, key: int) -> tuple[AliasKind, int | None]:
        """The kind of an output that shares its storage with inputs at most, and which input it is of."""
        itself, old, new = self._numbers.get(id(handle)), self._layouts.old_storages, self._layouts.storages
        if itself is not None:
            return AliasKind.INPUT, itself
        if key in old and key not in new:
            return AliasKind.VIEW_OF_OLD_STORAGE, old[key]
        source = new.get(key)
        if source is None or self._reads_otherwise(handle, self._layouts.after[source]):
            return AliasKind.RESULT, None
        return AliasKind.VIEW_OF_INPUT if key in old else AliasKind.VIEW_OF_NEW_STORAGE, source

    def _reads_otherwise(self, handle: torch.Tensor, layout: Layout) -> bool:
        """Whether a view of another dtype, which is made outside of autograd's sight, would lose its gradient."""
        return self._differentiable and handle.requires_grad and not is_differentiable(layout, Layout.of(handle))

    def _in_group(self, handle: torch.Tensor, alias: OutputAlias, base: int | None, group: int) -> OutputAlias:
        capacity = frozen_number(handle.untyped_storage().nbytes())
        if base is not None and not self._reads_otherwise(handle, Layout.of(self.base_handles[base])):
            return replace(alias, kind=AliasKind.VIEW_OF_BASE, group=group, capacity=capacity, base=base)
        if self._differentiable and handle.requires_grad:
            return alias
        return replace(alias, kind=AliasKind.SHARED, group=group, capacity=capacity)

    def _base(self, handles: Sequence[torch.Tensor], group: list[int], results: Mapping[int, int]) -> int | None:
        """The tensor that outputs of one storage are views of: one of them, or one that autograd knows."""
        members = [handles[number] for number in group]
        known = [handle for handle in members if handle.requires_grad and self._differentiable]
        roots = {id(root): root for root in map(autograd_base, known or members)}
        root = max(roots.values(), key=lambda tensor: hint(tensor.numel()))
        if known and len(roots) > 1:
            return None
        itself = next((number for number in group if handles[number] is root), None)
        if itself is None and not known:
            return None  # without gradients the outputs are copied into one storage
        if not all(_covers(root, handle) for handle in members):
            return None
        result = None if itself is None else results.get(itself)
        layout = frozen_layout(Layout.of(root))
        self.bases.append(BaseResult(layout, root.requires_grad, result))
        self.base_handles.append(root)
        return len(self.bases) - 1


def _covers(root: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view can be made of a copy of its root: the root has all of its elements, each at its own place."""
    base, layout = Layout.of(root), Layout.of(view)
    if base.key == layout.key:
        return True
    if not (base.static and layout.static):
        return base.contiguous or view is root
    (first, last), (start, end) = base.span, layout.span
    return base.dense and (start == end or (first <= start and end <= last))
