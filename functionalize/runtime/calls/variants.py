"""The variants of a captured program, as its users see them: one for each set of branches that its calls took."""

from __future__ import annotations

from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule

from functionalize.runtime.calls.specialization import Specialization
from functionalize.runtime.decisions import Decision
from functionalize.runtime.graphs.graph_forms import asserting


class Variant:
    """A graph for calls that take the same branches on tensor values.

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
        """The branches on tensor values, in order."""
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
        """The graph for calls that are sure to take these branches: it asserts its decisions, and does not return them.

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
