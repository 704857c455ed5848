"""How the arguments of a program are nested in the words of pytrees, for backends whose calls know no other objects.

Invariant: a tensor leaf stands by its number among the leaves of the arguments; no tensor is held. Limits: objects that
pytrees do not know are held weakly, and are gone if nobody else keeps them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.python_state.walk import LEAF_TYPES, StateWalk
from functionalize.runtime.arguments import CallArguments


@dataclass(frozen=True)
class ArgumentRef:
    """A leaf that is a tensor: its number among the leaves of the arguments."""

    number: int


@dataclass(frozen=True)
class ObjectLeaf:
    """A leaf that is an object with tensors: a reference to it, and which leaves of the arguments these are."""

    get: Any
    path: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CallTree:
    """``spec``: of ``(args, kwargs)``. ``leaves``: a reference for each tensor and object, else the very value."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[Any, ...]  # of the leaves, as pytree gives them

    @classmethod
    def of(cls, arguments: CallArguments) -> CallTree:
        """The nesting of one call."""
        pairs, spec = _with_paths((tuple(arguments.args), dict(arguments.kwargs)))
        numbers: dict[int, deque[int]] = defaultdict(deque)
        for number, value in enumerate(arguments.leaves):
            if isinstance(value, torch.Tensor):
                numbers[id(value)].append(number)
        found = [_leaf(value, path, numbers) for path, value in pairs]
        return cls(spec, tuple(found), tuple(path for path, _ in pairs))


def _with_paths(tree: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """Leaves with their paths, and how they are nested; by number in classes that are registered without keys."""
    try:
        return pytree.tree_flatten_with_path(tree)
    except ValueError:
        leaves, spec = pytree.tree_flatten(tree)
        return list(zip(_paths(spec, ()), leaves, strict=True)), spec


def _paths(spec: pytree.TreeSpec, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if spec.is_leaf():
        yield path
    for number, child in enumerate(spec.children()):
        key: Any = pytree.MappingKey(spec.context[number]) if spec.type is dict else pytree.SequenceKey(number)
        yield from _paths(child, (*path, key))


def _leaf(value: Any, path: Sequence[Any], numbers: dict[int, deque[int]]) -> Any:
    if isinstance(value, torch.Tensor):
        return ArgumentRef(numbers[id(value)].popleft())
    if type(value) in LEAF_TYPES:
        return value
    walk = StateWalk()
    walk.walk([value], 0, _name(path))
    if not walk.tensors:
        return value
    found = tuple(numbers[id(slot.get())].popleft() for slot in walk.tensors if numbers[id(slot.get())])
    try:
        return ObjectLeaf(weakref.ref(value), _name(path), found)
    except TypeError:
        return ObjectLeaf(lambda: None, _name(path), found)


def _name(path: Sequence[Any]) -> str:
    """What an argument is called in paths of state."""
    return "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path[1:])
