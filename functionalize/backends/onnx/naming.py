"""Gives the inputs and outputs of an ONNX graph their names.

The exporter names what is inside of a graph as it likes. Invariant: no two values have one name, and no output is an
input, or another output. Limits: graphs as torch's exporter makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir


def provisional(count: int, what: str) -> list[str]:
    """Names for the translation that nothing inside of a graph has."""
    return [f"functionalize.{what}.{number}" for number in range(count)]


def rename(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs these names; what has one of them inside is called otherwise."""
    graph = model.graph
    _separate(graph)
    reserved = {*inputs, *outputs}
    nodes = list(onnx_ir.traversal.RecursiveGraphIterator(graph))
    inside = [value for node in nodes for value in node.outputs]
    taken = {value.name for value in inside} | set(graph.initializers) | reserved
    for value in inside:
        if value.name in reserved:
            value.name = _another(value.name, taken)
    for name in [name for name in graph.initializers if name in reserved]:
        value = graph.initializers.pop(name)
        value.name = _another(name, taken)
        graph.initializers[value.name] = value
    for value, name in [*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)]:
        value.name = name


def _separate(graph: Any) -> None:
    """Make each output a value of its own."""
    seen = {*graph.inputs, *graph.initializers.values()}
    for number, value in enumerate(list(graph.outputs)):
        if value in seen:
            node = onnx_ir.node("Identity", [value])
            (made,) = node.outputs
            made.name, made.shape, made.type = f"functionalize.copy.{number}", value.shape, value.type
            graph.append(node)
            graph.outputs[number] = made
            value = made
        seen.add(value)


def _another(name: str, taken: set[str | None]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    taken.add(f"{name}_{number}")
    return f"{name}_{number}"
