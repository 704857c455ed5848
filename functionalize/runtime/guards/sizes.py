"""What a program takes for granted of sizes that are symbols, checked at each call.

Invariant: a call is computed only for sizes for which each decision that the capture took on sizes holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.errors import InputMismatchError

Sizes = tuple[tuple[int, Any, Any], ...]  # of inputs, by number: their sizes and their strides

_UNBOUNDED = 2**31  # upper ends from here on are none that anybody asked for
_LARGEST = 65_536  # upper end of a range that is tried
_TRIED = 64  # sizes next to the end of a range, where the end itself does not meet all conditions


def no_sizes(inputs: Sequence[Any]) -> Sizes:
    """The sizes that may differ where all of them are numbers."""
    return ()


@dataclass(frozen=True)
class Size:
    """A size that may differ from call to call.

    ``name``: that of its ``Dim``, else torch's symbol. ``low``, ``high``: the sizes that a call may have; ``high`` is
    None where there is no bound. ``places``: the dimensions that have it. ``symbols``: torch's names of it.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> batch = torch.export.Dim("batch", max=64)
        >>> program = capture(lambda x: x + 1, (torch.zeros(3, 2),), dynamic_shapes={"x": {0: batch}})
        >>> print(*program.sizes)
        batch: 2 to 64 (dimension 0 of `x`)
    """

    name: str
    low: int
    high: int | None
    places: tuple[str, ...]
    symbols: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {_range(self.low, self.high)}" + (f" ({', '.join(self.places)})" if self.places else "")


class SizeGuards:
    """Ranges of symbols, equal sizes, and conditions on both."""

    def __init__(
        self,
        layouts: Mapping[int, Any],
        labels: Mapping[int, str],
        conditions: Iterable[Any],
        ranges: Mapping[Any, Any],
        names: Mapping[Any, str],
    ) -> None:
        """``layouts``: of inputs whose sizes have symbols, as expressions; ``labels``: what messages call them.

        ``names``: of symbols that the caller has named.
        """
        self._layouts, self._labels = dict(layouts), dict(labels)
        self._conditions, self._ranges = list(conditions), dict(ranges)
        self._names = {str(symbol): name for symbol, name in names.items()}

    @property
    def inputs(self) -> frozenset[int]:
        """The inputs whose sizes may differ."""
        return frozenset(self._layouts)

    def narrowed(self, environment: Any) -> SizeGuards:
        """These, and what a trace has taken for granted since: decomposing an operator compares sizes."""
        from functionalize._torch.symbols.symbols import guards  # here: loads sympy

        return SizeGuards(self._layouts, self._labels, guards(environment), environment.var_to_range, self._names)

    def of(self, values: Sequence[Any]) -> Sizes:
        """The sizes of a call's inputs that may differ."""
        return tuple((number, values[number].size(), values[number].stride()) for number in self._layouts)

    def holds_for(self, sizes: Sizes) -> bool:
        """Whether they are such."""
        try:
            self._check(sizes)
        except InputMismatchError:
            return False
        return True

    def listed(self) -> Iterator[Any]:
        """Ranges and conditions, as text in the caller's names."""
        ends = ((symbol, *_ends(bounds)) for symbol, bounds in self._ranges.items() if symbol.is_integer)
        found = [f"{low} <= {one}" + ("" if high is None else f" <= {high}") for one, low, high in ends]
        said = map(self._named, [*found, *map(str, self._conditions)])
        yield from (text for text in dict.fromkeys(said) if not _SAME.fullmatch(text))

    def described(self) -> list[Size]:
        """The sizes that may differ; of sizes with one name the bounds that all have."""
        found: dict[str, Size] = {}
        for number, layout in self._layouts.items():
            for dim, size in enumerate(layout.size):
                if type(size) is int or not size.is_symbol:
                    continue
                name, place = self._named(str(size)), f"dimension {dim} of {self._labels[number].split(maxsplit=2)[-1]}"
                low, high = _ends(self._ranges[size])
                symbols = tuple(symbol for symbol, given in self._names.items() if given == name) or (name,)
                known = found.get(name, Size(name, low, high, (), symbols))
                highs = [end for end in (known.high, high) if end is not None]
                places = (*known.places, place)
                found[name] = Size(name, max(known.low, low), min(highs, default=None), places, symbols)
        return list(found.values())

    def _named(self, text: str) -> str:
        return _SYMBOL.sub(lambda found: self._names.get(found[0], found[0]), text)

    def check(self, values: Sequence[Any]) -> None:
        """Raise where the sizes of a call are not such.

        Raises:
            InputMismatchError: says which input and what is expected.
        """
        self._check(self.of(values))

    def ends(self, sizes: Sizes) -> Iterator[tuple[str, Sizes]]:
        """The sizes of a call, with each that may differ at the lower end of its range, and at the upper.

        In words, and as such; one without an upper end, or with a very large one, is doubled.
        """
        example = {
            size: actual
            for number, now, _ in sizes
            for size, actual in zip(self._layouts[number].size, now, strict=True)
            if type(size) is not int and size.is_symbol
        }
        for symbol, actual in example.items():
            equal = {symbol} | {
                other
                for condition in self._conditions
                if type(condition).__name__ == "Equality" and symbol in condition.args
                for other in condition.args
                if other.is_symbol
            }
            bounds = self._ranges[symbol]
            low, high = int(bounds.lower), int(bounds.upper) if bounds.upper <= _LARGEST else 2 * actual
            for tried in (range(low, actual), range(high, actual, -1)):
                made = (self._sized(example | dict.fromkeys(equal, number)) for number in tried[:_TRIED])
                sized = next(filter(self.holds_for, made), None)
                if sized is not None:
                    yield self._said(symbol, sized), sized

    def _sized(self, example: Mapping[Any, int]) -> Sizes:
        def number(size: Any) -> int:
            return int(size if type(size) is int else size.xreplace(dict(example)))

        layouts = self._layouts.items()
        return tuple((n, tuple(map(number, at.size)), tuple(map(number, at.stride))) for n, at in layouts)

    def _said(self, symbol: Any, sizes: Sizes) -> str:
        places = ((n, dim) for n, at in self._layouts.items() for dim, size in enumerate(at.size) if size == symbol)
        number, dim = next(places)
        size = next(now[dim] for n, now, _ in sizes if n == number)
        return f"dimension {dim} of {self._labels[number]} = {size}"

    def _check(self, sizes: Sizes) -> None:
        known: dict[Any, int] = {}
        for number, now, _ in sizes:
            for dim, (size, actual) in enumerate(zip(self._layouts[number].size, now, strict=True)):
                self._meet(known, size, actual, f"dimension {dim} of {self._labels[number]}")
        for number, _, now in sizes:
            for dim, (stride, actual) in enumerate(zip(self._layouts[number].stride, now, strict=True)):
                self._meet(known, stride, actual, f"stride {dim} of {self._labels[number]}")
        for condition in self._conditions:
            holds = condition.xreplace(known)
            if holds in (False,) or str(holds) == "False":
                said = ", ".join(dict.fromkeys(f"{self._named(str(one))} = {number}" for one, number in known.items()))
                raise InputMismatchError(
                    f"the program was captured for sizes with {self._named(str(condition))}, and here {said}",
                    hint="pass sizes that satisfy this condition, or capture again",
                )

    def _meet(self, known: dict[Any, int], size: Any, actual: int, label: str) -> None:
        expected: Any = size
        if type(size) is not int and size.is_symbol:
            expected = known.setdefault(size, actual)
            bounds = self._ranges.get(size)
            if bounds is not None and not bounds.lower <= actual <= bounds.upper:
                raise InputMismatchError(
                    f"{label} is {actual}, and the program was captured for {_range(*_ends(bounds))}",
                    hint="pass a size in that range, or capture again (sizes 0 and 1 need a capture of their own)",
                )
        elif type(size) is not int:
            value = size.xreplace(known)
            expected = int(value) if value.is_number else actual
        if expected != actual:
            raise InputMismatchError(
                f"{label} is {actual}, and the program was captured for {expected}",
                hint="pass a tensor of that size, or capture again",
            )


_SYMBOL = re.compile(r"\bs\d+\b")  # as torch names those of sizes
_SAME = re.compile(r"Eq\((\w+), \1\)")  # what a common name says


def _range(low: int, high: int | None) -> str:
    return f"{low} or more" if high is None else f"{low} to {high}"


def _ends(bounds: Any) -> tuple[int, int | None]:
    low = int(bounds.lower) if bounds.lower > -_UNBOUNDED else 0  # a size is never negative
    return low, int(bounds.upper) if bounds.upper < _UNBOUNDED else None
