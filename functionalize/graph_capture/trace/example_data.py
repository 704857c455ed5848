"""What nodes of a graph that is being recorded come to for the example inputs.

The graph is pure: to run a part of it writes nothing. What was computed for one question is kept for the next ones, so
that a loop of many questions runs each operator once.

Invariant: the example inputs and the state of random numbers stay as they are; random numbers are drawn in the order
of the graph. Limits: none where an example input has no data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from functionalize._torch import FakeTensor
from functionalize._torch.dispatch import identity_of, kernels_alone
from functionalize._torch.symbols.tracing import nodes_in_use
from functionalize.ops import tables
from functionalize.refusals.values import ACTS_BESIDE_BRANCH, COLLECTIVE_BESIDE_BRANCH
from functionalize.runtime.graphs.view_reads import reads_views, uncopied
from functionalize.runtime.random_state import RandomState, anew, generator_of, source_of

_FEW = 64  # so many values are kept without asking whether they are used


class NoDataError(Exception):
    """A value depends on what has no data; the message says on what."""


def refuse_acting(nodes: Iterable[Node], why: str) -> None:
    """Raise where a program that branches on tensor values calls an operator for what it does beside its results."""
    for node in nodes:
        if tables.acts(node.target) or tables.communicates(node.target):
            name = node.target.name()  # type: ignore[union-attr]
            row = COLLECTIVE_BESIDE_BRANCH if tables.communicates(node.target) else ACTS_BESIDE_BRANCH
            raise row.error(getattr(node.meta.get("stack_trace"), "decisive", None), op=name, reason=why)


class ExampleData:
    """Values of nodes, computed when they are asked for."""

    def __init__(
        self,
        tracer: Any,
        example: Callable[[Node], Any],
        state_of: Callable[[torch.Generator], torch.Tensor],
        drawn_again: Callable[[Node], bool],
    ) -> None:
        """``example``: what a placeholder is. ``state_of``: the state of a generator before the program.

        ``drawn_again``: whether a node draws what another one has drawn.
        """
        self._tracer, self._example, self._drawn_again, self._state_of = tracer, example, drawn_again, state_of
        self._values = dict[Node, Any]()
        self._views = dict[Any, Any]()  # the same as views, of nodes that are copies of such
        self._done = set[Node]()  # computed at some time
        self._sources = dict[Node, Any]()  # of the nodes that draw random numbers, in order
        self._looked: Node | None = None  # the last node that was looked at for that
        self._states = dict[int, torch.Tensor]()  # of generators, after what was drawn
        self._many = _FEW

    def value(self, node: Node) -> Any:
        """What a node comes to.

        Raises:
            NoDataError: the data do not tell.
        """
        if node not in self._values:
            needed = sorted(self._needed([node]))
            refuse_acting(needed, "the value that it branches on depends on this operator")
            with kernels_alone(), self._drawing([one for one in needed if one in self._sources]):
                for one in needed:
                    self._values[one] = self._computed(one)
                    self._done.add(one)
        value = self._values[node]
        if len(self._values) > self._many:
            self._drop()
        return value

    def _needed(self, wanted: Iterable[Node]) -> set[Node]:
        """The nodes to compute; where one of them draws random numbers, with all that draw before it."""
        self._find_draws()
        found, waiting = set[Node](), list(wanted)
        while waiting:
            node = waiting.pop()
            if node in found or node in self._values:
                continue
            found.add(node)
            waiting += node.all_input_nodes
            if node in self._sources:
                waiting += [one for one in self._sources if one < node]
        return found

    def _find_draws(self) -> None:
        nodes = list[Node]()
        for node in reversed(self._tracer.graph.nodes):
            if node is self._looked:
                break
            nodes.append(node)
        self._looked = nodes[0] if nodes else self._looked
        for node in reversed(nodes):
            source = source_of(node, self._tracer.root)
            if source is not None and not self._drawn_again(node):
                self._sources[node] = source

    @contextlib.contextmanager
    def _drawing(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Draw from copies of the generators, which go on where they were."""
        drawn = (self._sources[node] for node in nodes)
        sources = (source for source in drawn if not (isinstance(source, Node) and source.target is anew))
        found = [generator_of(self._example(s) if isinstance(s, Node) else s, {}) for s in sources]
        generators = {identity_of(generator): generator for generator in found}
        states = ((one, self._states.get(key, self._state_of(one))) for key, one in generators.items())
        with RandomState(tuple(states)).again():
            yield
            self._states |= {key: generator.get_state() for key, generator in generators.items()}

    def _computed(self, node: Node) -> Any:
        if node.op == "placeholder":
            return _with_data(self._example(node), node)
        if node.op == "get_attr":
            return _with_data(attrgetter(str(node.target))(self._tracer.root), node)
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        views = map_arg((node.args, node.kwargs), lambda arg: self._views.get(arg, self._values[arg]))
        view = uncopied(node.target)
        if view is not None:  # which others read as a call has it
            self._views[node] = view(*views[0], **views[1])
        elif not self._views.keys().isdisjoint(node.all_input_nodes) and reads_views(
            node.target, *views, node.meta.get("val")
        ):
            args, kwargs = views
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _drop(self) -> None:
        """Forget tensors that nothing will ask for; if one is asked for nevertheless, it is computed once more."""
        used = nodes_in_use(self._tracer)
        for node, value in list(self._values.items()):
            kept = node in self._sources or node in used or isinstance(value, (bool, int, float))
            if node.op == "call_function" and not kept and self._done.issuperset(node.users):
                del self._values[node]
                self._views.pop(node, None)
        self._many = max(_FEW, 2 * len(self._values))


def _with_data(value: Any, node: Node) -> Any:
    if isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta):
        raise NoDataError(f"`{node.name}` is a fake tensor without data")
    return value
