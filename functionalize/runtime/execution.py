"""One call of a program: compute by its graph, write back, give the outputs the aliasing of the original.

Captured programs and compiled Dynamo graphs run through here alike.

Invariant: a call computes by the graph alone; whatever is refused is refused before anything is written. An output is
the caller's own tensor, or a view of it, exactly where the original returns that.
Limits: outputs that share a storage which neither an input nor a single output has are copied into one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from functionalize._torch.dispatch import BelowVersions
from functionalize._torch.tensors import count_writes
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import (
    copy_into,
    make_room,
    tensor_at,
    view_at,
    with_layout,
    with_lazy_bits,
    with_own_bits,
)
from functionalize.errors import DataDependentError, UnsupportedMutationError
from functionalize.runtime.autograd import InMemory, Undifferentiable, differentiable_call
from functionalize.runtime.decisions import Diverged, check
from functionalize.runtime.joint import Orders, called
from functionalize.runtime.metadata import (
    AliasKind,
    BaseResult,
    InputMutation,
    InputRef,
    NewStorage,
    OutputAlias,
    ProgramMetadata,
)
from functionalize.runtime.objects import Maker
from functionalize.runtime.side_effects import Walked

aten = torch.ops.aten
Computed = tuple[Sequence[Any], Sequence[Any]]  # the results of a program's graph, and the values of its bases
_BACKWARD_INSIDE = (
    "a backward through a result of a captured program whose own backward() left gradients\n"
    "    why  that backward is a part of the graph, and what it needed of the forward is gone\n"
    "    try  capture the forward alone, and call backward() on its results"
)
_OF_INPUTS = frozenset({AliasKind.VIEW_OF_INPUT, AliasKind.VIEW_OF_OLD_STORAGE, AliasKind.VIEW_OF_NEW_STORAGE})


def compute(
    metadata: ProgramMetadata,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    positions: Sequence[int] | None = None,
) -> Computed:
    """What a graph gives, unseen by autograd; ``positions``: which of the program's results it gives, if not all."""
    _require_gradients(metadata, inputs)
    taken = [inputs[number] for number in metadata.taken]
    workspaces = torch.enable_grad() if metadata.graph.keeps_workspaces else contextlib.nullcontext()
    with BelowVersions(), workspaces, _told_of_sizes(metadata):
        results = called(function, taken)
    if positions is None:
        positions = range(metadata.graph.outputs)
    given = dict(zip(positions, results, strict=True))
    if torch.is_grad_enabled():
        reason = RuntimeError(_BACKWARD_INSIDE) if metadata.leaves_gradients else None
        given = _known_to_autograd(metadata, given, reason, inputs)
    return _computed(metadata, inputs, given, {})


def checked(metadata: ProgramMetadata, inputs: Sequence[Any], results: Sequence[Any]) -> Computed:
    """What a graph gave that gives all results.

    Raises:
        DataDependentError: the data gave one of them another size.
    """
    return _computed(metadata, inputs, dict(enumerate(results)), {})


def _require_gradients(metadata: ProgramMetadata, inputs: Sequence[Any]) -> None:
    """Have inputs require gradients of which the program says so."""
    for number, requires in metadata.requiring:
        if requires:
            inputs[number].requires_grad_()


def _require_none(tensor: torch.Tensor) -> None:
    """Have a tensor require gradients no more; a leaf may be a view, which nobody may detach in its place."""
    if tensor.is_leaf:
        tensor.requires_grad_(False)
    else:
        tensor.detach_()


def compute_differentiably(metadata: ProgramMetadata, orders: Orders, inputs: Sequence[Any]) -> Computed:
    """What a graph gives, with the captured backward as its derivative."""
    _require_gradients(metadata, inputs)
    with _told_of_sizes(metadata):
        outputs = differentiable_call(orders, [inputs[number] for number in metadata.taken])
    results = dict(zip(orders.first.joint.results, outputs, strict=False))
    further = dict(zip(orders.first.joint.bases, outputs[len(results) :], strict=True))
    return _computed(metadata, inputs, results, further)


def compute_undifferentiably(
    metadata: ProgramMetadata, function: Callable[..., Any], inputs: Sequence[Any], reason: Exception
) -> Computed:
    """What a graph gives; the reason why it has no backward is raised by those who ask for gradients.

    Raises:
        UnsupportedMutationError: the reason, where autograd must know of the writes to inputs, and cannot be told.
    """
    if isinstance(reason, UnsupportedMutationError) and any(m.differentiable for m in metadata.mutations):
        raise reason
    with torch.no_grad():
        results, _ = compute(metadata, function, inputs)
    return _computed(metadata, inputs, _known_to_autograd(metadata, dict(enumerate(results)), reason, inputs), {})


