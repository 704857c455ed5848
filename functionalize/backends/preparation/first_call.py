"""Programs whose first call makes what later calls find: the state of an optimizer, a setting that is left open.

Such a program is captured once more as the first call leaves its objects, on substitutes for the tensors that it makes;
afterwards all objects are as they were.

Invariant: nothing is computed. Limits: one call settles the objects; arguments of plain containers, which share no
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize.aliasing.geometry import Layout
from functionalize.backends.preparation.example_call import concrete
from functionalize.python_state.containers import assign, copy_of
from functionalize.python_state.reconstruct import Maker, tensors_in
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.capturing import CAPTURING
from functionalize.runtime.guards.tensors import REQUIRES_GRAD
from functionalize.runtime.metadata import AliasKind


@dataclass(frozen=True, eq=False)
class Settled:
    """A program as it is from the second call on."""

    later: Specialization
    made: Mapping[int, int]  # of its inputs: the output of the first call that the first call leaves there


def settled(first: Specialization) -> Settled | None:
    """The program that later calls run; None where one call does not tell it."""
    metadata, convention = first.metadata, first.capture.convention
    states_of_arguments = any(effect.state for effect in metadata.side_effects)
    if convention.nest is None or metadata.graph.numbers or states_of_arguments or not first.guards.inputs_are_disjoint:
        return None
    fakes = iter(_of_arguments(first))
    args, kwargs = convention.nest.filled(lambda: _like(*next(fakes)))
    changed = [effect.container_in([first.capture.state]) for effect in metadata.side_effects]
    with CAPTURING:
        before = [(container, copy_of(container)) for container in changed]
        try:
            made = _apply(first, convention.arguments(args, kwargs))
            if made is None or any(metadata.outputs[number].kind is AliasKind.INPUT for number in made):
                return None  # an argument, which is another one in each call
            later = first.again(args, kwargs)
            if later.metadata.side_effects:
                return None
            found = {id(tensor): number for number, tensor in made.items()}
            slots = [(n, entry.slot) for n, entry in enumerate(later.metadata.inputs) if entry.slot is not None]
            return Settled(later, {n: found[key] for n, slot in slots if (key := id(slot.get())) in found})
        finally:
            for container, content in before:
                assign(container, content)


def _apply(first: Specialization, arguments: CallArguments) -> dict[int, torch.Tensor] | None:
    """Do to the program's objects what a call does; the tensors that stand for those that it makes.

    None, and nothing is done, where a tensor that it leaves there has a data-dependent size.
    """
    metadata, made = first.metadata, dict[int, torch.Tensor]()
    results: Any = first.recorded.graph.output_node().args[0]
    before = [entry.now() for entry in metadata.inputs]
    symbols = metadata.symbols.bind(first.guards.sources.values(arguments), [])
    left = [part for effect in metadata.side_effects for part in (*effect.entries, *effect.entries.values())]
    layouts = {
        number: replace(symbols.layout(metadata.outputs[number].layout), offset=0)  # in memory of its own
        for number in tensors_in(left)
    }
    if not all(layout.static for layout in layouts.values()):
        return None

    def tensor(number: int) -> torch.Tensor:
        alias = metadata.outputs[number]
        if alias.kind is AliasKind.INPUT and metadata.inputs[alias.input].argument is None:  # type: ignore[index]
            value: torch.Tensor = before[alias.input]  # type: ignore[index]
            return value
        device = "cpu" if alias.result is None else results[alias.result].meta["val"].device
        return made.setdefault(number, _of_layout(layouts[number], device))

    states = first.capture.state, arguments
    maker = Maker(states, tensor, [], ())
    for effect in metadata.side_effects:
        effect.apply(states, maker)
    return made


def _of_arguments(first: Specialization) -> list[tuple[torch.Tensor, bool]]:
    """The fake tensors of the arguments, in the order of their leaves, and whether they required gradients."""
    placeholders = zip(first.metadata.taken, first.recorded.graph.find_nodes(op="placeholder"), strict=True)
    entries = [(first.metadata.inputs[number], node.meta["val"]) for number, node in placeholders]
    requiring = {one.subject for one in first.guards.listed() if one.property == REQUIRES_GRAD and one.expected}
    tensors = [(entry, fake) for entry, fake in entries if entry.argument is not None and entry.is_tensor]
    tensors.sort(key=lambda pair: pair[0].argument or 0)
    return [(fake, entry.label in requiring) for entry, fake in tensors]


def _like(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    size, stride = list(map(concrete, fake.size())), list(map(concrete, fake.stride()))  # which asks nothing of symbols
    made = torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device).zero_()
    return made.requires_grad_(requires_grad)


def _of_layout(layout: Layout, device: torch.device | str) -> torch.Tensor:
    made = torch.zeros(layout.extent, dtype=layout.dtype, device=device)
    return made.as_strided(layout.size, layout.stride, 0)
