"""What a call does with the results of its graph: write-backs, and outputs that alias as the original's do.

Invariant: an output is the caller's own tensor, or a view of it, exactly where the original returns that.
Limits: outputs that share a storage which neither an input nor a single output has are copied into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import (
    copy_into,
    make_room,
    tensor_at,
    view_at,
    with_layout,
    with_lazy_bits,
)
from functionalize.errors import DataDependentError
from functionalize.runtime.metadata import (
    AliasKind,
    InputMutation,
    InputRef,
    NewStorage,
    OldStorageRef,
    OutputAlias,
    ProgramMetadata,
)
from functionalize.runtime.symbol_bindings import SymbolBindings

aten = torch.ops.aten
_OF_INPUTS = frozenset({AliasKind.VIEW_OF_INPUT, AliasKind.VIEW_OF_OLD_STORAGE, AliasKind.VIEW_OF_NEW_STORAGE})


class WriteBack:
    """Does to the caller's tensors what the program did to its inputs."""

    def __init__(self, metadata: ProgramMetadata, inputs: Sequence[Any], symbols: SymbolBindings) -> None:
        self._metadata, self._inputs, self._symbols = metadata, inputs, symbols
        moves = any(mutation.metadata or mutation.layout is not None for mutation in metadata.mutations)
        # Tensors that keep the storages of inputs which are about to leave them, or have writes beyond themselves.
        self.originals: Mapping[int, torch.Tensor] = (
            {mutation.input: inputs[mutation.input].detach() for mutation in metadata.mutations} if moves else {}
        )

    def run(self, results: Sequence[Any]) -> None:
        """All write-backs, in the order of the inputs."""
        for mutation in self._metadata.mutations:
            with torch.set_grad_enabled(mutation.differentiable):
                self._run(mutation, results)

    def _run(self, mutation: InputMutation, results: Sequence[Any]) -> None:
        target = self._inputs[mutation.input]
        if mutation.layout is not None:
            layout, target = self._symbols.layout(mutation.layout), self.originals[mutation.input]
            make_room(target, layout)
            target = view_at(target, self._symbols.layout(self._metadata.layouts_before[mutation.input]), layout)
        for op, args in mutation.metadata:
            op(target, *map(self._argument, args))
        for write in mutation.writes:
            part = target
            for op, args in write.path:
                part = op(part, *map(self._argument, args))
            if results[write.result] is not part:  # else it was written in place
                aten.copy_.default(part, results[write.result])
        for op, args in mutation.after:
            op(target, *map(self._argument, args))

    def _argument(self, argument: Any) -> Any:
        """What a call has for an argument of an op on an input: tensors, sizes, lists of sizes."""
        if isinstance(argument, (list, tuple)):
            return [self._argument(item) for item in argument]
        if isinstance(argument, InputRef):
            return self._inputs[argument.number]
        if isinstance(argument, OldStorageRef):
            return self.originals[argument.number]
        if isinstance(argument, NewStorage):
            size = [self._symbols.number(number) for number in argument.size]
            return torch.empty(size, dtype=argument.dtype, device=argument.device)
        return self._symbols.number(argument)


def refuse_other_sizes(metadata: ProgramMetadata, results: Sequence[Any]) -> None:
    """Raise where the data gave a result another size than tracing took for granted (a broadcast asks for one)."""
    for alias in metadata.outputs:
        value = None if alias.result is None else results[alias.result]
        if value is None or not alias.layout.static or value.layout is not torch.strided:
            continue
        size = value.size()
        if size != alias.layout.size:
            raise DataDependentError(
                f"the data give a result of size {tuple(size)}, not {alias.layout.size}",
                why="a size that only the data tell was met with a number: tracing takes the two for equal, eager may "
                "broadcast",
                hint="say what is known of the size before (torch._check), or expand what has one element by itself",
            )


