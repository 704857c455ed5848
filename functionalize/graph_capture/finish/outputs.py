"""What the outputs of a captured graph are: for ``torch.export``, and for the caller.

The tensors that a caller gets are related to the program's inputs and to one another.

Invariant: an output shares memory where eager's does. Autograd takes it for a view of an input or of a base exactly
where only views lead there: all other gradients go through the captured backward. Limits: strided tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
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
from functionalize._torch.subclasses.wrappers import Wrapping
from functionalize._torch.tensors import autograd_base, creation_of, made_silently
from functionalize.aliasing import view_rules
from functionalize.aliasing.geometry import Layout, plain_layout, size_hint
from functionalize.aliasing.strided_layout import is_differentiable
from functionalize.graph_capture.finish.objects import ObjectGraph
from functionalize.graph_capture.inputs.inputs import TracedInput
from functionalize.graph_capture.inputs.wrappers import frozen_wrapping
from functionalize.refusals.gradients import VIEW_NO_LONGER_ACCEPTED
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
    """The outputs of a graph, with their specs."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.specs: list[OutputSpec] = []

    def add(self, node: Any, output_kind: OutputKind, target: str | None = None) -> int:
        """Add an output, a node or a plain value. Returns its position."""
        if isinstance(node, Node):
            argument = _ARGUMENTS.get(type(node.meta.get("val")), TensorArgument)(name=node.name)
        else:
            node = node if type(node) in (int, float, bool, str) else None  # the text of other values is not code
            argument = ConstantArgument(name="", value=node)
        self.nodes.append(node)
        self.specs.append(OutputSpec(output_kind, argument, target))
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
    """The layouts of inputs before the program ran and after it, by position; and the first input of each storage."""

    before: dict[int, Layout] = field(default_factory=dict)
    after: dict[int, Layout] = field(default_factory=dict)
    old_storages: dict[int, int] = field(default_factory=dict)  # a storage: the first input that had it
    storages: dict[int, int] = field(default_factory=dict)  # a storage: the first input that has it


_LEAF: dict[str, Any] = {"requires_grad": False, "own_gradient": False}  # how the graph returns it


