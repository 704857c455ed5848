"""Decisions that a program takes by data while it is captured: answered by the example inputs, and noted in the graph.

Invariant: what is answered is noted, as a node of the graph with its answer. Limits: a backward that is captured for
later calls has no data, as its tangents have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from functionalize.call_stack import Origin
from functionalize.graph_capture.checkpointing import CheckpointRegions
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

    def __init__(
        self,
        recorder: RecordingMode,
        regions: CheckpointRegions,
        example: tuple[Callable[[Node], Any], Callable[[torch.Generator], torch.Tensor]],
        here: Callable[[], Origin],
        answers: Answers | None,
    ) -> None:
        """``example``: what a placeholder is for the example inputs, and the state of a generator before the program.

        ``answers``: what to answer, in order, where the program is to go the way of another capture.
        """
        self._recorder, self._regions, self._here, self._answers = recorder, regions, here, answers
        self._data = ExampleData(recorder.tracer, *example, regions.drawn_again)
        self._known = dict[Node, Any]()
        self._facts = dict[Any, Any]()  # of expressions of integers, which may have several nodes
        self._inside = defaultdict[int, list[Any]](list)  # by region of a checkpoint: what was answered there
        self._again: dict[Any, Iterator[Any]] = {}  # by region, and the backward that has it run again
        self.taken: list[Taken] = []
        self.is_open = True  # whether answers become outputs of the graph

    def number(self, expression: Any, asked: Any) -> Any:
        """What an expression comes to, that of the number ``asked`` if it is one's; None where nobody can tell."""
        from functionalize._torch.decisions import kind_of, number_node  # here: loads sympy

        if expression in self._facts:
            return self._facts[expression]
        node = number_node(self._recorder.tracer, expression, asked)
        answer = None if node is None else self._answered(node, kind_of(expression, asked))
        if answer is not None and all(symbol.is_integer for symbol in expression.free_symbols):
            self._facts[expression] = answer
        return answer

    def result(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an op gives that only the data tell; None where nobody can tell."""
        return self._answered(self._recorder.op_node(op, args, kwargs), None)

    def close(self) -> list[Taken]:
        """What was decided; nothing more is answered than what was."""
        self.is_open = False
        return self.taken

    def _answered(self, node: Node, kind: type | None) -> Any:
        """The value of a node; ``kind``: of number, if not as it comes."""
        if node not in self._known:
            region = self._regions.running()
            if region is not None and region[1] is not None:  # which does what it did before
                answer = next(self._again.setdefault(region, iter(self._inside[region[0]])), None)
            else:
                answer = self._answer(node) if self.is_open else None
            if answer is None:
                return None
            self._known[node] = answer if kind is None else kind(answer)
            if region is None or region[1] is None:
                self.taken.append(Taken(node, self._known[node], self._here()))
            if region is not None and region[1] is None:
                self._inside[region[0]].append(answer)
        return self._known[node]

    def _answer(self, node: Node) -> Any:
        if self._answers is not None:
            return self._answers[len(self.taken)] if len(self.taken) < len(self._answers) else None
        try:
            return self._data.value(node)
        except NoDataError:
            return None
