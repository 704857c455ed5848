"""Whether a program that was captured as if there were gradients does what it does where there are none.

A training step leaves gradients, which its next call finds. It is captured as both calls have it, and where the two are
one program, but for what is added to the gradients, one graph is right for both.

Invariant: a program that asks whether there is a gradient, and does something else then, is not one. Limits: recipes of
objects are compared by their plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functionalize.runtime.frozen_values import VALUES
from functionalize.runtime.metadata import AliasKind, ProgramMetadata
from functionalize.runtime.specialization import Recorded

aten = torch.ops.aten

# What autograd does to a gradient that it leaves as the first, and that it cannot keep itself.
_COPIES = {aten.clone.default: 0, aten.copy.default: 1, aten.new_empty_strided.default: 0, aten._to_copy.default: 0}


def serves_without_gradients(assuming: Recorded, found: Recorded) -> bool:
    """Whether a program captured as if there were gradients does what one does that was captured without."""
    one, other = assuming.metadata, found.metadata
    read = {one.inputs[number].name for number in one.gradients_read}
    left = {other.inputs[number].name for number in {*other.gradients, *other.gradients_read}}
    if one.graph.answers != other.graph.answers or _given(one) != _given(other) or not _leave_alike(one, other):
        return False
    gradients = {entry.name for entry in one.inputs if entry.gradient_of is not None}
    if not _compute_alike(assuming.graph, found.graph, gradients):
        return False
    as_zeros = one.only_accumulates and not other.leaves_sparse_gradients
    return not read or (read <= left and as_zeros)


def _given(metadata: ProgramMetadata) -> list[tuple[AliasKind, str | None]]:
    """What the tensors are that a program gives, but for gradients: of what kind, of which inputs."""
    aliases = [one for number, one in enumerate(metadata.outputs) if number not in metadata.gradients.values()]
    return [(one.kind, None if one.input is None else metadata.inputs[one.input].name) for one in aliases]


def _leave_alike(one: ProgramMetadata, other: ProgramMetadata) -> bool:
    """Whether the plain values are the same that two programs return and leave in objects."""
    told = [list(_plain_values([metadata.results, metadata.side_effects, metadata.steps])) for metadata in (one, other)]
    return told[0] == told[1]


def _plain_values(value: Any) -> Iterator[Any]:
    """The plain values in recipes, with their classes: 1 and True are two."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, VALUES):
            yield type(part), repr(part)
        elif id(part) in seen:
            continue
        elif isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            waiting += part
        elif is_dataclass(part):
            waiting += [getattr(part, field.name) for field in fields(part)]
        seen.add(id(part))


def _compute_alike(assuming: Graph, found: Graph, gradients: set[str]) -> bool:
    """Whether a graph computes what another one does that has no ``gradients`` to add to."""
    ones, others = ([node for node in graph.nodes if node.op != "placeholder"] for graph in (assuming, found))
    inputs = (node for graph in (assuming, found) for node in graph.find_nodes(op="placeholder"))
    known: dict[Node, Any] = {node: node.name for node in inputs}
    for node in ones:
        if node.target is aten.add.Tensor and isinstance(node.args[0], Node) and node.args[0].name in gradients:
            known[node] = known[node.args[1]]
            continue
        while others and not _are_alike(node, others[0], known):
            copy = others.pop(0)
            if copy.target not in _COPIES:
                return False
            known[copy] = known[copy.args[_COPIES[copy.target]]]
        if not others:
            return False
        known[node] = known[others.pop(0)] = object()
    return not others


def _are_alike(one: Node, other: Node, known: Mapping[Node, Any]) -> bool:
    """Whether two nodes do the same to what is ``known`` to be the same."""
    if (one.op, one.target) != (other.op, other.target):
        return False
    given = [map_arg((node.args, node.kwargs), known.__getitem__) for node in (one, other)]
    return repr(given[0]) == repr(given[1])
