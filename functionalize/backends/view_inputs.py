"""Inputs of a Dynamo graph that overlap, and that autograd knows for views of one tensor.

A write to one of them changes the gradients of the others: while such a graph is recorded, they are made as views of
that tensor, their root. Where it is no input itself, it becomes one, of which the graph gets nothing but views.

Invariant: autograd finds between the stand-ins what it knows of the inputs. Limits: sizes are integers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from functionalize._torch import storage_key
from functionalize._torch.tensors import autograd_base
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.overlap import disjoint, route
from functionalize.aliasing.strided_layout import is_differentiable, view_at


@dataclass(frozen=True)
class ViewInputs:
    """Which inputs are views of which root. Roots that are no inputs come after all inputs."""

    roots: tuple[tuple[int, int], ...] = ()  # positions of a view, and of its root
    added: tuple[int, ...] = ()  # of each root that is no input: an input that is a view of it

    @classmethod
    def among(cls, values: Sequence[Any]) -> ViewInputs:
        """Those among the inputs of one call."""
        groups: dict[int, list[int]] = defaultdict(list)
        for position, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
                groups[id(autograd_base(value))].append(position)
        roots: list[tuple[int, int]] = []
        added: list[int] = []
        for group in groups.values():
            root = autograd_base(values[group[0]])
            if _overlap(root, [values[position] for position in group]):
                itself = next((position for position in group if values[position] is root), None)
                if itself is None:
                    itself = len(values) + len(added)
                    added.append(group[0])
                roots += [(position, itself) for position in group if values[position] is not root]
        return cls(tuple(roots), tuple(added))

    def extended(self, values: Sequence[Any]) -> list[Any]:
        """Inputs, and after them the roots that are none."""
        return [*values, *(autograd_base(values[position]) for position in self.added)]

    def placed(self, values: Sequence[Any]) -> list[Any]:
        """Inputs and roots, the views made anew from their roots."""
        placed = list(values)
        for position, root in self.roots:
            placed[position] = _view_of(values[root], Layout.of(values[position]))
        return placed


def _overlap(root: torch.Tensor, group: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are views of a root that autograd sees through, and two of them share elements."""
    layouts = [Layout.of(tensor) for tensor in (root, *group)]
    in_memory = all(storage_key(tensor) == storage_key(root) for tensor in group)
    if not (in_memory and all(one.static and is_differentiable(layouts[0], one) for one in layouts)):
        return False
    return any(not disjoint(*pair) for pair in combinations(layouts[1:], 2))


def _view_of(root: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view of a root with a layout, by plain views where there are such."""
    base, made = Layout.of(root), root
    for op, args, _ in route(base, layout) or ():
        made = op(made, *args)
    return view_at(root, base, layout) if made is root else made
