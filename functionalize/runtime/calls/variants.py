"""The variants of a captured program: one for each way that the data of its calls decide.

Invariant: a call is computed by a variant all of whose decisions come out as captured. Limits: a program that decides
otherwise when it runs again on the same data is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule

from functionalize.errors import DataDependentError
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.decisions import Answers, Decision, agree
from functionalize.runtime.graphs.graph_forms import asserting


class Variant:
    """One way through a program: a graph for calls that take the same branches on tensor values.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> program = capture(lambda x: x + 1 if x.sum() > 0 else x, (torch.ones(2),))
        >>> _ = program(-torch.ones(2))
        >>> [[decision.answer for decision in variant.decisions] for variant in program.variants]
        [[True], [False]]
    """

    def __init__(self, program: Specialization) -> None:
        self._program = program

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The branches on tensor values, in order; empty if there are none."""
        return self._program.decisions

    @property
    def graph_module(self) -> GraphModule:
        """The graph; its last outputs are the values of the decisions."""
        return self._program.graph_module

    @property
    def signature(self) -> ExportGraphSignature:
        """What each input and output of ``graph_module`` is."""
        return self._program.recorded.signature()

    def with_assertions(self) -> GraphModule:
        """The graph for calls that are sure to decide alike: its decisions are assertions of it, and no outputs.

        Example:
            >>> import torch
            >>> from functionalize import capture
            >>> program = capture(lambda x: x + 1 if x.sum() > 0 else x, (torch.ones(2),))
            >>> graph = program.variants[0].with_assertions()
            >>> graph(torch.ones(2))
            (tensor([2., 2.]),)
        """
        recorded = self._program.recorded
        return asserting(recorded.graph, recorded.root, recorded.metadata)

    def __str__(self) -> str:
        return "\n".join(map(str, self.decisions)) or "no decisions"

    def __repr__(self) -> str:
        return f"Variant({'; '.join(map(str, self.decisions)) or 'no decisions'})"


def agreeing(
    programs: Iterable[Specialization], answers: Mapping[object, Answers], arguments: CallArguments
) -> tuple[Specialization, list[Any]] | None:
    """A program whose decisions begin with some answers, and its inputs for a call that its guards let pass.

    ``answers``: those that are known, by kind of program.
    """
    for program in programs:
        if agree(answers.get(program.kind, ()), program.answers):
            inputs = program.checked(arguments)
            if isinstance(inputs, list):
                return program, inputs
    return None


def too_many(variants: Sequence[Specialization], answers: Answers, bound: int) -> DataDependentError:
    """The error for one variant more than are kept. ``answers``: to the decisions that are known of the call."""
    nearest = max(variants, key=lambda one: _common(answers, one.answers))
    last = nearest.decisions[: len(answers)][-1]
    return DataDependentError(
        f"the calls of the program take more than {bound} different ways through branches on tensor values\n"
        f"    at   {last.location}",
        why=f"each way is a variant, which is captured and kept; here the value is {answers[-1]!r}, and no variant "
        "so far has this value here and the same values before",
        hint="pass a larger cache_size; use tensors instead of numbers if each number needs a variant; use "
        "torch.where or torch.cond; program.variants lists the ways",
    )


def _common(answers: Answers, others: Answers) -> int:
    return sum(agree(answers[:count], others) for count in range(1, len(answers) + 1))


def undecided(answers: Answers, made: Specialization) -> DataDependentError:
    """The error for a program that was captured for a call, whose data do not decide as the capture found."""
    decision = made.decisions[: len(answers)][-1]
    return DataDependentError(
        f"the program takes another branch when it runs on the same data again\n    at   {decision.location}",
        why=f"the value was {decision.answer!r} in the capture, and {answers[-1]!r} in the call: a kernel is not "
        "deterministic, or the value depends on something besides the data",
        hint="use torch.use_deterministic_algorithms(True), or branch on values that rounding does not change",
    )