class OutputAnalysis:
    """Finds the kind of each output."""

    def __init__(
        self, inputs: Sequence[TracedInput], layouts: InputLayouts, differentiable: bool, hooked: Sequence[Any]
    ) -> None:
        """``hooked``: functions of autograd and leaves whose gradients the program changes by hooks."""
        self._numbers = {id(entry.fake): number for number, entry in reversed(list(enumerate(inputs)))}
        self._inputs, self._layouts, self._differentiable = inputs, layouts, differentiable
        self._hooked = hooked
        self.bases: list[BaseResult] = []
        self.base_handles: list[torch.Tensor] = []

    def outputs(
        self, objects: ObjectGraph, results: Mapping[int, int], gradients: Mapping[int, int]
    ) -> list[OutputAlias]:
        """The alias of each handle.

        ``results``: the graph's outputs that have their values, ``gradients``: the handles that are their gradients;
        both by number.
        """
        handles, wrappers = objects.handles, objects.wrappers
        together: dict[int, list[int]] = defaultdict(list)
        for number, handle in enumerate(handles):
            if number in wrappers:
                continue
            key = storage_key(handle)
            if key not in self._layouts.storages and key not in self._layouts.old_storages:
                together[key].append(number)
        groups = {key: group for key, group in together.items() if len(group) > 1}
        bases = {key: self._base(handles, group, results) for key, group in groups.items()}
        names = {key: position for position, key in enumerate(groups)}
        aliases = []
        for number, handle in enumerate(handles):
            if number in wrappers:
                aliases.append(self._wrapper(handle, wrappers[number], gradients.get(number)))
                continue
            key, layout = storage_key(handle), frozen_layout(Layout.of(handle))
            alias = OutputAlias(
                AliasKind.RESULT,
                layout,
                handle.requires_grad and number not in objects.only_parts,
                results.get(number),
                inference=handle.is_inference(),
                creation=creation_of(handle),
                gradient=gradients.get(number),
            )
            if key in groups:
                alias = self._in_group(handle, alias, bases[key], names[key])
            else:
                alias_kind, source, own = self._alone(handle, key)
                alias = replace(alias, kind=alias_kind, input=source, own_gradient=own)
            if number in objects.only_parts:  # autograd follows the wrapper
                aliases.append(replace(alias, own_gradient=False))
                continue
            leaf = None if id(handle) in self._numbers else _leaf(handle)
            aliases.append(alias if leaf is None else self._silent(handle, alias) or replace(alias, **_LEAF, leaf=leaf))
        return aliases

    def _wrapper(self, handle: torch.Tensor, parts: tuple[int, ...], gradient: int | None) -> OutputAlias:
        """The alias of a wrapper: an input, or made of other outputs."""
        source, what = self._numbers.get(id(handle)), "a tensor that the program returns or keeps"
        alias = OutputAlias(
            AliasKind.WRAPPER if source is None else AliasKind.INPUT,
            plain_layout((), (), 0, handle.dtype),
            handle.requires_grad,
            input=source,
            gradient=gradient,
            wrapping=frozen_wrapping(handle, what) if source is None else Wrapping.of(handle).without_symbols(),
            parts=parts,
        )
        leaf = _leaf(handle) if source is None else None
        return alias if leaf is None else replace(alias, **_LEAF, leaf=leaf)

    def _silent(self, handle: torch.Tensor, alias: OutputAlias) -> OutputAlias | None:
        """An output that was made as a view with gradients off, and requires them as its base does; else None."""
        if not made_silently(alias.creation) or isinstance(handle, torch.nn.Parameter) or _accumulates(handle):
            return None
        silent, root = replace(alias, own_gradient=False, leaf=_itself), autograd_base(handle)
        if alias.kind is AliasKind.VIEW_OF_BASE and alias.base is not None:
            base, has_result = self.base_handles[alias.base], self.bases[alias.base].result is not None
            return silent if has_result and not _is_leaf(base) and autograd_base(base) is root else None
        if alias.kind is not AliasKind.VIEW_OF_INPUT:
            return None
        fakes = (entry.fake for entry in self._inputs if entry.fake is not None and entry.fake.requires_grad)
        seen = next((fake for fake in fakes if autograd_base(fake) is root), None)
        if seen is None or not is_differentiable(Layout.of(seen), alias.layout):
            return None
        return replace(silent, input=self._numbers[id(seen)])

    def _alone(self, handle: torch.Tensor, key: int) -> tuple[AliasKind, int | None, bool]:
        """The kind, the input and ``own_gradient`` of an output that shares memory with inputs at most."""
        itself, old, new = self._numbers.get(id(handle)), self._layouts.old_storages, self._layouts.storages
        if itself is not None:
            return AliasKind.INPUT, itself, False
        if key in old and key not in new:
            # The call has only detached tensors of that storage.
            return AliasKind.VIEW_OF_OLD_STORAGE, old[key], handle.requires_grad
        if key not in new:
            return AliasKind.RESULT, None, False
        alias_kind = AliasKind.VIEW_OF_INPUT if key in old else AliasKind.VIEW_OF_NEW_STORAGE
        sharing = [entry.fake for entry in self._inputs if entry.fake is not None and storage_key(entry.fake) == key]
        if not self._differentiable and handle.requires_grad:  # its memory is one input's, its history another's
            sharing.sort(key=lambda fake: not self._shows(handle, fake))
        through = next((fake for fake in sharing if not self._has_own_gradient(handle, fake)), None)
        return alias_kind, new[key] if through is None else self._numbers[id(through)], through is None

    def _has_own_gradient(self, handle: torch.Tensor, root: torch.Tensor) -> bool:
        """Whether the gradient of an output in another tensor's memory differs from that of a view of this tensor."""
        if not handle.requires_grad or handle is root:
            return False
        layouts = Layout.of(root), Layout.of(handle)
        if layouts[0].has_internal_overlap:
            return True  # the gradient of an expanded tensor has separate elements where the tensor shares one
        return not self._shows(handle, root)

    def _shows(self, handle: torch.Tensor, root: torch.Tensor) -> bool:
        """Whether autograd takes a tensor for a view of another, and for nothing else."""
        seen = is_differentiable(Layout.of(root), Layout.of(handle))
        return handle is root or (seen and _is_view_of(handle, root, self._hooked))

    def _in_group(self, handle: torch.Tensor, alias: OutputAlias, base: int | None, group: int) -> OutputAlias:
        if base is None:
            alias_kind, own = AliasKind.SHARED, handle.requires_grad
        else:
            alias_kind, own = AliasKind.VIEW_OF_BASE, self._has_own_gradient(handle, self.base_handles[base])
        capacity = frozen_number(handle.untyped_storage().nbytes())
        return replace(alias, kind=alias_kind, group=group, capacity=capacity, base=base, own_gradient=own)

    def _base(self, handles: Sequence[torch.Tensor], group: list[int], results: Mapping[int, int]) -> int | None:
        """The tensor that outputs of one storage are views of: one of them, or a base that autograd knows."""
        members = [handles[number] for number in group]
        differentiable = [handle for handle in members if handle.requires_grad and self._differentiable]
        roots = {id(root): root for root in map(autograd_base, differentiable or members)}
        root = max(
            roots.values(),
            key=lambda tensor: (not _has_lazy_bits(tensor), size_hint(tensor.numel()), tensor.requires_grad),
        )
        if (differentiable and len(roots) > 1) or _has_lazy_bits(root) or size_hint(root.numel()) == 0:
            return None  # a base without elements has no memory to share
        if storage_key(root) != storage_key(members[0]):
            return None  # `.data =` gave other memory to the view that they are views of
        itself = next((number for number in group if handles[number] is root), None)
        if itself is None and not differentiable:
            return None  # without gradients the outputs are copied into one storage
        if not all(_covers(root, handle) for handle in members):
            return None
        result = None if itself is None else results.get(itself)
        layout = frozen_layout(Layout.of(root))
        self.bases.append(BaseResult(layout, root.requires_grad, result))
        self.base_handles.append(root)
        return len(self.bases) - 1


