"""The ways of a program by its data, as a tree: what all have in common once, and a branch for each other answer.

Invariant: each way ends in one row. Limits: rows in order, with their depth; what lies deep is not folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from functionalize.report.model import Branch


class Decision(Protocol):
    """What a program decided by its data."""

    @property
    def location(self) -> str:
        """The line that asked, as ``file:line in function: text``."""

    @property
    def answer(self) -> object:
        """What it got."""


def branches(ways: Sequence[Sequence[Decision]]) -> tuple[Branch, ...]:
    """The rows of the tree of some ways, each a program's decisions in order; none where nothing is decided."""
    rows = list[Branch]()
    ahead = [(0, 0, list(range(len(ways))))] if any(ways) else []
    while ahead:  # of ways that went together so far: how deep the tree is there, and after how many decisions
        depth, count, group = ahead.pop()
        if count:
            last = ways[group[0]][count - 1]
            place, _, text = last.location.partition(": ")
            rows.append(Branch(depth, place, text, repr(last.answer), len(group)))
        rows += [Branch(depth, way=number + 1) for number in group if len(ways[number]) == count]
        parts: dict[str, list[int]] = {}
        for number in group:
            if len(ways[number]) > count:
                parts.setdefault(repr(ways[number][count].answer), []).append(number)
        ahead += [(depth + (len(parts) > 1), count + 1, part) for part in reversed(parts.values())]
    return tuple(rows)
