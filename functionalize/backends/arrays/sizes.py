"""Sizes that a program over arrays takes: those of the capture, where they are numbers, and conditions on the others.

Invariant: what an operator asked of sizes as it was decomposed counts like what the program asked. Limits: symbols of a
backend's own, as JAX has them, are held to their bounds by that backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functionalize.errors import InputMismatchError
from functionalize.runtime.guards.sizes import SizeGuards
from functionalize.runtime.metadata import GraphInput


class ArraySizes:
    """Holds the arrays of calls to them. ``looks``: what the inputs that are in the graph look like."""

    def __init__(
        self, entries: Sequence[GraphInput], looks: Mapping[int, torch.Tensor], guards: SizeGuards | None
    ) -> None:
        """``guards``: of the capture. To be made when the graph is decomposed."""
        self._entries, self._looks = entries, looks
        self._guards = guards and _narrowed(guards, looks)

    def check(self, arrays: Mapping[int, Any]) -> None:
        """Raise where a call's arrays, by the numbers of inputs, have others.

        Raises:
            InputMismatchError: says which argument and what is expected.
        """
        for number, look in self._looks.items():
            if number in arrays:
                check_array(self._entries[number], look, arrays[number].shape)
        known = all(type(size) is int for array in arrays.values() for size in array.shape)
        if self._guards is not None and known:
            shown = {number: torch.empty(array.shape, device="meta") for number, array in arrays.items()}
            self._guards.check([shown.get(number) for number in range(len(self._entries))])


def _narrowed(guards: SizeGuards, looks: Mapping[int, torch.Tensor]) -> SizeGuards:
    from functionalize._torch.symbols.symbols import environment_of  # here: loads sympy

    environment = environment_of(looks.values())
    return guards if environment is None else guards.narrowed(environment)


def fits(sizes: Sequence[Any], shape: Sequence[Any]) -> bool:
    """Whether a shape has some sizes, where these are no symbols."""
    pairs = zip(sizes, shape, strict=False)
    return len(sizes) == len(shape) and all(type(size) is not int or size == actual for size, actual in pairs)


def check_array(entry: GraphInput, expected: Any, shape: Sequence[int]) -> None:
    """Hold the shape of an array to the size that an input had, where that is no symbol.

    Raises:
        InputMismatchError: it has another.
    """
    if not fits(expected.size(), shape):
        raise InputMismatchError(
            f"{entry.label} has the shape {tuple(shape)}, but was captured with {tuple(expected.size())}",
            hint="pass an array of that shape, or capture with dynamic_shapes",
        )