def _leaf(handle: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes a leaf, a parameter or a buffer like one that the program made; None for any other tensor."""
    if not _is_leaf(handle):
        return None
    if isinstance(handle, torch.nn.Parameter):
        return partial(torch.nn.Parameter, requires_grad=handle.requires_grad)
    if isinstance(handle, torch.nn.Buffer) and not handle.requires_grad:
        return partial(torch.nn.Buffer, persistent=handle.persistent)
    return torch.Tensor.requires_grad_ if handle.requires_grad else None


def _accumulates(leaf: torch.Tensor) -> bool:
    """Whether gradients end in a leaf; not in a view that requires them only because its base does."""
    with torch.inference_mode(False), torch.enable_grad():
        view: Any = leaf.view_as(leaf)
    return view.grad_fn is not None and view.grad_fn.next_functions[0][0] is not None


def _itself(made: torch.Tensor) -> torch.Tensor:
    return made


@cache
def _backwards_of_views() -> frozenset[str]:
    """The names of autograd's functions of views, without the number at the end."""
    names = {op.overloadpacket.__name__ for op in view_rules.VIEW_RULES.keys() | view_rules.MULTI_OUTPUT_VIEWS}
    return frozenset(f"{name.title().replace('_', '')}Backward" for name in names)


def _is_view_of(tensor: torch.Tensor, root: torch.Tensor, hooked: Sequence[Any]) -> bool:
    """Whether autograd's path from a tensor to another leads through views alone, without hooks on it or at its end."""
    if not root.requires_grad:
        return False
    if _is_leaf(tensor) and tensor is not root:
        return False  # the view is older than its root's `requires_grad`: autograd has no path between them
    edge: Any = tuple(get_gradient_edge(tensor)[:2])
    end: Any = tuple(get_gradient_edge(root)[:2])
    while not any(
        edge[0] is hooked_part or getattr(edge[0], "variable", None) is hooked_part for hooked_part in hooked
    ):
        if edge == end:
            return True
        if edge[0] is None or edge[0].name().rstrip("0123456789") not in _backwards_of_views():
            return False
        edge = edge[0].next_functions[0]
    return False


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError as error:  # one of several views of one function, whose memory was written
        raise VIEW_NO_LONGER_ACCEPTED.error(reason=str(error).split(". ", maxsplit=1)[0]) from error


def _covers(root: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view can be made of a copy of its root: the root has all of its elements, each in separate memory."""
    base, layout = Layout.of(root), Layout.of(view)
    if base.matches(layout):
        return True
    if not (base.static and layout.static):
        return view is root or (base.contiguous and _is_whole(root))
    (first, last), (start, end) = base.span, layout.span
    return base.dense and (start == end or (first <= start and end <= last))


def _has_lazy_bits(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds other numbers than the tensor, which results of a graph never do."""
    return tensor.is_conj() or tensor.is_neg()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor fills its storage; for symbols as far as their expressions show."""
    return bool(frozen_number(tensor.numel() * tensor.itemsize) == frozen_number(tensor.untyped_storage().nbytes()))
