"""How the arguments of a program are nested, as a pytree, for backends whose calls take only pytrees.

Invariant: a tensor leaf is represented by its number among the leaves of the arguments; no tensor is held. Limits:
objects that are not registered as pytrees are held weakly, and are gone if nobody else keeps them.
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
    """A leaf that is an object with tensors: a weak reference to it, and its tensors' numbers among the leaves."""

    get: Any
    path: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CallTree:
    """``spec``: of ``(args, kwargs)``. ``leaves``: references for tensors and objects with tensors, else the values."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[Any, ...]  # of the leaves, as pytree gives them

    @classmethod
    def of(cls, arguments: CallArguments) -> CallTree:
        """The tree of the arguments of one call."""
        pairs, spec = _with_paths((tuple(arguments.args), dict(arguments.kwargs)))
        numbers: dict[int, deque[int]] = defaultdict(deque)
        for number, value in enumerate(arguments.leaves):
            if isinstance(value, torch.Tensor):
                numbers[id(value)].append(number)
        leaves = [_leaf(value, path, numbers) for path, value in pairs]
        return cls(spec, tuple(leaves), tuple(path for path, _ in pairs))


def _with_paths(tree: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """Leaves with their paths, and the spec; classes that are registered without keys have numbers in the paths."""
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
    name = joined(path[1:])
    walk.walk([value], 0, name)
    if not walk.tensors:
        return value
    held = tuple(numbers[id(slot.get())].popleft() for slot in walk.tensors if numbers[id(slot.get())])
    try:
        return ObjectLeaf(weakref.ref(value), name, held)
    except TypeError:
        return ObjectLeaf(lambda: None, name, held)


def joined(keys: Sequence[Any]) -> str:
    """The name of what keys lead to, among arguments and in paths of state."""
    return "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)
