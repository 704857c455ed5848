"""Decisions that a program takes by data: what a capture found, and whether a call finds the same.

A graph with decisions is right for calls whose data decide alike. They are outputs of the graph, which is pure: a call
that takes another branch has written nothing.

Invariant: two captures of a program ask the same first question, and after equal answers the same next one. Limits:
programs that ask by the data and by what a graph knows nothing of: the time, Python's own random numbers.
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

Answers = tuple[Any, ...]  # of a program's decisions, in order; or of the first ones


@dataclass(frozen=True)
class Decision:
    """A branch on a tensor value that a program took.

    ``location``: the line that asked, as ``file:line in function: text``. ``answer``: what it got.
    ``of_backward``: asked by the captured backward, which exported graphs have not.
    """

    location: str
    answer: Any
    output: int  # of the graph, whose value it is
    of_backward: bool = False

    def __str__(self) -> str:
        return f"{self.location} -> {self.answer}"


class Diverged(Exception):
    """A call takes another branch; not seen by callers. ``answers``: those known; the last one differs."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self.answers = answers


def same_answer(one: Any, other: Any) -> bool:
    """Whether a program cannot tell two numbers apart."""
    if type(one) is float and type(other) is float:
        zeros = one == other and math.copysign(1, one) == math.copysign(1, other)  # which have a sign
        return zeros or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def agree(answers: Answers, others: Answers) -> bool:
    """Whether decisions begin with some answers."""
    return len(answers) <= len(others) and all(map(same_answer, answers, others))


def check(decisions: Sequence[Decision], results: Sequence[Any]) -> None:
    """Compare decisions with the results of a graph.

    Raises:
        Diverged: one came out otherwise.
    """
    for number, decision in enumerate(decisions):
        compare(results[decision.output], decisions, number)


def compare(value: Any, decisions: Sequence[Decision], number: int) -> None:
    """Compare one decision with what it comes to.

    Raises:
        Diverged: it came out otherwise.
    """
    if not same_answer(value, decisions[number].answer):
        raise Diverged((*(decision.answer for decision in decisions[:number]), value))


_PACKAGES = ("site-packages", "dist-packages")


def warn_of_assertions(decisions: Sequence[Decision], *, is_exporting: bool) -> None:
    """Warn the user's line that what it exports asserts decisions; ``is_exporting``: as the program was captured."""
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
    """Have a graph assert its decisions, by nodes that exporters know."""
    results: Any = graph.output_node().args[0]
    for decision in decisions:
        node = results[decision.output]
        if isinstance(node, Node) and not decision.of_backward:
            with graph.inserting_after(node):
                agrees = graph.call_function(operator.eq, (node, decision.answer))
            with graph.inserting_after(agrees):
                graph.call_function(torch.ops.aten._assert_scalar.default, (agrees, str(decision)))


def with_checks(graph: Graph, decisions: Sequence[Decision]) -> None:
    """Have a graph compare each decision as soon as it is computed: what follows may fail for data of another way.

    In the order in which they are taken: one that comes out otherwise says that those before it did not.
    """
    results: Any = graph.output_node().args[0]
    places = {node: place for place, node in enumerate(graph.nodes)}
    last: Node | None = None  # after which the next is compared
    for number, decision in enumerate(decisions):
        node = results[decision.output]
        if isinstance(node, Node):
            check_one: Any = functools.partial(compare, decisions=decisions, number=number)
            check_one.__name__, check_one.__module__ = f"decision_{number}", "functionalize"
            if last is None or places[last] < places[node]:
                last = node
            with graph.inserting_after(last):
                check_node = graph.call_function(check_one, (node,))
            places[check_node], last = places[last], check_node