def _known_to_autograd(
    metadata: ProgramMetadata, given: dict[int, Any], reason: Exception | None, inputs: Sequence[Any]
) -> dict[int, Any]:
    """Results by position, those that require gradients as autograd knows them: a backward raises the reason why not.

    Without a reason they require gradients of leaves that the program made itself and kept: nobody gets any.
    """
    described: list[OutputAlias | BaseResult] = [*metadata.bases]
    described += [alias for alias in metadata.outputs if _of_its_own(alias, metadata.bases)]
    found = {one.result for one in described if one.requires_grad and one.result is not None}
    found |= {write.result for m in metadata.mutations if m.differentiable for write in m.writes}
    positions = sorted(position for position in found if given.get(position) is not None)
    if not positions:
        return given
    if reason is None:
        leaves = [torch.empty(0, requires_grad=True)]
    else:
        leaves = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    values = [given[position] for position in positions]
    with torch.enable_grad():
        known = Undifferentiable.apply(reason, len(values), *values, *leaves)  # type: ignore[no-untyped-call]
    return given | dict(zip(positions, known, strict=True))


def _of_its_own(alias: OutputAlias, bases: Sequence[BaseResult]) -> bool:
    """Whether an output has the gradient of its result: here no joint graph gives bases that are none."""
    unbased = alias.base is not None and bases[alias.base].result is None
    return alias.kind is AliasKind.RESULT or alias.own_gradient or unbased


def _computed(
    metadata: ProgramMetadata, inputs: Sequence[Any], given: dict[int, Any], further: dict[int, Any]
) -> Computed:
    """Results, by position, with the values of bases; ``further``: of bases that are no results.

    Raises where the data gave a size that tracing took for another (a broadcast asks for one).
    """
    results = [given.get(position) for position in range(metadata.graph.outputs)]
    if metadata.graph.decisions:
        check(metadata.graph.decisions, results)
    if metadata.symbols.asserted:
        _check_asserted(metadata, inputs, results)
    bases = [further.get(n) if base.result is None else results[base.result] for n, base in enumerate(metadata.bases)]
    return results, bases