class OutputReconstructor:
    """Gives the tensors of one call that the caller gets, by their numbers."""

    def __init__(
        self,
        metadata: ProgramMetadata,
        inputs: Sequence[Any],
        results: Sequence[Any],
        bases: Sequence[Any],
        symbols: SymbolBindings,
        originals: Mapping[int, torch.Tensor],
    ) -> None:
        """``results``: of the graph; ``bases``: values of ``metadata.bases``; ``originals``: as in ``WriteBack``."""
        self._metadata, self._inputs, self._results, self._bases = metadata, inputs, results, bases
        self._symbols, self._originals = symbols, originals
        self._made: dict[int, torch.Tensor] = {}
        self._based: dict[int, torch.Tensor] = {}  # the bases that were used, laid out

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of a number: one object, however often it is asked for."""
        if number not in self._made:
            alias = self._metadata.outputs[number]
            unbased = alias.base is not None and self._bases[alias.base] is None
            if alias.kind is AliasKind.SHARED or unbased:
                self._make_shared(alias.group)
            else:
                self._made[number] = self._with_gradient(alias, self._tensor(alias))
        return self._made[number]

    def _with_gradient(self, alias: OutputAlias, made: torch.Tensor) -> torch.Tensor:
        """An output in its memory, with the gradient of the graph's result where it has that; a leaf as one."""
        if alias.leaf is not None:
            made = made.detach()
            return torch.nn.Parameter(made) if alias.leaf is torch.nn.Parameter else made.requires_grad_()
        if not alias.own_gradient or made is self._result(alias):
            return made
        known: torch.Tensor = _InMemory.apply(self._result(alias), made)  # type: ignore[no-untyped-call]
        return known

    def _tensor(self, alias: OutputAlias) -> torch.Tensor:
        if alias.kind is AliasKind.INPUT:
            return self._inputs[alias.input]  # type: ignore[index,no-any-return]
        if alias.kind in _OF_INPUTS:
            return self._of_input(alias)
        if alias.kind is AliasKind.VIEW_OF_BASE:
            return self._of_base(alias)
        return with_layout(self._result(alias), self._symbols.layout(alias.layout))

    def _result(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.result is not None
        result: torch.Tensor = self._results[alias.result]
        return result

    def _of_base(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.base is not None
        layout, base_layout = (self._symbols.layout(one.layout) for one in (alias, self._metadata.bases[alias.base]))
        if not (layout.static and base_layout.static):
            return self._result(alias)
        base = self._based.get(alias.base)
        if base is None:
            base = self._based[alias.base] = with_layout(self._bases[alias.base], base_layout)
        if alias.result is not None and alias.result == self._metadata.bases[alias.base].result:
            return base
        return view_at(_seen_by_autograd(base, alias), base_layout, layout)

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
            with torch.no_grad():
                copy_into(view_at(tensor, base, layout), self._result(alias))
        return view_at(_seen_by_autograd(tensor, alias), base, layout)

    def _make_shared(self, group: int | None) -> None:
        """Outputs that share a storage: copied to their places in one."""
        members = [(number, alias) for number, alias in enumerate(self._metadata.outputs) if alias.group == group]
        layouts = [self._symbols.layout(alias.layout) for _, alias in members]
        values = [self._result(alias) for _, alias in members]
        if not all(layout.static for layout in layouts):
            self._made |= {number: value for (number, _), value in zip(members, values, strict=True)}
            return
        capacity = self._symbols.number(members[0][1].capacity)
        room = capacity if type(capacity) is int else max(layout.span[1] for layout in layouts)
        whole = torch.empty(room, dtype=torch.uint8, device=values[0].device).untyped_storage()
        for (number, alias), layout, value in zip(members, layouts, values, strict=True):
            made = tensor_at(whole, (layout.size, layout.stride, layout.offset), layout.dtype)
            with torch.no_grad():
                copy_into(with_lazy_bits(made, layout), value)
            self._made[number] = self._with_gradient(alias, with_lazy_bits(made, layout))


class _InMemory(torch.autograd.Function):
    """A value that lies in memory which other tensors have; autograd knows it for a view that such a function made."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return memory

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _seen_by_autograd(tensor: torch.Tensor, alias: OutputAlias) -> torch.Tensor:
    """What an output is a view of: detached where the original's output has no gradient."""
    return tensor if alias.requires_grad or not tensor.requires_grad else tensor.detach()


def laid_out(values: Sequence[Any], layouts: Sequence[Layout | None], symbols: SymbolBindings) -> list[Any]:
    """Results with the strides that the program gave them; graphs without views, and compilers, choose others."""
    return [
        value if layout is None else with_layout(value, symbols.layout(layout))
        for value, layout in zip(values, layouts, strict=True)
    ]
