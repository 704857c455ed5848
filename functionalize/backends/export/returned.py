"""What the caller of an exported program gets: the leaves of containers that pytrees know.

Objects of the state are returned as a call leaves them; an exported program has none, and gives what they hold.

Invariant: objects are afterwards as they were. Limits: of objects that pytrees do not know the tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.backends.export.effects import StandIns, applied
from functionalize.backends.export.example_call import ExampleCall
from functionalize.backends.export.shared_places import GraphValue
from functionalize.backends.export.state import CONSTANTS
from functionalize.runtime.state_walk import StateWalk


@dataclass(frozen=True)
class InputTensor:
    """Stands for the tensor that an input is, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Returned:
    """Leaves, and how they are nested: each a graph's value, the tensor of an input, a constant, or what is none."""

    leaves: list[Any]
    spec: pytree.TreeSpec


def returned(call: ExampleCall) -> Returned:
    """What one program returns."""
    stand_ins, metadata = StandIns(call), call.program.metadata
    inputs = {id(value): n for n, value in reversed(list(enumerate(stand_ins.inputs)))}
    with applied(metadata.side_effects, stand_ins.states, stand_ins.maker):
        made = [stand_ins.made(part) for part in metadata.results]
        leaves, spec = pytree.tree_flatten(_without_structs(pytree.tree_unflatten(made, metadata.spec)))
        leaves, spec = pytree.tree_flatten(pytree.tree_unflatten(list(map(_tensors_of, leaves)), spec))

    def meaning(leaf: Any) -> Any:
        known = isinstance(leaf, torch.Tensor) and id(leaf) in inputs
        return InputTensor(inputs[id(leaf)]) if known else stand_ins.of_marker.get(id(leaf), leaf)

    return Returned(list(map(meaning, leaves)), spec)


def _without_structs(results: Any) -> Any:
    """Results with tuples in place of torch's own named ones (`torch.return_types`), which no file can name."""

    def is_struct(value: Any) -> bool:
        return type(value).__module__ == "torch.return_types"

    def plain(value: Any) -> Any:
        return tuple(value) if is_struct(value) else value

    return pytree.tree_map(plain, results, is_leaf=is_struct)


def _tensors_of(leaf: Any) -> Any:
    """An object that pytrees do not know as a dict of its tensors; any other leaf itself."""
    if isinstance(leaf, (torch.Tensor, GraphValue, *CONSTANTS)):
        return leaf
    walk = StateWalk()
    walk.walk([leaf], 0, "")
    return {slot.path.strip("."): slot.get() for slot in walk.tensors} or leaf
