"""Ends a call of a program: writes back the results of its graph, and gives outputs the aliasing of the original.

Captured programs and compiled Dynamo graphs both end here.

Invariant: nothing is refused from here on. An output is the caller's own tensor, or a view of it, exactly where the
original returns that.
Limits: if outputs share a storage that no input has and no single output covers, they are copied into a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from operator import is_
from typing import Any

import torch

from functionalize._torch.autograd import leave_gradient
from functionalize._torch.dispatch import BelowVersions
from functionalize._torch.tensors import count_writes, created_as, set_creation
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import (
    copy_into,
    make_room,
    tensor_at,
    view_at,
    with_layout,
    with_lazy_bits,
    with_own_bits,
    with_strides,
)
from functionalize.python_state.reconstruct import Maker, TensorRef, Walked
from functionalize.runtime.autograd.function import InMemory
from functionalize.runtime.calls.computation import Computed
from functionalize.runtime.metadata import (
    AliasKind,
    InputMutation,
    InputRef,
    NewStorage,
    OutputAlias,
    ProgramMetadata,
)

aten = torch.ops.aten
_OF_INPUTS = (AliasKind.VIEW_OF_INPUT, AliasKind.VIEW_OF_OLD_STORAGE, AliasKind.VIEW_OF_NEW_STORAGE)
# From a call's inputs, the walks over the program's state and over its arguments, and the results of the graph, to the
# leaves of what the program returns.
Finish = Callable[[Sequence[Any], Sequence[Walked], Computed], list[Any]]


def finishing(metadata: ProgramMetadata) -> Finish:
    """A function that ends calls: it writes back, leaves gradients and side effects, and gives the returned leaves.

    It has only the stages that the program needs.
    """
    needed = {
        CallFinalizer.write_back: metadata.mutations,
        CallFinalizer.count_versions: metadata.versions,
        CallFinalizer.leave_gradients: metadata.gradients,
        CallFinalizer.end_gradients: metadata.requiring,
        CallFinalizer.leave_in_objects: metadata.left,
    }
    stages = [stage for stage, described in needed.items() if described]
    moved = [number for number, mutation in enumerate(metadata.mutations) if _is_moved(mutation)]

    def finish(inputs: Sequence[Any], states: Sequence[Walked], computed: Computed) -> list[Any]:
        finalizer = CallFinalizer(metadata, inputs, states, computed)
        if moved:
            finalizer.move_inputs(moved)
        if computed.refusals:
            finalizer.results = computed.with_autograd()
        for stage in stages:
            stage(finalizer)
        return finalizer.leaves()

    return finish


def _is_moved(mutation: InputMutation) -> bool:
    """Whether an input gets new metadata or loses its history, or memory of its storage outside it is written."""
    return bool(mutation.metadata) or mutation.layout is not None or mutation.detached


def _write_mode(mutation: InputMutation) -> AbstractContextManager[Any]:
    return torch.enable_grad() if mutation.differentiable else BelowVersions()


class CallFinalizer:
    """The end of one call, from the results of its graph."""

    def __init__(
        self, metadata: ProgramMetadata, inputs: Sequence[Any], states: Sequence[Walked], computed: Computed
    ) -> None:
        self._metadata, self._inputs, self._states, self._computed = metadata, inputs, states, computed
        self.results = computed.results
        self._symbols = metadata.symbols.bind(inputs, self.results)
        self._targets: dict[int, torch.Tensor] = {}  # by mutation: the tensor that it writes to, if not its input
        # Tensors that keep the storages of inputs that get other storages, or whose storages are written outside them.
        self._originals: dict[int, torch.Tensor] = (
            {mutation.input: inputs[mutation.input].detach() for mutation in metadata.mutations}
            if metadata.moves_storages
            else {}
        )
        self._made: dict[int, torch.Tensor] = {}
        self._based: dict[int, torch.Tensor] = {}  # the bases in use, with their layouts

    def move_inputs(self, moved: Sequence[int]) -> None:
        """Give the caller's tensors the metadata that the program gave its inputs; ``moved``: numbers of mutations."""
        for number in moved:
            mutation = self._metadata.mutations[number]
            with _write_mode(mutation):
                self._targets[number] = self._moved(mutation)

    def _moved(self, mutation: InputMutation) -> torch.Tensor:
        target: torch.Tensor = self._inputs[mutation.input]
        if mutation.layout is not None:
            layout, target = self._symbols.layout(mutation.layout), self._originals[mutation.input]
            make_room(target, layout)
            target = view_at(target, self._symbols.layout(self._metadata.layouts_before[mutation.input]), layout)
        if mutation.detached:
            target.detach_()
        for op, args in mutation.metadata:
            values = list(map(self._argument, args))
            # With the target's dtype, the same size may need more memory.
            if op is aten.set_.source_Tensor and values[0].dtype != target.dtype:
                values[0] = values[0].detach().as_strided((0,), (1,), 0)
            if op is aten.as_strided_.default:  # the program has grown the storage that it was set to
                size, stride, *offset = values
                now = Layout.of(target)
                make_room(target, replace(now, size=tuple(size), stride=tuple(stride), offset=(*offset, now.offset)[0]))
            op(target, *values)
        return target

    def write_back(self) -> None:
        """Write to the caller's tensors what the program wrote to its inputs."""
        for number, mutation in enumerate(self._metadata.mutations):
            target: torch.Tensor = self._targets.get(number, self._inputs[mutation.input])
            with _write_mode(mutation):
                for write in mutation.writes:
                    part = target
                    for op, args in write.path:
                        part = op(part, *map(self._argument, args))
                    if self.results[write.result] is not part:  # else it was written in place
                        aten.copy_.default(part, self.results[write.result])
                for op, args in mutation.after:
                    op(target, *map(self._argument, args))
                if mutation.inference and not target.is_inference():
                    target.data = _remade(target, inference=True)

    def count_versions(self) -> None:
        """Grow the versions of inputs as the program's own writes grow them."""
        for number, count in self._metadata.uncounted_writes.items():
            count_writes(self._inputs[number], count)

    def leave_gradients(self) -> None:
        """Give inputs the gradients that the program gives them."""
        for number, gradient in self._metadata.gradients.items():
            leave_gradient(self._inputs[number], None if gradient is None else self.tensor(gradient))

    def end_gradients(self) -> None:
        """Stop inputs from requiring gradients; a leaf may be a view, which cannot be detached in place."""
        for number, requires in self._metadata.requiring:
            tensor = self._inputs[number]
            if not requires and tensor.is_leaf:
                tensor.requires_grad_(False)
            elif not requires:
                tensor.detach_()

    def leave_in_objects(self) -> None:
        """Change objects, and print, as the program does."""
        self._metadata.left.apply(self._states, self._maker)

    def leaves(self) -> list[Any]:
        """The leaves of what the program returns."""
        parts = self._metadata.results
        return [self.tensor(part.number) if type(part) is TensorRef else self._maker.make(part) for part in parts]

    @cached_property
    def _maker(self) -> Maker:
        return Maker(self._states, self.tensor, self._computed.results, self._metadata.graph.numbers)

    def _argument(self, argument: Any) -> Any:
        """The value in this call of an argument of an op on an input: tensors, sizes, lists of sizes."""
        if isinstance(argument, (list, tuple)):
            return [self._argument(item) for item in argument]
        if isinstance(argument, InputRef):
            return (self._originals if argument.old else self._inputs)[argument.number]
        if isinstance(argument, NewStorage):
            size = [self._symbols.number(number) for number in argument.size]
            return torch.empty(size, dtype=argument.dtype, device=argument.device)
        return self._symbols.number(argument)

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of a number that the caller gets: the same object each time."""
        if number not in self._made:
            alias = self._metadata.outputs[number]
            if alias.kind is AliasKind.SHARED or (alias.base is not None and self._base(alias.base) is None):
                made = self._shared(alias.group)
            else:
                off = alias.requires_grad and not torch.is_grad_enabled()  # the program had gradients on
                with torch.enable_grad() if off else nullcontext():
                    made = {number: self._tensor(alias) if alias.wrapping is None else self._wrapper(number, alias)}
            self._made |= made
            for member in made:
                gradient = self._metadata.outputs[member].gradient
                if gradient is not None:
                    leave_gradient(self._made[member], self.tensor(gradient))
        return self._made[number]

    def _finished(self, alias: OutputAlias, made: torch.Tensor) -> torch.Tensor:
        """An output in its memory: with the gradient of the graph's result if it has that, and a leaf if it is one."""
        if alias.leaf is not None:
            value = self._as_in_mode(alias, made if alias.requires_grad else made.detach())
            with torch.inference_mode() if value.is_inference() else nullcontext():
                made = alias.leaf(value)
        elif alias.own_gradient and made is not self._result(alias):
            attached: torch.Tensor = InMemory.apply(self._result(alias), made)  # type: ignore[no-untyped-call]
            made = with_strides(attached, made.stride())  # autograd has made a view
        return self._as_in_mode(alias, made)

    def _as_in_mode(self, alias: OutputAlias, made: torch.Tensor) -> torch.Tensor:
        """A tensor in the same memory that is an inference tensor exactly if the program's is one."""
        mode, wanted = torch.is_inference_mode_enabled(), alias.inference
        if not (mode or wanted) or alias.kind is AliasKind.INPUT or made.layout is not torch.strided:
            return made
        if alias.input is not None:
            wanted = wanted or self._originals.get(alias.input, self._inputs[alias.input]).is_inference()
        elif wanted is None:
            wanted = mode
        return made if made.is_inference() == wanted else _remade(made, wanted).requires_grad_(alias.requires_grad)

    def _tensor(self, alias: OutputAlias) -> torch.Tensor:
        if alias.kind is AliasKind.INPUT:
            made: torch.Tensor = self._inputs[alias.input]  # type: ignore[index]
        elif alias.kind in _OF_INPUTS:
            made = self._of_input(alias)
        elif alias.kind is AliasKind.VIEW_OF_BASE:
            made = self._of_base(alias)
        else:
            layout = self._layout(alias.layout)
            made = self._with_layout(with_own_bits(self._result(alias), layout), layout)
        finished = alias.leaf is None and not (alias.own_gradient or alias.inference)
        return made if finished and not torch.is_inference_mode_enabled() else self._finished(alias, made)

    def _wrapper(self, number: int, alias: OutputAlias) -> torch.Tensor:
        """An output that is a wrapper, of the parts that other outputs are."""
        if alias.kind is AliasKind.INPUT:
            return self._inputs[alias.input]  # type: ignore[index,no-any-return]
        assert alias.wrapping is not None
        recorded, parts = self._computed.wrappers.get(number), list(map(self.tensor, alias.parts))
        if recorded is not None and all(map(is_, alias.wrapping.parts_of(recorded), parts)):
            return recorded
        made = alias.wrapping.wrapped(parts)
        if recorded is not None:
            made = InMemory.apply(recorded, made)  # type: ignore[no-untyped-call]
        elif alias.is_recorded and self._computed.refused_wrapper is not None:
            (made,) = self._computed.refused_wrapper.attached([made])
        return made if alias.leaf is None else alias.leaf(made)

    def _layout(self, layout: Layout) -> Layout:
        """A layout in this call."""
        return layout if layout.static else self._symbols.layout(layout)

    def _with_layout(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        if value.layout is torch.strided and value.stride() == layout.stride:
            return value
        made = with_layout(value, layout)
        return with_strides(made, layout.stride) if self._metadata.graph.lays_out_ones and layout.static else made

    def _result(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.result is not None
        result: torch.Tensor = self.results[alias.result]
        return result

    def _base(self, number: int) -> Any:
        """The value of a base; None if the graph that ran does not compute it."""
        described = self._metadata.bases[number]
        return self._computed.bases.get(number) if described.result is None else self.results[described.result]

    def _of_base(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.base is not None
        described = self._metadata.bases[alias.base]
        layout, base_layout = map(self._layout, (alias.layout, described.layout))
        if not (layout.static and base_layout.static):
            return self._result(alias)
        if alias.base not in self._based:
            self._based[alias.base] = self._with_layout(self._base(alias.base), base_layout)
        base = self._based[alias.base]
        if alias.result is not None and alias.result == described.result:
            return base
        return _view_at(base, alias, base_layout, layout)

    def _of_input(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.input is not None
        tensor, base = self._inputs[alias.input], self._metadata.layouts_after[alias.input]
        if alias.kind is AliasKind.VIEW_OF_OLD_STORAGE:
            tensor, base = self._originals[alias.input], self._metadata.layouts_before[alias.input]
        layout, base = self._layout(alias.layout), self._layout(base)
        if not (layout.static and base.static):
            return self._result(alias)
        if alias.kind is AliasKind.VIEW_OF_NEW_STORAGE:
            make_room(tensor, layout)
            with BelowVersions():
                copy_into(view_at(tensor, base, layout), self._result(alias))
        return _view_at(tensor, alias, base, layout)

    def _shared(self, group: int | None) -> dict[int, torch.Tensor]:
        """The outputs of a group, by number, copied to their places in one storage."""
        members = [(number, alias) for number, alias in enumerate(self._metadata.outputs) if alias.group == group]
        layouts = [self._layout(alias.layout) for _, alias in members]
        values = [self._result(alias) for _, alias in members]
        if not all(layout.static for layout in layouts):
            return {n: self._as_in_mode(alias, value) for (n, alias), value in zip(members, values, strict=True)}
        capacity = self._symbols.number(members[0][1].capacity)
        room = capacity if type(capacity) is int else max(layout.span[1] for layout in layouts)
        whole = torch.empty(room, dtype=torch.uint8, device=values[0].device).untyped_storage()
        shared = {}
        for (number, alias), layout, value in zip(members, layouts, values, strict=True):
            made = tensor_at(whole, layout)
            with torch.no_grad():
                copy_into(with_lazy_bits(made, layout), value)
            attached = replace(alias, own_gradient=alias.requires_grad and value.requires_grad)
            shared[number] = self._finished(attached, with_lazy_bits(made, layout))
        return shared


def _view_at(tensor: torch.Tensor, alias: OutputAlias, base: Layout, layout: Layout) -> torch.Tensor:
    """An output that is a view of a tensor, which is detached first if the original's output has no gradient."""
    seen = tensor if alias.requires_grad or not tensor.requires_grad else tensor.detach()
    if alias.creation is None:
        return view_at(seen, base, layout)
    with created_as(alias.creation):
        made = view_at(seen, base, layout)
    set_creation(made, alias.creation)
    return made


def _remade(tensor: torch.Tensor, inference: bool) -> torch.Tensor:
    """A tensor with the same memory and layout that is an inference tensor, or a normal one."""
    layout = Layout.of(tensor)
    with torch.inference_mode(inference):
        return with_lazy_bits(tensor_at(tensor.untyped_storage(), layout), layout)
