"""Whether a program that was captured as if there were gradients does what it does where there are none.

A training step leaves gradients, which its next call finds. It is captured as both calls have it, and where the two are
one program, but for what is added to the gradients, one graph is right for both.

Invariant: a program that asks whether there is a gradient, and does something else then, is not one. Limits: recipes of
objects are compared by their plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from functionalize.ops import traits
from functionalize.python_state.reconstruct import GraphNumber, TensorRef
from functionalize.python_state.traversal_rules import PLAIN_BASES
from functionalize.runtime.calls.specialization import Recorded

aten = torch.ops.aten


def serves_without_gradients(assuming: Recorded, found: Recorded) -> bool:
    """Whether a program captured as if there were gradients does what one does that was captured without."""
    one, other = assuming.metadata, found.metadata
    read = {one.inputs[number].name for number in one.gradients_read}
    left = {other.inputs[number].name for number in {*other.gradients, *other.gradients_read}}
    gradients = {entry.name for entry in one.inputs if entry.gradient_of is not None}
    known = _known_alike(assuming.graph, found.graph, gradients)
    if known is None or one.graph.answers != other.graph.answers:
        return False
    if _End.of(assuming, known) != _End.of(found, known):
        return False
    as_zeros = one.only_accumulates and not other.leaves_sparse_gradients
    return not read or (read <= left and as_zeros)


@dataclass(frozen=True)
class _End:
    """What a call does when its graph has run, by what is known of the values: equal for programs that do the same."""

    given: list[Any]  # what the tensors are that a program gives, but for gradients
    plain: list[tuple[type, str]]  # the plain values that it returns and leaves in objects
    written: list[Any]  # what it writes to inputs, but for gradients
    gradients: dict[str, Any]  # by the input that they are left at

    @classmethod
    def of(cls, recorded: Recorded, known: Mapping[Node, Any]) -> _End:
        metadata = recorded.metadata
        results: Any = map_arg(recorded.graph.output_node().args[0], known.__getitem__)
        names = [entry.name for entry in metadata.inputs]
        given = [n for n in range(len(metadata.outputs)) if n not in metadata.gradients.values()]
        gradients: dict[str, Any] = {}
        for number, output in metadata.gradients.items():
            gradients[names[number]] = None if output is None else _value(metadata.outputs[output].result, results)
        written = []
        for mutation in metadata.mutations:
            of = metadata.inputs[mutation.input].gradient_of
            values = [(_value(write.result, results), write.path) for write in mutation.writes]
            if of is None:
                written.append((names[mutation.input], values, mutation.metadata, mutation.after))
            else:
                gradients[names[of]] = values[0][0] if len(values) == 1 and not values[0][1] else object()
        aliases = [metadata.outputs[number] for number in given]
        told = [metadata.results, metadata.side_effects, metadata.steps]
        return cls(
            [(a.kind, a.input is not None and names[a.input], _value(a.result, results)) for a in aliases],
            list(_plain_values(told, {number: n for n, number in enumerate(given)}, results)),
            written,
            gradients,
        )


def _value(position: int | None, results: Sequence[Any]) -> Any:
    return None if position is None else results[position]


def _plain_values(value: Any, outputs: Mapping[Any, int], results: Sequence[Any]) -> Iterator[tuple[type, str]]:
    """The plain values in recipes, with their classes: 1 and True are two; tensors by their place among ``outputs``."""
    waiting, seen = [value], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, TensorRef):
            yield TensorRef, repr(outputs.get(part.number))
        elif isinstance(part, GraphNumber):
            yield GraphNumber, repr(results[part.position])
        elif isinstance(part, PLAIN_BASES):
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


def _known_alike(assuming: Graph, found: Graph, gradients: set[str]) -> dict[Node, Any] | None:
    """What is the same in a graph and one that has no ``gradients`` to add to; None if they compute other things."""
    graphs = assuming, found
    ones, others = ([node for node in graph.nodes if node.op not in ("placeholder", "output")] for graph in graphs)
    inputs = (node for graph in graphs for node in graph.find_nodes(op="placeholder"))
    known: dict[Node, Any] = {node: node.name for node in inputs}
    for node in ones:
        if node.target is aten.add.Tensor and isinstance(node.args[0], Node) and node.args[0].name in gradients:
            known[node] = known[node.args[1]]
            continue
        while others and not _are_alike(node, others[0], known):
            copy = others.pop(0)
            if copy.target not in traits.COPIES_GRADIENT:
                return None
            known[copy] = known[copy.args[traits.COPIES_GRADIENT[copy.target]]]
        if not others:
            return None
        known[node] = known[others.pop(0)] = object()
    return None if others else known


def _are_alike(one: Node, other: Node, known: Mapping[Node, Any]) -> bool:
    """Whether two nodes do the same to what is ``known`` to be the same."""
    if (one.op, one.target) != (other.op, other.target):
        return False
    given = [map_arg((node.args, node.kwargs), known.__getitem__) for node in (one, other)]
    return repr(given[0]) == repr(given[1])