def _check_asserted(metadata: ProgramMetadata, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Raise where the data gave sizes that operators of the program do not take."""
    bindings = metadata.symbols.bind(inputs, results)
    for condition in metadata.symbols.asserted:
        if not bindings.holds(condition):
            raise _sized_otherwise(f"the data give sizes ({bindings}) for which {condition} does not hold")


@contextlib.contextmanager
def _sizes_explained() -> Iterator[None]:
    try:
        yield
    except Diverged:
        raise
    except (RuntimeError, IndexError) as error:
        raise _sized_otherwise("the data give sizes that an operator of the graph does not take") from error


def _told_of_sizes(metadata: ProgramMetadata) -> AbstractContextManager[None]:
    """Have an operator that fails say that it may be for the sizes, of a program that took some for granted."""
    return _sizes_explained() if metadata.symbols.asserted else contextlib.nullcontext()


def _sized_otherwise(what: str) -> DataDependentError:
    return DataDependentError(
        what,
        why="an operator of the program takes only such sizes, or was captured for them alone: where a size "
        "that only the data tell met a number, tracing took the two for equal, and eager may broadcast",
        hint="say what is known of the size before (torch._check), or expand what has one element by itself",
    )


def finish(metadata: ProgramMetadata, inputs: Sequence[Any], states: Sequence[Walked], computed: Computed) -> list[Any]:
    """Write back, leave gradients and side effects, and give the leaves that the program returns.

    ``states``: the objects of the program's state, and those of the call's arguments.
    """
    ending = _Ending(metadata, inputs, computed)
    counted = dict.fromkeys(metadata.versions, 0)
    for mutation in metadata.mutations:
        with torch.enable_grad() if mutation.differentiable else BelowVersions():
            ending.write_back(mutation)
        if mutation.differentiable:
            counted[mutation.input] = len(mutation.writes) + len(mutation.metadata) + len(mutation.after)
    for number, count in metadata.versions.items():
        count_writes(inputs[number], count - counted[number])
    for number, gradient in metadata.gradients.items():
        inputs[number].grad = None if gradient is None else ending.tensor(gradient)
    for number, requires in metadata.requiring:
        if not requires:
            _require_none(inputs[number])
    maker = Maker(states, ending.tensor, computed[0], metadata.graph.numbers)
    for effect in metadata.side_effects:
        effect.apply(states, maker)
    for step in metadata.steps:
        step.apply(states, maker)
    return [maker.make(result) for result in metadata.results]


class _Ending:
    """What one call does with the results of its graph."""

    def __init__(self, metadata: ProgramMetadata, inputs: Sequence[Any], computed: Computed) -> None:
        self._metadata, self._inputs, (self._results, self._bases) = metadata, inputs, computed
        self._symbols = metadata.symbols.bind(inputs, self._results)
        # Tensors that keep the storages of inputs which are about to leave them, or have writes beyond themselves.
        self._originals: dict[int, torch.Tensor] = (
            {mutation.input: inputs[mutation.input].detach() for mutation in metadata.mutations}
            if metadata.moves_storages
            else {}
        )
        self._made: dict[int, torch.Tensor] = {}
        self._based: dict[int, torch.Tensor] = {}  # the bases that were used, laid out

    def write_back(self, mutation: InputMutation) -> None:
        """Do to the caller's tensor what the program did to its input."""
        target = self._inputs[mutation.input]
        if mutation.layout is not None:
            layout, target = self._symbols.layout(mutation.layout), self._originals[mutation.input]
            make_room(target, layout)
            target = view_at(target, self._symbols.layout(self._metadata.layouts_before[mutation.input]), layout)
        if mutation.detached:
            target.detach_()
        for op, args in mutation.metadata:
            given = list(map(self._argument, args))
            if op is aten.as_strided_.default:  # of memory that it was set to, and that the program has let grow
                size, stride, *offset = given
                now = Layout.of(target)
                make_room(target, replace(now, size=tuple(size), stride=tuple(stride), offset=(*offset, now.offset)[0]))
            op(target, *given)
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
            unbased = alias.base is not None and self._bases[alias.base] is None
            if alias.kind is AliasKind.SHARED or unbased:
                self._make_shared(alias.group)
            else:
                self._made[number] = self._with_gradient(alias, self._tensor(alias))
            if torch.is_inference_mode_enabled():
                self._made[number] = self._as_inference_tensor(alias, self._made[number])
            if alias.gradient is not None:
                self._made[number].grad = self.tensor(alias.gradient)
        return self._made[number]

    def _with_gradient(self, alias: OutputAlias, made: torch.Tensor) -> torch.Tensor:
        """An output in its memory, with the gradient of the graph's result where it has that; a leaf as one."""
        if alias.leaf is not None:
            return alias.leaf(made.detach())
        if not alias.own_gradient or made is self._result(alias):
            return made
        known: torch.Tensor = InMemory.apply(self._result(alias), made)  # type: ignore[no-untyped-call]
        return known

    def _as_inference_tensor(self, alias: OutputAlias, made: torch.Tensor) -> torch.Tensor:
        """An output that is an inference tensor where the program's is one, in the same memory, and none where not."""
        if alias.kind is AliasKind.INPUT or made.layout is not torch.strided:
            return made
        before = self._originals.get(alias.input, self._inputs[alias.input]) if alias.input is not None else None
        wanted = alias.inference or (before is not None and before.is_inference())
        if made.is_inference() == wanted:
            return made
        return _remade(made, wanted).requires_grad_(
            alias.requires_grad or (alias.leaf is not None and made.requires_grad)
        )

    def _tensor(self, alias: OutputAlias) -> torch.Tensor:
        if alias.kind is AliasKind.INPUT:
            return self._inputs[alias.input]  # type: ignore[index,no-any-return]
        if alias.kind in _OF_INPUTS:
            return self._of_input(alias)
        if alias.kind is AliasKind.VIEW_OF_BASE:
            return self._of_base(alias)
        layout = self._symbols.layout(alias.layout)
        return with_layout(with_own_bits(self._result(alias), layout), layout)

    def _result(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.result is not None
        result: torch.Tensor = self._results[alias.result]
        return result

    def _of_base(self, alias: OutputAlias) -> torch.Tensor:
        assert alias.base is not None
        described = self._metadata.bases[alias.base]
        layout, base_layout = (self._symbols.layout(one.layout) for one in (alias, described))
        if not (layout.static and base_layout.static):
            return self._result(alias)
        if alias.base not in self._based:
            self._based[alias.base] = with_layout(self._bases[alias.base], base_layout)
        base = self._based[alias.base]
        if alias.result is not None and alias.result == described.result:
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
            with BelowVersions():
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
            known = replace(alias, own_gradient=alias.requires_grad and value.requires_grad)
            self._made[number] = self._with_gradient(known, with_lazy_bits(made, layout))


def _seen_by_autograd(tensor: torch.Tensor, alias: OutputAlias) -> torch.Tensor:
    """What an output is a view of: detached where the original's output has no gradient."""
    return tensor if alias.requires_grad or not tensor.requires_grad else tensor.detach()


def _remade(tensor: torch.Tensor, inference: bool) -> torch.Tensor:
    """A tensor in the same place of the same memory that is an inference tensor, or none."""
    where = tensor.size(), tensor.stride(), tensor.storage_offset()
    with torch.inference_mode(inference):
        made = tensor_at(tensor.untyped_storage(), where, tensor.dtype)
        return with_lazy_bits(made, Layout.of(tensor))
