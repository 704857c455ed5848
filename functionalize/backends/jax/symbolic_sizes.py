"""Sizes that differ from call to call, as ``jax.export`` writes them: of torch's symbols, with their bounds.

Invariant: what a file takes is what the program is right for; a condition that no file can hold is refused. Limits:
sizes of arguments; conditions that compare one size with a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jax import export

from functionalize._torch.symbols.symbols import sizes_of
from functionalize.errors import UnsupportedProgramError

_BOUND = re.compile(r"\w+ [<>]=? \d+|\d+ [<>]=? \w+")
_SIZE = re.compile(r"[\w\s*+-]+")


class SymbolicSizes:
    """The sizes of arguments, by name.

    Raises:
        UnsupportedProgramError: they are related in a way that no StableHLO file can hold.
    """

    def __init__(self, looks: Mapping[str, torch.Tensor]) -> None:
        self._looks = looks
        self._texts, bounds, conditions, _ = sizes_of(looks)
        self._refuse_others(conditions)
        self._scope = export.SymbolicScope(tuple(_constraints(bounds)))

    def _refuse_others(self, conditions: list[str]) -> None:
        sizes = {size for several in self._texts.values() for size in several if isinstance(size, str)}
        unknown = [f"sizes with {one}" for one in conditions if not _BOUND.fullmatch(one)]
        unknown += [f"a size of {one}" for one in sorted(sizes) if not _SIZE.fullmatch(one)]
        if unknown:
            raise UnsupportedProgramError(
                f"the program supports only {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}",
                why="a StableHLO file can hold bounds of sizes, but no other conditions",
                hint=(
                    "capture without dynamic_shapes, once for each size; or call `to_jax()`, which supports all "
                    "conditions"
                ),
                at="the arguments",
            )

    def of(self, look: torch.Tensor) -> tuple[Any, ...]:
        """The shape of an argument, which looked like this."""
        if not self._texts:
            return tuple(look.size())
        name = next(name for name, one in self._looks.items() if one is look)
        return tuple(export.symbolic_shape(", ".join(map(str, self._texts[name])), scope=self._scope))


def _constraints(bounds: Mapping[str, Any]) -> Iterator[str]:
    for name, (low, high) in sorted(bounds.items()):
        yield f"{name} >= {max(low or 0, 1)}"
        if high is not None:
            yield f"{name} <= {high}"
