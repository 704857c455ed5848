"""Values that nodes of a graph have for the example inputs, while the graph is recorded.

The graph is pure: running a part of it writes nothing. Values that were computed for one question are kept for the next
ones, so that a loop of many questions runs each operator once.

Invariant: the example inputs and the state of random numbers stay as they are; random numbers are drawn in the order
of the graph. Limits: example inputs without data have no values.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from functionalize._torch import FakeTensor
from functionalize._torch.dispatch import identity_of, kernels_alone
from functionalize._torch.symbols.tracing import nodes_in_use
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.agreement import agree_to_communicate
from functionalize.ops import tables
from functionalize.ops.collectives import communicates, starts
from functionalize.refusals.values import ACTS_BESIDE_BRANCH, COLLECTIVE_BESIDE_BRANCH
from functionalize.runtime.calls.stages import RunAsWritten
from functionalize.runtime.communication import current_log, once
from functionalize.runtime.graphs.view_reads import reads_views, uncopied
from functionalize.runtime.random_state import RandomState, fresh_generator, generator_of, source_of

_FEW = 64  # so many values are kept without a check of their use


class NoDataError(Exception):
    """A value depends on an input without data; the message says on which."""


def refuse_acting(nodes: Iterable[Node], why: str, *, all_ops: bool = False) -> None:
    """Raise where a program that branches on tensor values calls an operator with side effects.

    ``all_ops``: also for collectives, which happen once in a call, see `runtime/communication.py`.
    """
    for node in nodes:
        if tables.acts(node.target) or (all_ops and communicates(node.target)):
            name = node.target.name()  # type: ignore[union-attr]
            row = COLLECTIVE_BESIDE_BRANCH if communicates(node.target) else ACTS_BESIDE_BRANCH
            raise row.error(getattr(node.meta.get("stack_trace"), "decisive", None), op=name, reason=why)


class ExampleData:
    """Values of nodes, computed on demand."""

    def __init__(
        self,
        tracer: Any,
        example: Callable[[Node], Any],
        state_of: Callable[[torch.Generator], torch.Tensor],
        drawn_again: Callable[[Node], bool],
        rearranges: Callable[[], bool],
    ) -> None:
        """``example``: the value of a placeholder. ``state_of``: the state of a generator before the program.

        ``drawn_again``: whether a node draws what another node has drawn. ``rearranges``: whether eager communicates in
        another way than the graph.
        """
        self._tracer, self._example, self._drawn_again, self._state_of = tracer, example, drawn_again, state_of
        self._rearranges = rearranges
        self._values = dict[Node, Any]()
        self._views = dict[Any, Any]()  # views, of nodes that copy them
        self._done = set[Node]()  # nodes that have been computed
        self._sources = dict[Node, Any]()  # of the nodes that draw random numbers, in order
        self._communications = dict[Node, int]()  # the collectives, in order, each with its position
        self._searched: Node | None = None  # the last node that was searched
        self._states = dict[int, torch.Tensor]()  # of generators, after the draws so far
        self._many = _FEW
        self._failed: Exception | None = None  # why no collective may start any more

    def value(self, node: Node) -> Any:
        """The value of a node.

        Raises:
            NoDataError: it depends on inputs without data.
            RunAsWritten: in a call, what eager runs before a collective raises, and its handlers decide what follows;
                or eager communicates in another way.
        """
        if node not in self._values:
            needed = sorted(self._needed([node]))
            refuse_acting(needed, "the value that it branches on depends on this operator")
            with kernels_alone(), self._drawing([dependency for dependency in needed if dependency in self._sources]):
                self._compute(needed)
        value = self._values[node]
        if len(self._values) > self._many:
            self._drop()
        return value

    def _compute(self, nodes: Sequence[Node]) -> None:
        """Compute nodes, in their order."""
        collectives = [node for node in nodes if node in self._communications]
        if collectives and self._failed is None and _in_call() and self._rearranges():
            self._failed = RunAsWritten()
        if collectives and self._failed is not None:
            raise self._failed
        for node in nodes:
            try:
                self._values[node] = self._computed(node)
            except (NoDataError, UnsupportedProgramError):
                raise
            except Exception as error:
                if not any(node < collective for collective in collectives):
                    raise
                self._failed = self._failure(collectives[-1], error)
                raise self._failed from error
            self._done.add(node)

    def _failure(self, collective: Node, error: Exception) -> Exception:
        """What to raise instead of a collective that eager may not reach: an operator before it raises."""
        if _in_call():
            return RunAsWritten()
        name = collective.target.name()  # type: ignore[union-attr]
        return COLLECTIVE_BESIDE_BRANCH.error(
            op=name, reason=f"there, an operator before it fails for the examples: {error}"
        )

    def _needed(self, wanted: Iterable[Node]) -> set[Node]:
        """The nodes to compute: a draw needs all draws before it; a collective needs all before it, which may raise."""
        self._find_ordered()
        needed, waiting = set[Node](), list(wanted)
        while waiting:
            node = waiting.pop()
            if node in needed or node in self._values:
                continue
            needed.add(node)
            waiting += node.all_input_nodes
            if node in self._sources:
                waiting += [earlier for earlier in self._sources if earlier < node]
            if node in self._communications:
                before = itertools.takewhile(partial(operator.is_not, node), self._tracer.graph.nodes)
                waiting += [earlier for earlier in before if earlier.op == "call_function"]
        return needed

    def _find_ordered(self) -> None:
        nodes = list[Node]()
        for node in reversed(self._tracer.graph.nodes):
            if node is self._searched:
                break
            nodes.append(node)
        self._searched = nodes[0] if nodes else self._searched
        for node in reversed(nodes):
            source = source_of(node, self._tracer.root)
            if source is not None and not self._drawn_again(node):
                self._sources[node] = source
            if starts(node.target):
                self._communications[node] = len(self._communications)

    @contextlib.contextmanager
    def _drawing(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Draw from copies of the generators, in the states after the draws so far."""
        drawn = (self._sources[node] for node in nodes)
        sources = (source for source in drawn if not (isinstance(source, Node) and source.target is fresh_generator))
        drawn_from = [generator_of(self._example(s) if isinstance(s, Node) else s, {}) for s in sources]
        generators = {identity_of(generator): generator for generator in drawn_from}
        states = ((g, self._states.get(key, self._state_of(g))) for key, g in generators.items())
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
        if view is not None:  # other operators read it as a view, as in a call
            self._views[node] = view(*views[0], **views[1])
        elif not self._views.keys().isdisjoint(node.all_input_nodes) and reads_views(
            node.target, *views, node.meta.get("val")
        ):
            args, kwargs = views
        if node in self._communications:
            position, log = self._communications[node], current_log()
            if log is not None and log.capture is not None and position == len(log.started):
                agree_to_communicate(log.capture, node, position)
            return once(node.target, position, *args, **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _drop(self) -> None:
        """Forget tensors that nothing will ask for; a tensor that is asked for nevertheless is computed again."""
        used = nodes_in_use(self._tracer)
        for node, value in list(self._values.items()):
            kept = node in self._sources or node in self._communications or node in used
            kept = kept or isinstance(value, (bool, int, float))
            if node.op == "call_function" and not kept and self._done.issuperset(node.users):
                del self._values[node]
                self._views.pop(node, None)
        self._many = max(_FEW, 2 * len(self._values))


def _in_call() -> bool:
    """Whether the program is captured for a call, which can run it as it is written."""
    log = current_log()
    return log is not None and log.capture is None


def _with_data(value: Any, node: Node) -> Any:
    if isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or value.is_meta):
        raise NoDataError(f"`{node.name}` is a fake tensor without data")
    return value
