"""Decisions: a program's branches on tensor values, answered by the example inputs, and recorded in the graph.

Invariant: each answer is recorded, with a node of the graph. Limits: a backward that is captured for later calls
branches on what the forward computed: its tangents have no data, and a call draws its random numbers later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.export.graph_signature import OutputKind
from torch.fx import Node

from functionalize._torch import OpOverload
from functionalize.call_stack import Origin
from functionalize.graph_capture.finish.outputs import GraphOutputs
from functionalize.graph_capture.trace.checkpointing import CheckpointRegions
from functionalize.graph_capture.trace.example_data import ExampleData, NoDataError
from functionalize.reachability import nodes_behind
from functionalize.runtime.decisions import Answers, Decision
from functionalize.runtime.random_state import is_random
from functionalize.tracing.recording_mode import RecordingMode


@dataclass(frozen=True, eq=False)
class Taken:
    """A decision: the node whose value decides, the capture's answer, and where the program is."""

    node: Node
    answer: Any
    origin: Origin


class Decider:
    """Answers a trace's questions about data-dependent symbols."""

    def __init__(
        self,
        recorder: RecordingMode,
        regions: CheckpointRegions,
        data: ExampleData,
        current_origin: Callable[[], Origin],
        answers: Answers | None,
    ) -> None:
        """``data``: of the example inputs; ``answers``: of another capture, whose branches to take, in order."""
        self._recorder, self._regions, self._here, self._answers = recorder, regions, current_origin, answers
        self._data = data
        self._known = dict[Node, Any]()
        self._computed = dict[tuple[Any, ...], Node]()  # by function and arguments
        self._facts = dict[Any, Any]()  # values of integer expressions, which may have several nodes
        self.taken: list[Taken] = []
        self.is_open = True  # whether answers become outputs of the graph
        self._symbols = dict[Any, Any]()  # as the forward left them
        self._forward: set[Node] | None = None  # the nodes before the backward, while it is traced

    def number(self, expression: Any, asked: Any) -> Any:
        """The value of an expression, or of the number ``asked`` that has it; None where it is unknown."""
        from functionalize._torch.symbols.shape_env import kind_of, number_node  # here: loads sympy

        if expression in self._facts:
            return self._facts[expression]
        tracer, computed = self._recorder.tracer, asked
        if (
            self._forward is not None and not self._regions.runs_again
        ):  # the number, and symbols, may come from a tangent
            tracer.sympy_expr_tracker.update(self._symbols)
            computed = None
        node = number_node(tracer, expression, computed)
        answer = None if node is None else self._answered(node, kind_of(expression, asked))
        if answer is not None and all(symbol.is_integer for symbol in expression.free_symbols):
            self._facts[expression] = answer
        return answer

    def result(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The data-dependent result of an op; None where it cannot be computed."""
        return self._answered(self._recorder.op_node(op, args, kwargs), None)

    def close(self) -> list[Taken]:
        """The decisions; from now on only their answers are given."""
        self.is_open = False
        return self.taken

    @contextmanager
    def in_backward(self, forward: set[Node]) -> Iterator[None]:
        """While the backward is traced: it may branch on the values of these nodes."""
        self._forward, self._symbols = forward, dict(self._recorder.tracer.sympy_expr_tracker)
        try:
            yield
        finally:
            self._forward = None

    def _answers_by(self, node: Node) -> bool:
        """Whether the value of a node may be an output of the graph."""
        if self.is_open or self._forward is None:
            return self.is_open
        own = nodes_behind([node], lambda source: source not in self._forward)  # type: ignore[operator]
        return not any(source.op == "placeholder" or is_random(source) for source in own)

    def _answered(self, node: Node, cls: type | None) -> Any:
        """The value of a node; ``cls``: the class of number to convert it to; None for the value as it is."""
        # A second run takes the branches of the first.
        first = self._regions.first_of(node) if self._regions.runs_again else self._first_like(node)
        if node not in self._known and first in self._known:
            self._known[node] = self._known[first] if cls is None else cls(self._known[first])
        if node not in self._known:
            answer = self._answer(node) if self._answers_by(node) else None
            if answer is None:
                return None
            self._known[node] = answer if cls is None else cls(answer)
            self.taken.append(Taken(node, self._known[node], self._here()))
        return self._known[node]

    def _first_like(self, node: Node) -> Node:
        """The first node that computed a Python number from the same nodes: what was decided about it holds again."""
        if node.op != "call_function" or isinstance(node.target, OpOverload) or node.kwargs:
            return node
        return self._computed.setdefault((node.target, node.args), node)

    def _answer(self, node: Node) -> Any:
        if self._answers is not None:
            return self._answers[len(self.taken)] if len(self.taken) < len(self._answers) else None
        try:
            return self._data.value(node)
        except NoDataError:
            return None


class DecisionsOfGraph:
    """The decisions of a program, and then those of its backward, as outputs of the graph."""

    def __init__(self, decider: Decider | None, outputs: GraphOutputs) -> None:
        self.all = list[Decision]()
        self._decider, self._outputs = decider, outputs
        self._add([] if decider is None else decider.close())

    @contextmanager
    def of_backward(self, forward: set[Node]) -> Iterator[list[int]]:
        """While the backward is traced: yields a list, which gets the outputs that are added at the end."""
        added = list[int]()
        if self._decider is None:
            yield added
            return
        count = len(self._decider.taken)
        try:
            with self._decider.in_backward(forward):
                yield added
        finally:
            added += self._add(self._decider.taken[count:], of_backward=True)

    def _add(self, taken: Sequence[Taken], of_backward: bool = False) -> list[int]:
        made = [
            Decision(str(t.origin.decisive), t.answer, self._outputs.add(t.node, OutputKind.USER_OUTPUT), of_backward)
            for t in taken
        ]
        self.all += made
        return [decision.output for decision in made]
