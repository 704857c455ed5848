"""Inputs that overlap, and that autograd takes for views of one tensor.

A write to one of them changes the gradients of the rest. While such a program is recorded, they are made as views of
that tensor, their root. A root that is not an input becomes one; the program gets only views of it.

Invariant: autograd relates the fake tensors as it relates the inputs. Limits: sizes are integers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import torch
from torch.export.graph_signature import InputKind

from functionalize._torch import is_symbolic, storage_key
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.overlap import disjoint, route
from functionalize.aliasing.strided_layout import is_differentiable, view_at
from functionalize.graph_capture.inputs.inputs import TracedInput, fresh_name


def with_roots(inputs: Sequence[TracedInput]) -> list[TracedInput]:
    """The inputs, then the roots that are not inputs themselves; inputs that are to be views get their ``root``."""
    groups: dict[int, list[TracedInput]] = defaultdict(list)
    for entry in inputs:
        if can_be_view(entry):
            groups[id(entry.known_base)].append(entry)
    extended, taken = list(inputs), {entry.name for entry in inputs}
    for group in groups.values():
        if all(disjoint(Layout.of(entry.value), Layout.of(other.value)) for entry, other in combinations(group, 2)):
            continue
        root = group[0].known_base
        itself = next((entry for entry in group if entry.value is root), None)
        if itself is None:
            name = fresh_name(f"base_of_{group[0].name}", taken)
            itself = TracedInput(InputKind.USER_INPUT, name, None, root, base_of=group[0])
            extended.append(itself)
        for entry in group:
            if entry.value is not root:
                entry.root = itself
    return extended


def can_be_view(entry: TracedInput) -> bool:
    """Whether a view of an input's base in autograd can replace the input: a view that autograd differentiates."""
    root, value = entry.known_base, entry.value
    if root is None or root.layout is not torch.strided or root.is_nested or storage_key(root) != storage_key(value):
        return False
    base, layout = Layout.of(root), Layout.of(value)
    static = base.static and layout.static and (entry.fake is None or not is_symbolic(entry.fake))
    return static and is_differentiable(base, layout)


def view_of(root: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view of a root with a layout, by plain view operators where these suffice."""
    base, made = Layout.of(root), root
    for step in route(base, layout) or ():
        made = step.op(made, *step.args)
    return view_at(root, base, layout) if made is root else made
