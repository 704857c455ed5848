"""How a call of a program ends: write back what its graph gave, give the outputs the aliasing of the original.

Captured programs and compiled Dynamo graphs run through here alike.

Invariant: nothing is refused from here on. An output is the caller's own tensor, or a view of it, exactly where the
original returns that.
Limits: outputs that share a storage which neither an input nor a single output has are copied into one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from functionalize.python_state.reconstruct import Maker
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
from functionalize.runtime.outputs.side_effects import Walked

aten = torch.ops.aten
_OF_INPUTS = frozenset({AliasKind.VIEW_OF_INPUT, AliasKind.VIEW_OF_OLD_STORAGE, AliasKind.VIEW_OF_NEW_STORAGE})


def finish(metadata: ProgramMetadata, inputs: Sequence[Any], states: Sequence[Walked], computed: Computed) -> list[Any]:
    """Write back, leave gradients and side effects, and give the leaves that the program returns.

    ``states``: the objects of the program's state, and those of the call's arguments.
    """
    ending = _Ending(metadata, inputs, computed)
    counted = Counter[int]()
    targets = list[torch.Tensor]()
    for mutation in metadata.mutations:
        with _write_mode(mutation):
            targets.append(ending.moved(mutation))
    ending.tell_autograd()
    for mutation, target in zip(metadata.mutations, targets, strict=True):
        with _write_mode(mutation):
            ending.write_back(mutation, target)
        if mutation.differentiable:
            root = metadata.inputs[mutation.input].root
            steps = len(mutation.writes) + len(mutation.metadata) + len(mutation.after)
            counted[mutation.input if root is None else root] += steps
    for number, count in metadata.versions.items():
        count_writes(inputs[number], count - counted[number])
    for number, gradient in metadata.gradients.items():
        leave_gradient(inputs[number], None if gradient is None else ending.tensor(gradient))
    for number, requires in metadata.requiring:
        if not requires:
            _require_none(inputs[number])
    maker = Maker(states, ending.tensor, computed.results, metadata.graph.numbers)
    metadata.left.apply(states, maker)
    return [maker.make(result) for result in metadata.results]


def _require_none(tensor: torch.Tensor) -> None:
    """Have a tensor require gradients no more; a leaf may be a view, which nobody may detach in its place."""
    if tensor.is_leaf:
        tensor.requires_grad_(False)
    else:
        tensor.detach_()


def _write_mode(mutation: InputMutation) -> AbstractContextManager[Any]:
    return torch.enable_grad() if mutation.differentiable else BelowVersions()


class _Ending:
    """What one call does with the results of its graph."""

    def __init__(self, metadata: ProgramMetadata, inputs: Sequence[Any], computed: Computed) -> None:
        self._metadata, self._inputs, self._computed = metadata, inputs, computed
        self._results = computed.results
        self._symbols = metadata.symbols.bind(inputs, self._results)
        # Tensors that keep the storages of inputs which are about to leave them, or have writes beyond themselves.
        self._originals: dict[int, torch.Tensor] = (
            {mutation.input: inputs[mutation.input].detach() for mutation in metadata.mutations}
            if metadata.moves_storages
            else {}
        )
        self._made: dict[int, torch.Tensor] = {}
        self._based: dict[int, torch.Tensor] = {}  # the bases that were used, laid out

    def moved(self, mutation: InputMutation) -> torch.Tensor:
        """Have the caller's tensor get the metadata that the program gave to its input; what is then written to."""
        target: torch.Tensor = self._inputs[mutation.input]
        if mutation.layout is not None:
            layout, target = self._symbols.layout(mutation.layout), self._originals[mutation.input]
            make_room(target, layout)
            target = view_at(target, self._symbols.layout(self._metadata.layouts_before[mutation.input]), layout)
        if mutation.detached:
            target.detach_()
        for op, args in mutation.metadata:
            given = list(map(self._argument, args))
            if op is aten.set_.source_Tensor and given[0].dtype != target.dtype:  # of its size, that would be more
                given[0] = given[0].detach().as_strided((0,), (1,), 0)
            if op is aten.as_strided_.default:  # of memory that it was set to, and that the program has let grow
                size, stride, *offset = given
                now = Layout.of(target)
                make_room(target, replace(now, size=tuple(size), stride=tuple(stride), offset=(*offset, now.offset)[0]))
            op(target, *given)
        return target

    def tell_autograd(self) -> None:
        """Have the results require gradients as those of the program do."""
        self._results = self._computed.told()

    def write_back(self, mutation: InputMutation, target: torch.Tensor) -> None:
        """Do to the caller's tensor what the program wrote to its input."""
        for write in mutation.writes:
            part = target
            for op, args in write.path:
                part = op(part, *map(self._argument, args))
            if self._results[write.result] is not part:  # else it was written in place
                aten.copy_.default(part, self._results[write.result])
        for op, args in mutation.after:
            op(target, *map(self._argument, args))
        if mutation.inference and not target.is_inference():
            target.data = _remade(target, inference=True)

    def _argument(self, argument: Any) -> Any:
        """What a call has for an argument of an op on an input: tensors, sizes, lists of sizes."""
        if isinstance(argument, (list, tuple)):
            return [self._argument(item) for item in argument]
        if isinstance(argument, InputRef):
            return (self._originals if argument.old else self._inputs)[argument.number]
        if isinstance(argument, NewStorage):
            size = [self._symbols.number(number) for number in argument.size]
            return torch.empty(size, dtype=argument.dtype, device=argument.device)
        return self._symbols.number(argument)

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of a number that the caller gets: one object, however often it is asked for."""
        if number not in self._made:
            alias = self._metadata.outputs[number]
            unbased = alias.base is not None and self._base(alias.base) is None
            if alias.kind is AliasKind.SHARED or unbased:
                made = self._shared(alias.group)
            else:
                off = alias.requires_grad and not torch.is_grad_enabled()  # where the program had them on
                with torch.enable_grad() if off else nullcontext():
                    made = {number: self._with_gradient(alias, self._tensor(alias))}
            self._made |= {one: self._as_in_mode(self._metadata.outputs[one], tensor) for one, tensor in made.items()}
            for one in made:
                gradient = self._metadata.outputs[one].gradient
                if gradient is not None:
                    leave_gradient(self._made[one], self.tensor(gradient))
        return self._made[number]

    def _with_gradient(self, alias: OutputAlias, made: torch.Tensor) -> torch.Tensor:
        """An output in its memory, with the gradient of the graph's result where it has that; a leaf as one."""
        if alias.leaf is not None:
            value = self._as_in_mode(alias, made if alias.requires_grad else made.detach())
            with torch.inference_mode() if value.is_inference() else nullcontext():
                return alias.leaf(value)
        if not alias.own_gradient or made is self._result(alias):
            return made
        known: torch.Tensor = InMemory.apply(self._result(alias), made)  # type: ignore[no-untyped-call]
        return with_strides(known, made.stride())  # autograd has made a view

    def _as_in_mode(self, alias: OutputAlias, made: torch.Tensor) -> torch.Tensor:
        """An inference tensor where the program's is one, in the same memory, and none where not."""
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
            return self._inputs[alias.input]  # type: ignore[index,no-any-return]
        if alias.kind in _OF_INPUTS:
            return self._of_input(alias)
        if alias.kind is AliasKind.VIEW_OF_BASE:
            return self._of_base(alias)
        layout = self._symbols.layout(alias.layout)
        return self._laid_out(with_own_bits(self._result(alias), layout), layout)

    def _laid_out(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        made = with_layout(value, layout)
        return with_strides(made, layout.stride) if self._metadata.graph.lays_out_ones and layout.static else made

    def _result(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.result is not None
        result: torch.Tensor = self._results[alias.result]
        return result

    def _base(self, number: int) -> Any:
        """The value of a base; None where the graph that was run does not give it."""
        described = self._metadata.bases[number]
        return self._computed.further.get(number) if described.result is None else self._results[described.result]

    def _of_base(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.base is not None
        described = self._metadata.bases[alias.base]
        layout, base_layout = (self._symbols.layout(one.layout) for one in (alias, described))
        if not (layout.static and base_layout.static):
            return self._result(alias)
        if alias.base not in self._based:
            self._based[alias.base] = self._laid_out(self._base(alias.base), base_layout)
        base = self._based[alias.base]
        if alias.result is not None and alias.result == described.result:
            return base
        return _view_at(base, alias, base_layout, layout)

    def _of_input(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.input is not None
        tensor, base = self._inputs[alias.input], self._metadata.layouts_after[alias.input]
        if alias.kind is AliasKind.VIEW_OF_OLD_STORAGE:
            tensor, base = self._originals[alias.input], self._metadata.layouts_before[alias.input]
        layout, base = self._symbols.layout(alias.layout), self._symbols.layout(base)
        if not (layout.static and base.static):
            return self._result(alias)
        if alias.kind is AliasKind.VIEW_OF_NEW_STORAGE:
            make_room(tensor, layout)
            with BelowVersions():
                copy_into(view_at(tensor, base, layout), self._result(alias))
        return _view_at(tensor, alias, base, layout)

    def _shared(self, group: int | None) -> dict[int, torch.Tensor]:
        """Outputs that share a storage, by number: copied to their places in one."""
        members = [(number, alias) for number, alias in enumerate(self._metadata.outputs) if alias.group == group]
        layouts = [self._symbols.layout(alias.layout) for _, alias in members]
        values = [self._result(alias) for _, alias in members]
        if not all(layout.static for layout in layouts):
            return {number: value for (number, _), value in zip(members, values, strict=True)}
        capacity = self._symbols.number(members[0][1].capacity)
        room = capacity if type(capacity) is int else max(layout.span[1] for layout in layouts)
        whole = torch.empty(room, dtype=torch.uint8, device=values[0].device).untyped_storage()
        found = {}
        for (number, alias), layout, value in zip(members, layouts, values, strict=True):
            made = tensor_at(whole, layout)
            with torch.no_grad():
                copy_into(with_lazy_bits(made, layout), value)
            known = replace(alias, own_gradient=alias.requires_grad and value.requires_grad)
            found[number] = self._with_gradient(known, with_lazy_bits(made, layout))
        return found


def _view_at(tensor: torch.Tensor, alias: OutputAlias, base: Layout, layout: Layout) -> torch.Tensor:
    """An output that is a view of a tensor: of a detached one where the original's output has no gradient."""
    seen = tensor if alias.requires_grad or not tensor.requires_grad else tensor.detach()
    if alias.creation is None:
        return view_at(seen, base, layout)
    with created_as(alias.creation):
        made = view_at(seen, base, layout)
    set_creation(made, alias.creation)
    return made


def _remade(tensor: torch.Tensor, inference: bool) -> torch.Tensor:
    """A tensor in the same place of the same memory that is an inference tensor, or none."""
    layout = Layout.of(tensor)
    with torch.inference_mode(inference):
        return with_lazy_bits(tensor_at(tensor.untyped_storage(), layout), layout)
