"""What the caller of an exported program gets: the leaves of containers that pytrees know.

Objects of the state are returned as a call leaves them; an exported program has none, and gives what they hold.

Invariant: objects are afterwards as they were. Limits: of objects that pytrees do not know the tensors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.backends.export.signature.effects import Substitutes, applied
from functionalize.backends.export.signature.shared_places import GraphValue
from functionalize.backends.export.signature.state import CONSTANTS
from functionalize.backends.nests import Rebuilt, rebuilt
from functionalize.backends.preparation.example_call import ExampleCall
from functionalize.errors import UnsupportedProgramError
from functionalize.python_state.walk import StateWalk


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
    substitutes, metadata = Substitutes(call), call.program.metadata
    with applied(metadata.side_effects, substitutes.states, substitutes.maker):
        made = [substitutes.maker.make(part) for part in metadata.results]
        try:
            leaves, spec = pytree.tree_flatten(_in_nodes(pytree.tree_unflatten(made, metadata.spec)))
        except RecursionError as error:
            raise UnsupportedProgramError(
                "the program returns a container that contains itself",
                why="the results of an exported program are finite nested containers",
                hint="return its tensors",
                at="what it returns",
            ) from error

    def meaning(leaf: Any) -> Any:
        known = isinstance(leaf, torch.Tensor) and id(leaf) in call.numbers
        return InputTensor(call.numbers[id(leaf)]) if known else substitutes.of_marker.get(id(leaf), leaf)

    return Returned(list(map(meaning, leaves)), spec)


def _in_nodes(results: Any) -> Any:
    """Results in the nodes that pytrees know, and that can be written as text where what they hold can."""

    def leaf(value: Any) -> Any:
        made = _rebuilt(value)
        if made is not None:
            return made
        plain = next((kind for base, kind in _PLAIN.items() if isinstance(value, base)), None)
        return _tensors_of(value) if plain is None else _in_nodes(plain(value))

    return pytree.tree_map(leaf, results, is_leaf=lambda value: _rebuilt(value) is not None)


_PLAIN: dict[type, Any] = {Mapping: dict, list: list, tuple: tuple}  # of classes that pytrees do not know


def _rebuilt(value: Any) -> Rebuilt | None:
    return rebuilt(value, _in_nodes)


def _tensors_of(leaf: Any) -> Any:
    """An object that pytrees do not know as a dict of its tensors; any other leaf itself."""
    if isinstance(leaf, (torch.Tensor, GraphValue, *CONSTANTS)):
        return leaf
    walk = StateWalk()
    walk.walk([leaf], 0, "")
    return {slot.path.strip("."): slot.get() for slot in walk.tensors} or leaf
