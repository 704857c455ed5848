"""What the families give: models by name, each built in some ways of which the first that eager runs counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


class NotApplicable(Exception):
    """A way to make arguments that is not for this model."""


@dataclass(frozen=True)
class Candidate:
    """A model, and what makes arguments for it: other values each time, of the same shapes."""

    model: nn.Module
    inputs: Callable[[], Call]


@dataclass(frozen=True)
class Family:
    """The models of one library. ``names`` and ``candidates`` import it when they are called."""

    name: str
    names: Callable[[], Sequence[str]]
    candidates: Callable[[str], Iterator[Candidate]]


def smallest(names: Sequence[str]) -> str:
    """Of models of one kind, the one whose name says that it is small."""
    sizes = ("test_", "atto", "femto", "pico", "nano", "xxs", "tiny", "xs", "mini", "lite", "small", "micro", "_s")

    def rank(name: str) -> tuple[int, int, int, str]:
        size = next((place for place, word in enumerate(sizes) if word in name), len(sizes))
        numbers = [int(number) for number in re.findall(r"\d+", name)]
        return size, min(numbers, default=0), len(name), name

    return min(names, key=rank)


def by_module(modules: Mapping[str, str]) -> list[str]:
    """One model for each module that defines some, of ``modules`` by their names."""
    kinds: dict[str, list[str]] = {}
    for name, module in modules.items():
        kinds.setdefault(module, []).append(name)
    return sorted(smallest(names) for names in kinds.values())
