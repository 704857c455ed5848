"""What the symbols among a program's sizes stand for in one call.

Invariant: expressions hold no tensor and no trace: layouts are frozen when the capture ends. Limits: a symbol is read
off a size that is linear in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize.aliasing.geometry import Layout


def frozen_number(number: Any) -> Any:
    """A size as an integer, or as the expression of symbols that it is."""
    return number.node.expr if isinstance(number, torch.SymInt) else number


def frozen_layout(layout: Layout) -> Layout:
    """A layout whose sizes are integers and expressions."""
    return _with_numbers(layout, frozen_number)


def _with_numbers(layout: Layout, number: Callable[[Any], Any]) -> Layout:
    if layout.static:
        return layout
    size, stride = tuple(map(number, layout.size)), tuple(map(number, layout.stride))
    return replace(layout, size=size, stride=stride, offset=number(layout.offset))


@dataclass(frozen=True)
class SymbolSources:
    """Where a call reads the symbols: sizes of inputs, inputs that are sizes, sizes of the graph's outputs."""

    inputs: tuple[tuple[int, Layout], ...] = ()
    numbers: tuple[tuple[int, Any], ...] = ()
    outputs: tuple[tuple[int, Layout], ...] = ()

    def bind(self, inputs: Sequence[Any], results: Sequence[Any]) -> SymbolBindings:
        """The bindings of one call, from its inputs and the results of its graph."""
        if not (self.inputs or self.numbers or self.outputs):
            return _NONE
        bindings = SymbolBindings()
        for number, expression in self.numbers:
            bindings.bind_size(expression, inputs[number])
        for number, layout in self.inputs:
            bindings.bind_layout(layout, inputs[number])
        for output, layout in self.outputs if results else ():
            if results[output] is not None:
                bindings.bind_layout(layout, results[output])
        return bindings


class SymbolBindings:
    """The integers that symbols stand for."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def bind_layout(self, layout: Layout, tensor: torch.Tensor) -> None:
        """Read symbols off a tensor of a known layout."""
        for expression, number in zip(layout.size, tensor.size(), strict=True):
            if type(expression) is not int:
                self.bind_size(expression, number)

    def bind_size(self, expression: Any, number: int) -> None:
        """Learn a symbol from what an expression that is linear in it comes to."""
        unknown = expression.free_symbols.difference(self._known)
        if len(unknown) != 1:
            return
        (symbol,) = unknown
        at_zero, at_one, at_two = (expression.xreplace({**self._known, symbol: value}) for value in (0, 1, 2))
        linear = at_one - at_zero == at_two - at_one  # not the smaller of two sizes
        if linear and at_one != at_zero and (number - at_zero) % (at_one - at_zero) == 0:
            value = int((number - at_zero) / (at_one - at_zero))
            if expression.xreplace({**self._known, symbol: value}) == number:
                self._known[symbol] = value

    def number(self, size: Any) -> Any:
        """A size in this call; the expression itself where no tensor tells some symbol of it."""
        if type(size) is int or not hasattr(size, "xreplace"):
            return size
        value = size.xreplace(self._known)
        return int(value) if type(value) is int or value.is_number else size

    def layout(self, layout: Layout) -> Layout:
        """A layout in this call."""
        return _with_numbers(layout, self.number)


_NONE = SymbolBindings()
