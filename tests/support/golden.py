"""The base of golden tests: one text for both ways to remove, and equality with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest

from functionalize.verify import assert_equivalent
from tests.support.graphs import REMOVES, render, skeleton, trace


class Golden(expecttest.TestCase):
    """Compares a function's graph with the text in the test."""

    def traced(self, func: Callable[..., Any], *inputs: Any) -> Traced:
        """The function's graph. It is the same by copies with views removed, and equals eager."""
        graphs = [trace(func, *inputs, remove=remove) for remove in REMOVES]
        self.assertEqual(*[skeleton(graph) for graph in graphs])
        for remove in REMOVES:
            assert_equivalent(func, *inputs, remove=remove, tracing_mode="fake")
        return Traced(self, render(graphs[0]))


class Traced:
    """A graph as text, waiting for the text that it should be."""

    def __init__(self, case: Golden, text: str) -> None:
        self._case, self._text = case, text

    def reads(self, expected: str) -> None:
        """Compare. Under EXPECTTEST_ACCEPT the text in the test is replaced."""
        self._case.assertExpectedInline(self._text, expected, skip=1)
