"""Gives all that is in an ONNX file its name: arguments, results, state, checks, and what is inside of the graph.

Users' names are kept: arguments are called as their parameters, results by their keys and attributes, state by its
paths, sizes by their `Dim`. Where two have one name, the first of these keeps it, and others get a number.

Invariant: no two values of a graph have one name, and no output is an input, or another output. Limits: graphs as
torch's exporter makes them.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir

from functionalize._torch import pytree
from functionalize.backends.nests import Rebuilt, is_value, steps_of
from functionalize.backends.onnx.convention.sizes import renamed


class Names:
    """The names that are taken: of values, or of sizes."""

    def __init__(self) -> None:
        self._taken = set[str | None]()

    def take(self, names: Iterable[str | None]) -> None:
        """Let no other have these names, which something has."""
        self._taken.update(names)

    def claim(self, wanted: str) -> str:
        """The name, or one with a number behind it where it is taken."""
        name, number = wanted or "_", 1
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._taken.add(name)
        return name


def argument_names(spec: pytree.TreeSpec, parameters: Sequence[str]) -> list[str]:
    """What each leaf of the arguments is called: `x`, `cache.keys.0`. ``parameters``: those by position."""
    names = []
    for path in filter(None, _paths(spec)):  # ((positional...), {by name})
        first = parameters[path[1]] if path[0] == 0 and path[1] < len(parameters) else path[1]
        names.append(_joined([first, *path[2:]]))
    return names


def result_names(spec: pytree.TreeSpec) -> list[str]:
    """What each leaf of the results is called: `logits`, `past.0.keys`, `output_1.boxes`; without keys `output_1`.

    Leaves without keys are numbered among all leaves, text and other values too.
    """
    names = []
    for place, path in enumerate(_paths(spec)):
        if path is None:
            continue
        if all(type(step) is int for step in path):
            names.append(f"output_{place}")
        else:
            names.append(f"output_{_joined(path)}" if type(path[0]) is int else _joined(path))
    return names


def _paths(spec: pytree.TreeSpec) -> list[tuple[Any, ...] | None]:
    """The steps to each leaf: numbers, keys, and the names of attributes; None for a value that is no leaf."""
    if spec.is_leaf():
        return [()]
    if spec.type is Rebuilt and is_value(spec.context):
        return [None]
    parts = zip(_steps(spec), spec.children(), strict=True)
    return [None if path is None else (step, *path) for step, part in parts for path in _paths(part)]


def _steps(spec: pytree.TreeSpec) -> Sequence[Any]:
    """The keys, or the names of attributes, of a container's parts; else their places."""
    count, context = spec.num_children, spec.context
    if spec.type is Rebuilt:
        return steps_of(context) or range(count)
    registered = pytree.SUPPORTED_NODES.get(spec.type)
    if registered is not None and registered.flatten_with_keys_fn is not None:
        try:
            pairs, _ = registered.flatten_with_keys_fn(registered.unflatten_fn([0] * count, context))
            return [getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key, _ in pairs]
        except Exception:  # a class of the user's may take no numbers for its parts
            return range(count)
    named = isinstance(context, (list, tuple)) and len(context) == count  # as ModelOutput's
    return list(context) if named and all(isinstance(key, str) for key in context) else range(count)


def _joined(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


# Sizes


def rename_sizes(model: Any, given: Mapping[str, str]) -> dict[str, str]:
    """Name the symbols of sizes: as their `Dim`, else after the first input or output that has one, `x_dim_0`.

    Args:
        model: its shapes get these names.
        given: the names of `Dim`s, by symbols.

    Returns:
        All names, by symbols.
    """
    graph, taken = model.graph, Names()
    names = {symbol: taken.claim(f"{name}_" if keyword.iskeyword(name) else name) for symbol, name in given.items()}
    for value in (*graph.inputs, *graph.outputs):
        for dim, size in enumerate(value.shape or ()):
            symbol = str(getattr(size, "value", size))
            if symbol.isidentifier() and symbol not in names:
                names[symbol] = taken.claim(re.sub(r"\W", "_", f"{value.name}_dim_{dim}"))
    nodes = onnx_ir.traversal.RecursiveGraphIterator(graph)
    inside = [value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None]
    for value in dict.fromkeys([*graph.inputs, *graph.outputs, *inside]):
        for dim, size in enumerate(value.shape or ()):
            if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
                value.shape[dim] = _in_order(renamed(str(size.value), names))
    return names


def _in_order(size: str) -> str:
    """Sums of products in the order of their names: sympy's is that of symbols, whose names differ from run to run."""
    if not re.fullmatch(r"\w+(( \+ |\*)\w+)*", size):
        return size
    products = [product.split("*") for product in size.split(" + ")]
    terms = ["*".join(sorted(factors, key=lambda factor: (not factor.isdigit(), factor))) for factors in products]
    return " + ".join(sorted(terms, key=lambda term: (term.isdigit(), term)))


# Values


def provisional(count: int) -> list[str]:
    """Names for the translation that nothing inside of a graph has."""
    return [f"functionalize.value.{number}" for number in range(count)]


def rename(model: Any, inputs: Sequence[str], outputs: Sequence[str], taken: Names) -> None:
    """Give inputs and outputs these names; what has one of them inside is called otherwise.

    ``taken``: the names of inputs and outputs; gets those of all that is in the model.
    """
    graph = model.graph
    _separate(graph)
    reserved = {*inputs, *outputs}
    nodes = list(onnx_ir.traversal.RecursiveGraphIterator(graph))
    inside = [value for node in nodes for value in node.outputs]
    taken.take({value.name for value in inside} | set(graph.initializers))
    for value in inside:
        if value.name in reserved:
            value.name = taken.claim(value.name)
    for name in [name for name in graph.initializers if name in reserved]:
        value = graph.initializers.pop(name)
        value.name = taken.claim(name)
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
