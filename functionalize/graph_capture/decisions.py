"""Decisions that a program takes by data while it is captured: answered by the example inputs, and noted in the graph.

Invariant: what is answered is noted, as a node of the graph with its answer. Limits: a backward that is captured for
later calls has no data, as its tangents have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from functionalize.call_stack import Origin
from functionalize.graph_capture.example_data import ExampleData, NoDataError
from functionalize.runtime.decisions import Answers
from functionalize.tracing.recording_mode import RecordingMode


@dataclass(frozen=True, eq=False)
class Taken:
    """One decision: the node whose value decides, what the capture found there, and where."""

    node: Node
    answer: Any
    origin: Origin


class Decider:
    """Answers what a trace asks of symbols that only the data tell."""

    def __init__(self, recorder: RecordingMode, data: ExampleData, here: Callable[[], Origin], answers: Answers | None):
        """``answers``: what to answer, in order, where the program is to go the way of another capture."""
        self._recorder, self._data, self._here, self._answers = recorder, data, here, answers
        self._known = dict[Node, Any]()
        self.taken: list[Taken] = []
        self._open = True  # whether answers become outputs of the graph

    def number(self, expression: Any, asked: Any) -> Any:
        """What an expression comes to; None where nobody can tell. ``asked``: the number that is asked, if it is one."""
        from functionalize._torch.decisions import kind_of, number_node  # here: loads sympy

        node = number_node(self._recorder.tracer, expression, asked)
        return None if node is None else self._answered(node, kind_of(expression, asked))

    def result(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an op gives that only the data tell; None where nobody can tell."""
        return self._answered(self._recorder.op_node(op, args, kwargs), None)

    def close(self) -> list[Taken]:
        """What was decided; nothing more is answered than what was."""
        self._open = False
        return self.taken

    def _answered(self, node: Node, kind: type | None) -> Any:
        """The value of a node; ``kind``: of number, if not as it comes."""
        if node not in self._known:
            answer = self._answer(node) if self._open else None
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
