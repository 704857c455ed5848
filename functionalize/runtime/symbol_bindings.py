"""What the symbols among a program's sizes stand for in one call.

Invariant: expressions hold no tensor and no trace: layouts are frozen when the capture ends. Limits: a symbol is read
off a size that is linear in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize.aliasing.geometry import Layout


def frozen_number(number: Any) -> Any:
    """A size as an integer, or as the expression of symbols that it is."""
    return number.node.expr if isinstance(number, torch.SymInt) else number


def frozen_layout(layout: Layout) -> Layout:
    """A layout whose sizes are integers and expressions."""
    if layout.static:
        return layout
    size, stride = tuple(map(frozen_number, layout.size)), tuple(map(frozen_number, layout.stride))
    return replace(layout, size=size, stride=stride, offset=frozen_number(layout.offset))


@dataclass(frozen=True)
class SymbolSources:
    """Where a call reads the symbols: sizes of inputs and of the graph's outputs, inputs and outputs that are sizes."""

    inputs: tuple[tuple[int, Layout], ...] = ()
    numbers: tuple[tuple[int, Any], ...] = ()
    outputs: tuple[tuple[int, Layout], ...] = ()
    computed: tuple[tuple[int, Any], ...] = ()  # outputs of the graph that are symbols, which no size tells

    def bind(self, inputs: Sequence[Any], results: Sequence[Any]) -> SymbolBindings:
        """The bindings of one call, from its inputs and the results of its graph."""
        if not (self.inputs or self.numbers or self.outputs or self.computed):
            return _NONE
        bindings = SymbolBindings()
        for number, expression in self.numbers:
            bindings.bind_size(expression, inputs[number])
        for number, layout in self.inputs:
            bindings.bind_layout(layout, inputs[number])
        for output, layout in self.outputs if results else ():
            if results[output] is not None:
                bindings.bind_layout(layout, results[output])
        for output, expression in self.computed if results else ():
            bindings.bind_size(expression, results[output])
        return bindings

    @property
    def told(self) -> set[Any]:
        """The symbols that a call learns."""
        known: set[Any] = set()
        sizes = [size for _, layout in (*self.inputs, *self.outputs) for size in layout.size if type(size) is not int]
        for expression in [*(number for _, number in self.numbers), *sizes]:
            unknown = expression.free_symbols - known
            if len(unknown) == 1 and _slope(expression, *unknown):
                known |= unknown
        return known

    def untold(self, layouts: Iterable[Layout], numbers: Iterable[Any]) -> list[Any]:
        """The symbols of layouts and numbers that a call does not learn, by name."""
        needed = [n for layout in layouts for n in (*layout.size, *layout.stride, layout.offset)]
        free = {s for number in (*needed, *numbers) if hasattr(number, "free_symbols") for s in number.free_symbols}
        return sorted(free - self.told if free else free, key=str)


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
        known = expression.xreplace(self._known)
        start, slope = known.xreplace({symbol: 0}), _slope(known, symbol)
        if slope and (number - start) % slope == 0:
            value = int((number - start) / slope)
            if known.xreplace({symbol: value}) == number:
                self._known[symbol] = value

    def number(self, size: Any) -> Any:
        """A size in this call; the expression itself where no tensor tells some symbol of it."""
        if type(size) is int or not hasattr(size, "xreplace"):
            return size
        value = size.xreplace(self._known)
        return int(value) if type(value) is int or value.is_number else size

    def layout(self, layout: Layout) -> Layout:
        """A layout in this call."""
        if layout.static:
            return layout
        size, stride = tuple(map(self.number, layout.size)), tuple(map(self.number, layout.stride))
        return replace(layout, size=size, stride=stride, offset=self.number(layout.offset))


def _slope(expression: Any, symbol: Any) -> Any:
    """By how much an expression that is linear in a symbol grows with it; zero where it is not linear."""
    at_zero, at_one, at_two = (expression.xreplace({symbol: value}) for value in (0, 1, 2))
    return at_one - at_zero if at_one - at_zero == at_two - at_one else 0  # the smaller of two sizes is not


_NONE = SymbolBindings()
