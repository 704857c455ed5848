"""Gradients of wrappers: autograd sees these, forward and backward compute with their parts.

In: the results of a forward, incoming tangents, the results of a backward. Out: wrappers over results, the parts of
tangents, gradients as autograd passes them on. Guarantees: a gradient has the class and the metadata that autograd
gave it when the program was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from functionalize._torch.subclasses.wrappers import Wrapping, as_tangent
from functionalize.refusals.tensors import OTHER_TANGENT, WRAPPER_TWICE_DIFFERENTIATED


@dataclass(frozen=True, eq=False)
class WrapperResult:
    """A result that is a wrapper."""

    output: int  # of the program
    wrapping: Wrapping
    positions: tuple[int, ...]  # of its parts, among the results
    inputs: tuple[int | None, ...]  # for each part, the input that it is: sizes may be bound to that very tensor
    tangent: Wrapping  # that the backward was captured for

    def made(self, inputs: Sequence[Any], results: Sequence[Any]) -> torch.Tensor:
        """The wrapper of a call's inputs and results."""
        places = zip(self.positions, self.inputs, strict=True)
        return self.wrapping.wrapped([results[n] if number is None else inputs[number] for n, number in places])

    def parts(self, tangent: Any) -> Sequence[torch.Tensor | None]:
        """The parts of its tangent, each None if that is.

        Raises:
            RuntimeError: the tangent is of another class, or has other metadata.
        """
        if tangent is None:
            return [None] * len(self.positions)
        converted = as_tangent(tangent, self.tangent)
        if converted is None:
            raise OTHER_TANGENT.error(kind=self.wrapping.name, other=type(tangent).__name__)
        return self.tangent.parts_of(converted)


@dataclass(frozen=True, eq=False)
class WrapperGradient:
    """The gradient of an input, where the input or the gradient is a wrapper."""

    input: int  # of the program
    wrapping: Wrapping | None  # of the gradient; None: it is plain
    positions: tuple[int, ...]  # of its parts, among the gradients of the joint graph

    def made(self, gradients: Sequence[Any]) -> torch.Tensor | None:
        """The gradient, of its parts; None where these are missing."""
        if any(gradient is None for gradient in gradients):
            return None
        return gradients[0] if self.wrapping is None else self.wrapping.wrapped(gradients)


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients among the outputs of a joint graph, by their positions."""

    of_inputs: tuple[int | None, ...]  # for each plain input
    of_wrappers: tuple[WrapperGradient, ...]
    wrapper_results: tuple[WrapperResult, ...]  # whose tangents are made of parts

    @cached_property
    def all(self) -> Sequence[int | None]:
        """The positions for plain inputs, then for the parts of gradients that are made of parts."""
        return [*self.of_inputs, *(position for gradient in self.of_wrappers for position in gradient.positions)]

    def opened(
        self, numbers: Sequence[int], tangents: Sequence[Any], of_wrappers: Sequence[Any]
    ) -> Sequence[torch.Tensor | None]:
        """The tangents of plain results, then the parts of those of wrappers; ``numbers``: the results of both."""
        if not of_wrappers:
            return [tangents[number] for number in numbers]
        pairs = zip(self.wrapper_results, of_wrappers, strict=True)
        parts = [part for result, tangent in pairs for part in result.parts(tangent)]
        return [*(tangents[number] for number in numbers[: len(numbers) - len(parts)]), *parts]

    def refuse_derivative(self) -> None:
        """Raise if autograd would have to differentiate gradients that are made of parts."""
        if self.wrapper_results or self.of_wrappers:
            wrappings = [
                *(result.wrapping for result in self.wrapper_results),
                *(each.wrapping for each in self.of_wrappers),
            ]
            names = (wrapping.name for wrapping in wrappings if wrapping is not None)
            raise WRAPPER_TWICE_DIFFERENTIATED.error(kind=next(names, "tensor subclass"))
