"""Whether a program that was captured with gradients of its inputs does the same without them.

A training step leaves gradients, which its next call finds. It is captured for both calls. Where the two programs
differ only in additions to the gradients, one graph is right for both.

Invariant: a program that branches on whether there is a gradient keeps two graphs. Limits: reconstructions of objects
are compared by their plain values.
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


def serves_without_gradients(assuming: Recorded, without: Recorded) -> bool:
    """Whether a program captured with gradients (``assuming``) does the same as the one captured without them."""
    assumed, actual = assuming.metadata, without.metadata
    read = {assumed.inputs[number].name for number in assumed.gradients_read}
    left = {actual.inputs[number].name for number in {*actual.gradients, *actual.gradients_read}}
    gradients = {entry.name for entry in assumed.inputs if entry.gradient_of is not None}
    if any(assumed.inputs[number].wrapping is not None for number in assumed.gradients_read):
        return False  # a wrapper's supposed gradient is plain
    alike = _alike(assuming.graph, without.graph, gradients)
    if alike is None or assumed.graph.answers != actual.graph.answers:
        return False
    if _End.of(assuming, alike) != _End.of(without, alike):
        return False
    as_zeros = assumed.only_accumulates and not actual.leaves_sparse_gradients
    return not read or (read <= left and as_zeros)


@dataclass(frozen=True)
class _End:
    """What a call does after its graph has run, by the values that are alike: equal for programs that do the same."""

    given: list[Any]  # the tensors that a program hands out, except for gradients
    plain: list[tuple[type, str]]  # the plain values that it returns and leaves in objects
    written: list[Any]  # what it writes to inputs, except for gradients
    gradients: dict[str, Any]  # by the name of the input that holds them

    @classmethod
    def of(cls, recorded: Recorded, alike: Mapping[Node, Any]) -> _End:
        metadata = recorded.metadata
        results: Any = map_arg(recorded.graph.output_node().args[0], alike.__getitem__)
        names = [entry.name for entry in metadata.inputs]
        handed_out = [n for n in range(len(metadata.outputs)) if n not in metadata.gradients.values()]
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
        aliases = [metadata.outputs[number] for number in handed_out]
        reconstructed = [metadata.results, metadata.side_effects, metadata.steps]
        return cls(
            [(a.kind, a.input is not None and names[a.input], _value(a.result, results)) for a in aliases],
            list(_plain_values(reconstructed, {number: n for n, number in enumerate(handed_out)}, results)),
            written,
            gradients,
        )


def _value(position: int | None, results: Sequence[Any]) -> Any:
    return None if position is None else results[position]


def _plain_values(value: Any, outputs: Mapping[Any, int], results: Sequence[Any]) -> Iterator[tuple[type, str]]:
    """The plain values in reconstructions, with their classes: 1 and True differ; tensors by place in ``outputs``."""
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


def _alike(assuming: Graph, without: Graph, gradients: set[str]) -> dict[Node, Any] | None:
    """Labels, equal for nodes with one value, in a graph and one without ``gradients``; None if the graphs differ."""
    graphs = assuming, without
    nodes, others = ([node for node in graph.nodes if node.op not in ("placeholder", "output")] for graph in graphs)
    inputs = (node for graph in graphs for node in graph.find_nodes(op="placeholder"))
    labels: dict[Node, Any] = {node: node.name for node in inputs}
    for node in nodes:
        if node.target is aten.add.Tensor and isinstance(node.args[0], Node) and node.args[0].name in gradients:
            labels[node] = labels[node.args[1]]
            continue
        while others and not _are_alike(node, others[0], labels):
            copy = others.pop(0)
            if copy.target not in traits.COPIES_GRADIENT:
                return None
            labels[copy] = labels[copy.args[traits.COPIES_GRADIENT[copy.target]]]
        if not others:
            return None
        labels[node] = labels[others.pop(0)] = object()
    return None if others else labels


def _are_alike(node: Node, other: Node, labels: Mapping[Node, Any]) -> bool:
    """Whether two nodes do the same to values with the same labels."""
    if (node.op, node.target) != (other.op, other.target):
        return False
    calls = [map_arg((each.args, each.kwargs), labels.__getitem__) for each in (node, other)]
    return repr(calls[0]) == repr(calls[1])
