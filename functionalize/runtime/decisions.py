"""Branches on tensor values: the answers that a capture recorded, and whether a call gives the same ones.

A graph with decisions is right for calls that take the same branches. Decisions are outputs of the graph, which is
pure: a call that takes another branch has written nothing.

Invariant: two captures of a program ask the same first question, and after equal answers the same next one. Limits:
programs whose questions depend on more than the graph computes: the time, Python's own random numbers.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from functionalize.call_stack import user_frames
from functionalize.errors import DecisionsAssertedWarning

Answers = tuple[Any, ...]  # to a program's decisions, in order; or to the first few


@dataclass(frozen=True)
class Decision:
    """A branch on a tensor value that a program took.

    ``location``: the line that branches, as ``file:line in function: text``. ``answer``: the value it got.
    ``of_backward``: whether the captured backward branches, which exported graphs do not contain.
    """

    location: str
    answer: Any
    output: int  # of the graph: its value
    of_backward: bool = False

    def __str__(self) -> str:
        return f"{self.location} -> {self.answer}"


class Diverged(Exception):
    """A call takes another branch; not seen by callers. ``answers``: those so far; the last one differs."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self.answers = answers


def same_answer(value: Any, other: Any) -> bool:
    """Whether two numbers are the same to a program."""
    if type(value) is float and type(other) is float:
        zeros = value == other and math.copysign(1, value) == math.copysign(1, other)  # -0.0 is not 0.0
        return zeros or (math.isnan(value) and math.isnan(other))
    return bool(value == other)


def agree(answers: Answers, others: Answers) -> bool:
    """Whether ``others`` begin with ``answers``."""
    return len(answers) <= len(others) and all(map(same_answer, answers, others))


def check(decisions: Sequence[Decision], results: Sequence[Any]) -> None:
    """Compare decisions with the results of a graph.

    Raises:
        Diverged: a decision has another answer.
    """
    for number, decision in enumerate(decisions):
        compare(results[decision.output], decisions, number)


def compare(value: Any, decisions: Sequence[Decision], number: int) -> None:
    """Compare one decision with its value in a call.

    Raises:
        Diverged: the value differs.
    """
    if not same_answer(value, decisions[number].answer):
        raise Diverged((*(decision.answer for decision in decisions[:number]), value))


_PACKAGES = ("site-packages", "dist-packages")


def warn_of_assertions(decisions: Sequence[Decision], *, is_exporting: bool) -> None:
    """Warn at the user's line that the export asserts decisions; ``is_exporting``: as in `capture`."""
    if not decisions:
        return
    lines = "".join(f"\n    at   {line}" for line in dict.fromkeys(map(str, decisions)))
    hints = [
        "use torch.where or torch.cond instead of the branch",
        "to export another way, call the program with such data, and export it afterwards",
    ]
    if not is_exporting and any(part in decision.location for decision in decisions for part in _PACKAGES):
        hints.insert(0, "use capture(..., is_exporting=True), with which libraries avoid such branches")
    message = (
        "the program branches on tensor values: the exported program asserts the branches that it took, and refuses "
        f"calls that take others{lines}\n"
        f"    try  {'; '.join(hints)}"
    )
    frame = next(user_frames(), None)
    if frame is None:
        warnings.warn(message, DecisionsAssertedWarning, stacklevel=2)
        return
    warnings.warn_explicit(
        message,
        DecisionsAssertedWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def with_assertions(graph: Graph, decisions: Sequence[Decision]) -> None:
    """Have a graph assert its decisions, with nodes that exporters support."""
    results: Any = graph.output_node().args[0]
    for decision in decisions:
        node = results[decision.output]
        if isinstance(node, Node) and not decision.of_backward:
            with graph.inserting_after(node):
                agrees = graph.call_function(operator.eq, (node, decision.answer))
            with graph.inserting_after(agrees):
                graph.call_function(torch.ops.aten._assert_scalar.default, (agrees, str(decision)))


def with_checks(graph: Graph, decisions: Sequence[Decision]) -> None:
    """Have a graph compare each decision as soon as it is computed: what follows may fail on another branch.

    Decisions are compared in the order in which they are taken, so those before one that differs have agreed.
    """
    results: Any = graph.output_node().args[0]
    places = {node: place for place, node in enumerate(graph.nodes)}
    last: Node | None = None  # after this node, the next decision is compared
    for number, decision in enumerate(decisions):
        node = results[decision.output]
        if isinstance(node, Node):
            compare_one: Any = functools.partial(compare, decisions=decisions, number=number)
            compare_one.__name__, compare_one.__module__ = f"decision_{number}", "functionalize"
            if last is None or places[last] < places[node]:
                last = node
            with graph.inserting_after(last):
                check_node = graph.call_function(compare_one, (node,))
            places[check_node], last = places[last], check_node
