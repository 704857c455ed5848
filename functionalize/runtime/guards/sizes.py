"""Guards on sizes that are symbols: their ranges, equalities, and the conditions that the capture met.

Invariant: a call is computed only for sizes that take the branches on sizes that the capture took.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from functionalize.errors import InputMismatchError
from functionalize.runtime.guards.guard import CallInputs, FastCode, Guard, GuardKind
from functionalize.runtime.metadata import GraphInput


class InputSize(NamedTuple):
    """The size of one input, and its strides."""

    input: int
    size: Any
    stride: Any


Sizes = tuple[InputSize, ...]

_UNBOUNDED = 2**31  # larger upper ends mean that no bound was asked for
_LARGEST = 65_536  # larger upper ends of ranges are not tried
_TRIED = 64  # how many sizes are tried from the end of a range, if the end itself does not meet all conditions


@dataclass(frozen=True)
class Size:
    """A size that may differ from call to call.

    ``name``: that of its ``Dim``, or torch's symbol. ``low``, ``high``: the bounds for calls; a ``high`` of None means
    no bound. ``places``: the dimensions that have this size. ``symbols``: torch's names for it.

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


class SizeGuards(GuardKind):
    """Ranges of symbols, equal sizes, and conditions on both."""

    def __init__(
        self,
        inputs: Sequence[GraphInput],
        layouts: Mapping[int, Any],
        conditions: Iterable[Any],
        ranges: Mapping[Any, Any],
        names: Mapping[Any, str],
    ) -> None:
        """``layouts``: of inputs whose sizes contain symbols, as expressions; ``names``: those that the caller gave."""
        self._inputs, self._layouts = inputs, dict(layouts)
        self._conditions, self._ranges = list(conditions), dict(ranges)
        self._names = {str(symbol): name for symbol, name in names.items()}

    @property
    def inputs(self) -> frozenset[int]:
        """The inputs whose sizes may differ."""
        return frozenset(self._layouts)

    def narrowed(self, environment: Any) -> SizeGuards:
        """These guards, and what a trace has assumed since: the decomposition of an operator compares sizes."""
        from functionalize._torch.symbols.symbols import guards  # here: loads sympy

        return SizeGuards(self._inputs, self._layouts, guards(environment), environment.var_to_range, self._names)

    def of(self, values: Sequence[Any]) -> Sizes:
        """The sizes of a call's inputs that may differ."""
        return tuple(InputSize(number, values[number].size(), values[number].stride()) for number in self._layouts)

    def holds_for(self, sizes: Sizes) -> bool:
        """Whether sizes satisfy these guards."""
        return self._failure_of(sizes) is None

    def check(self, values: Sequence[Any]) -> None:
        """Raise if the sizes of a program's inputs do not satisfy these guards.

        Raises:
            InputMismatchError: the message names the input and the expected size.
        """
        error = self._failure_of(self.of(values))
        if error is not None:
            raise error

    def failure(self, call: CallInputs) -> InputMismatchError | None:
        return None if call.arguments.are_examples else self._failure_of(self.of(call.values))

    def write(self, code: FastCode) -> None:
        """Refuse other sizes than those of the call that passed: conditions on symbols take long to check."""
        code.body.refuse("sizes(inputs) != same_sizes", sizes=self.of, same_sizes=self.of(code.call.values))

    def listed(self) -> Iterator[Guard]:
        """Ranges and conditions, as text in the caller's names."""
        ends = ((symbol, *_ends(bounds)) for symbol, bounds in self._ranges.items() if symbol.is_integer)
        ranges = [f"{low} <= {symbol}" + ("" if high is None else f" <= {high}") for symbol, low, high in ends]
        said = map(self._named, [*ranges, *map(str, self._conditions)])
        return (Guard("the sizes", "satisfy", text) for text in dict.fromkeys(said) if not _SAME.fullmatch(text))

    def described(self) -> list[Size]:
        """The sizes that may differ; sizes with the same name are one, with the bounds of all."""
        described: dict[str, Size] = {}
        for number, layout in self._layouts.items():
            for dim, size in enumerate(layout.size):
                if type(size) is int or not size.is_symbol:
                    continue
                name, place = self._named(str(size)), f"dimension {dim} of {self._inputs[number].quoted}"
                low, high = _ends(self._ranges[size])
                symbols = tuple(symbol for symbol, own_name in self._names.items() if own_name == name) or (name,)
                earlier = described.get(name, Size(name, low, high, (), symbols))
                highs = [end for end in (earlier.high, high) if end is not None]
                places = (*earlier.places, place)
                described[name] = Size(name, max(earlier.low, low), min(highs, default=None), places, symbols)
        return list(described.values())

    def _named(self, text: str) -> str:
        return _SYMBOL.sub(lambda match: self._names.get(match[0], match[0]), text)

    def ends(self, sizes: Sizes) -> Iterator[tuple[str, Sizes]]:
        """The sizes of a call, in turn with each symbol at the lower and at the upper end of its range, and in words.

        A size without an upper end, or with a very large one, is doubled.
        """
        example = {
            size: actual
            for now in sizes
            for size, actual in zip(self._layouts[now.input].size, now.size, strict=True)
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
        return tuple(InputSize(n, tuple(map(number, at.size)), tuple(map(number, at.stride))) for n, at in layouts)

    def _said(self, symbol: Any, sizes: Sizes) -> str:
        places = ((n, dim) for n, at in self._layouts.items() for dim, size in enumerate(at.size) if size == symbol)
        number, dim = next(places)
        size = next(now.size[dim] for now in sizes if now.input == number)
        return f"dimension {dim} of {self._inputs[number].label} = {size}"

    def _failure_of(self, sizes: Sizes) -> InputMismatchError | None:
        numbers: dict[Any, int] = {}
        for what, read in (("dimension", attrgetter("size")), ("stride", attrgetter("stride"))):
            for now in sizes:
                label, expected = self._inputs[now.input].label, read(self._layouts[now.input])
                for dim, (size, actual) in enumerate(zip(expected, read(now), strict=True)):
                    error = self._size_failure(numbers, size, actual, f"{what} {dim} of {label}")
                    if error is not None:
                        return error
        return self._condition_failure(numbers)

    def _size_failure(self, numbers: dict[Any, int], size: Any, actual: int, label: str) -> InputMismatchError | None:
        """Compare one size or stride; the first value of a symbol is recorded in ``numbers``."""
        expected: Any = size
        if type(size) is not int and size.is_symbol:
            expected = numbers.setdefault(size, actual)
            bounds = self._ranges.get(size)
            if bounds is not None and not bounds.lower <= actual <= bounds.upper:
                return InputMismatchError(
                    f"{label} is {actual}, and the program was captured for {_range(*_ends(bounds))}",
                    hint="pass a size in that range, or capture again (sizes 0 and 1 need a capture of their own)",
                )
        elif type(size) is not int:
            value = size.xreplace(numbers)
            expected = int(value) if value.is_number else actual
        if expected == actual:
            return None
        return InputMismatchError(
            f"{label} is {actual}, and the program was captured for {expected}",
            hint="pass a tensor of that size, or capture again",
        )

    def _condition_failure(self, numbers: Mapping[Any, int]) -> InputMismatchError | None:
        for condition in self._conditions:
            holds = condition.xreplace(numbers)
            if holds in (False,) or str(holds) == "False":
                pairs = (f"{self._named(str(symbol))} = {number}" for symbol, number in numbers.items())
                return InputMismatchError(
                    f"the program was captured for sizes with {self._named(str(condition))}, and here "
                    f"{', '.join(dict.fromkeys(pairs))}",
                    hint="pass sizes that satisfy this condition, or capture again",
                )
        return None


_SYMBOL = re.compile(r"\bs\d+\b")  # torch's names of size symbols
_SAME = re.compile(r"Eq\((\w+), \1\)")  # two sizes with one name are equal


def _range(low: int, high: int | None) -> str:
    return f"{low} or more" if high is None else f"{low} to {high}"


def _ends(bounds: Any) -> tuple[int, int | None]:
    low = int(bounds.lower) if bounds.lower > -_UNBOUNDED else 0  # a size is never negative
    return low, int(bounds.upper) if bounds.upper < _UNBOUNDED else None
