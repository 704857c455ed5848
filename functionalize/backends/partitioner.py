"""Takes a joint program apart: write-backs, forward graph, backward graph.

Invariant: both graphs are free of mutation; what the backward needs of the forward is among the forward's results.
Limits: nothing is computed twice to save memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functionalize._torch import SYMBOLS
from functionalize.backends.joint_graph import Traced
from functionalize.ops.tables import WRITE_BACKS

_aten = torch.ops.aten


@dataclass(frozen=True)
class Given:
    """An input of the Dynamo graph, by its number."""

    index: int


@dataclass(frozen=True)
class Extra:
    """A result of the forward graph that a write-back needs, by its number among those."""

    index: int


@dataclass(frozen=True)
class Result:
    """A result of the forward graph, by its number."""

    index: int


@dataclass(frozen=True)
class Step:
    """One op of a write-back, on an input."""

    op: Any
    target: int
    args: tuple[Any, ...]  # after the input


@dataclass(frozen=True)
class Parts:
    """What a call runs."""

    steps: list[Step]
    forward: GraphModule  # results: values, numbers, extras, saved
    backward: GraphModule | None  # inputs: saved, tangents; results: gradients
    extras: int
    saved: list[Given | Result]  # what the backward takes
    gradients: list[int | None]  # of each leaf: its place among the backward's results
    copies: list[int]  # results that are inputs, or stand there twice: the caller must get memory of its own


def split(traced: Traced, names: Sequence[str]) -> Parts:
    """Take a joint program apart; ``names`` are those of the graph's inputs."""
    graph = traced.module.graph
    placeholders = graph.find_nodes(op="placeholder")
    primals = placeholders[: len(traced.passed)]
    tangents = placeholders[len(primals) :]
    results: Any = graph.output_node().args[0]
    own = len(traced.outcome.values) + len(traced.outcome.numbers)
    inputs = dict(zip(primals, traced.passed, strict=True))
    steps, extras = _take_write_backs(graph, inputs, traced.outcome.written)
    outputs = [*results[:own], *extras]
    wanted = [node for node in results[own:] if node is not None]
    ahead = _forward(graph, outputs, tangents)
    saved = _saved(wanted, ahead, tangents) if wanted else []
    further = [node for node in saved if node not in primals and node not in outputs]
    labels = dict(zip(primals, (names[i] for i in traced.passed), strict=True))
    labels |= {node: f"tangents_{place}" for place, node in enumerate(tangents)}
    forward = _extract(traced.module, primals, [*outputs, *further], labels, keep=ahead)
    backward = _extract(traced.module, [*saved, *tangents], wanted, labels) if wanted else None
    count, everything = iter(range(len(wanted))), [*outputs, *further]
    return Parts(
        steps=steps,
        forward=forward,
        backward=backward,
        extras=len(extras),
        saved=[Given(inputs[node]) if node in inputs else Result(everything.index(node)) for node in saved],
        gradients=[None if node is None else next(count) for node in results[own:]],
        copies=[i for i, node in enumerate(outputs) if node in primals or node in outputs[:i]],
    )


def _take_write_backs(
    graph: Graph, inputs: dict[Node, int], differentiable: Sequence[int]
) -> tuple[list[Step], list[Node]]:
    """Remove the write-backs from a graph: as steps, and the nodes whose results they need.

    What goes to an input whose writes autograd sees is a result of its own: it has a tangent.
    """
    steps: list[Step] = []
    extras: list[Node] = []

    def given(node: Node, alone: bool) -> Any:
        if node in inputs and not alone:
            return Given(inputs[node])
        if node not in extras or alone:
            extras.append(node)
            return Extra(len(extras) - 1)
        return Extra(extras.index(node))

    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "overloadpacket", None) not in WRITE_BACKS:
            continue
        target = node.args[0]
        if target not in inputs:
            continue
        alone = inputs[target] in differentiable and node.target is _aten.copy_.default
        args = _mapped(node.args[1:], functools.partial(given, alone=alone))
        steps.append(Step(node.target, inputs[target], args))
        node.replace_all_uses_with(target)
        graph.erase_node(node)
    return steps, extras


def _mapped(args: Any, given: Callable[[Node], Any]) -> Any:
    """Arguments with something else for each node."""
    if isinstance(args, Node):
        return given(args)
    if isinstance(args, (tuple, list)):
        return type(args)([_mapped(arg, given) for arg in args])
    return args


def _forward(graph: Graph, outputs: Iterable[Any], tangents: Sequence[Node]) -> set[Node]:
    """The nodes that the forward graph runs: what its results need, all sizes, and what has an effect."""
    after = set(tangents)
    for node in graph.nodes:
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    todo = [node for node in outputs if isinstance(node, Node)]
    todo += [node for node in graph.nodes if node not in after and _runs_always(node)]
    ahead: set[Node] = set()
    while todo:
        node = todo.pop()
        if node not in ahead:
            ahead.add(node)
            todo += node.all_input_nodes
    for node in graph.nodes:  # the parts of a result that is there anyway
        if node.target is operator.getitem and node.args[0] in ahead:
            ahead.add(node)
    return ahead


def _runs_always(node: Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr"):
        return False
    return isinstance(node.meta.get("val"), (int, float, *SYMBOLS)) or node.is_impure()


def _saved(wanted: Sequence[Node], ahead: set[Node], tangents: Sequence[Node]) -> list[Node]:
    """What the backward graph takes from the forward graph, symbols first."""
    seen: set[Node] = set(tangents)
    saved: list[Node] = []
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" or (node in ahead and node.op != "get_attr"):
            saved.append(node)
        else:
            todo += node.all_input_nodes
    graph = wanted[0].graph
    symbols = [n for n in graph.find_nodes(op="placeholder") if _is_symbol(n)]  # of which sizes are made
    saved = list(dict.fromkeys([*symbols, *saved]))
    order = {node: place for place, node in enumerate(graph.nodes)}
    return sorted(saved, key=lambda node: (not _is_symbol(node), order[node]))


def _is_symbol(node: Node) -> bool:
    return isinstance(node.meta.get("val"), SYMBOLS)


def _extract(
    module: GraphModule,
    inputs: Sequence[Node],
    outputs: Sequence[Any],
    labels: dict[Node, str],
    keep: Iterable[Node] = (),
) -> GraphModule:
    """A graph of its own that computes some nodes from others."""
    needed, todo = set(inputs), [*outputs, *keep]
    while todo:
        node = todo.pop()
        if isinstance(node, Node) and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    graph, made = Graph(), {}
    for node in inputs:
        made[node] = graph.placeholder(labels.get(node, node.name))
        made[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] if isinstance(node, Node) else node for node in outputs))
    graph.eliminate_dead_code()
    return GraphModule(module, graph)
