"""Decisions that a program takes by data while it is captured: answered by the example inputs, and noted in the graph.

Invariant: what is answered is noted, as a node of the graph with its answer. Limits: a backward that is captured for
later calls branches on what the forward computed: its tangents have no data, and what it draws a call draws later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.export.graph_signature import OutputKind
from torch.fx import Node

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
    """One decision: the node whose value decides, what the capture found there, and where."""

    node: Node
    answer: Any
    origin: Origin


class Decider:
    """Answers what a trace asks of data-dependent symbols."""

    def __init__(
        self,
        recorder: RecordingMode,
        regions: CheckpointRegions,
        data: ExampleData,
        here: Callable[[], Origin],
        answers: Answers | None,
    ) -> None:
        """``data``: of the example inputs; ``answers``: those of another capture, in order, whose branches to take."""
        self._recorder, self._regions, self._here, self._answers = recorder, regions, here, answers
        self._data = data
        self._known = dict[Node, Any]()
        self._facts = dict[Any, Any]()  # of expressions of integers, which may have several nodes
        self.taken: list[Taken] = []
        self.is_open = True  # whether answers become outputs of the graph
        self._symbols = dict[Any, Any]()  # as the forward left them
        self._forward: set[Node] | None = None  # while the backward is traced, which asks what it cannot do without

    def number(self, expression: Any, asked: Any) -> Any:
        """What an expression comes to, that of the number ``asked`` if it is one's; None where nobody can tell."""
        from functionalize._torch.symbols.decisions import kind_of, number_node  # here: loads sympy

        if expression in self._facts:
            return self._facts[expression]
        tracer, computed = self._recorder.tracer, asked
        if (
            self._forward is not None and not self._regions.runs_again
        ):  # it may have read it, and symbols, off a tangent
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
        """What was decided; nothing more is answered than what was."""
        self.is_open = False
        return self.taken

    @contextmanager
    def in_backward(self, forward: set[Node]) -> Iterator[None]:
        """While the backward is traced, which branches on the values of these nodes."""
        self._forward, self._symbols = forward, dict(self._recorder.tracer.sympy_expr_tracker)
        try:
            yield
        finally:
            self._forward = None

    def _answers_by(self, node: Node) -> bool:
        """Whether what a node comes to may be an output of the graph."""
        if self.is_open or self._forward is None:
            return self.is_open
        own = nodes_behind([node], lambda one: one not in self._forward)  # type: ignore[operator]
        return not any(one.op == "placeholder" or is_random(one) for one in own)

    def _answered(self, node: Node, kind: type | None) -> Any:
        """The value of a node; ``kind``: of number, if not as it comes."""
        first = self._regions.first_of(node) if self._regions.runs_again else node  # a second run does as the first did
        if node not in self._known and first in self._known:
            self._known[node] = self._known[first] if kind is None else kind(self._known[first])
        if node not in self._known:
            answer = self._answer(node) if self._answers_by(node) else None
            if answer is None:
                return None
            self._known[node] = answer if kind is None else kind(answer)
            self.taken.append(Taken(node, self._known[node], self._here()))
        return self._known[node]

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
        """While the backward is traced: gets the outputs that are added, also where there is none in the end."""
        added = list[int]()
        if self._decider is None:
            yield added
            return
        known = len(self._decider.taken)
        try:
            with self._decider.in_backward(forward):
                yield added
        finally:
            added += self._add(self._decider.taken[known:], of_backward=True)

    def _add(self, taken: Sequence[Taken], of_backward: bool = False) -> list[int]:
        made = [
            Decision(str(t.origin.decisive), t.answer, self._outputs.add(t.node, OutputKind.USER_OUTPUT), of_backward)
            for t in taken
        ]
        self.all += made
        return [decision.output for decision in made]
