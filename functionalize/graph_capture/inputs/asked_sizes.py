"""The sizes that ``dynamic_shapes`` asks for: a program that supports only a part of them is refused.

Invariant: an error names a size that was asked for and that the program does not support. Limits: of a wide range some
sizes are tried: the ends, small ones, and those near the numbers that the program compares with; of several sizes each
alone, and all at their ends. Each call checks the conditions themselves.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from functionalize._torch.autograd import in_backward
from functionalize._torch.symbols.sizes import hint_of
from functionalize.call_stack import Origin
from functionalize.errors import InputMismatchError

_TRIED = 256  # numbers to try of a range
_LARGE = (1009, 65_537, 1_000_003)  # tried where there is no upper bound; they have few divisors
_ANY = "Dim.AUTO, which allows the sizes that the program supports"
_BACKWARD = "the backward, which runs if a caller differentiates the results"  # instead of a line
_NO_BACKWARD = "capture under torch.no_grad() if no caller differentiates the results"


class _Size(NamedTuple):
    """One size that may differ, as a spec has it."""

    place: str  # in messages
    name: str
    spec: Any  # a Dim, or Dim.AUTO and the like
    now: Any  # in the trace
    symbol: Any  # when the trace began; None for a number
    variable: str  # the name of its Dim, or of this dimension alone
    derive: Callable[[Any], Any] | None  # computes it from the variable, where they differ

    def of(self, value: Any) -> Any:
        """The size, for a value of its variable."""
        return value if self.derive is None else self.derive(value)

    @property
    def example(self) -> int:
        """The size that it has in this trace."""
        return int(self.now) if self.symbol is None else int(hint_of(self.now))


class _Variable(NamedTuple):
    """A number that may differ, and its bounds.

    ``made``: what makes a Dim with other bounds; None where the spec asks for no range.
    """

    made: str | None
    low: int
    high: int | None
    example: int

    @classmethod
    def of(cls, size: _Size) -> _Variable:
        from functionalize._torch.symbols.symbols import NamedDim, may_specialize

        spec, example = size.spec, size.example
        if size.derive is not None:
            spec, start = spec.root, size.derive(0)
            example = (example - start) // (size.derive(1) - start)
        if isinstance(spec, NamedDim):
            made: str | None = f"Dim({spec.__name__!r}, "
        else:
            bounded = not may_specialize(spec) and (spec.min, spec.max) != (None, None)
            made = "Dim.DYNAMIC(" if bounded else None
        high = int(spec.max) if isinstance(spec.max, int) else None
        return cls(made, max(2 if size.derive is None else 1, int(spec.min or 0)), high, example)

    def tried(self, constants: Iterable[int]) -> list[int]:
        """Numbers to try: all of a short range, else small ones, the ends, and those near to some constants."""
        high = self.low + _TRIED if self.high is None else self.high
        numbers = {self.example, *range(self.low, min(high, self.low + _TRIED) + 1), high - 1, high}
        numbers |= {near for constant in constants for near in (constant - 1, constant, constant + 1)}
        numbers |= set(_LARGE) if self.high is None else set()
        return sorted(n for n in numbers if self.low <= n and (self.high is None or n <= self.high))


class AskedSizes:
    """The sizes that a spec asks for, and whether a program is right for all of them.

    Unless ``strict``, the sizes of one call count more than the spec, which is followed as far as they allow.
    """

    def __init__(
        self,
        dims: Mapping[int, Mapping[int, Any]],
        fakes: Mapping[int, torch.Tensor],
        label: Callable[[int], str],
        *,
        strict: bool,
    ) -> None:
        """``dims``: by tensors' identity, then by dimension; ``label``: the name of a tensor in messages."""
        self._strict = strict
        self.returned = False  # whether the program has
        self._sizes = [
            _size(label(key), dim, spec, fakes[key].size(dim))
            for key, by_dim in dims.items()
            for dim, spec in by_dim.items()
        ]
        self._variables: dict[str, _Variable] = {}
        for size in sorted(self._sizes, key=lambda size: size.derive is not None):
            self._variables.setdefault(size.variable, _Variable.of(size))

    def __bool__(self) -> bool:
        """Whether some sizes may differ."""
        return bool(self._sizes)

    def lines_noted(self, environment: Any, now: Callable[[], Origin]) -> contextlib.AbstractContextManager[None]:
        """Record conditions on sizes with the lines that ask for them. ``now``: where the program is."""

        def line() -> Any:
            return _BACKWARD if self.returned and in_backward() else now().location

        ours = self._sizes and hasattr(environment, "noting_lines")
        return environment.noting_lines(line) if ours else contextlib.nullcontext()

    def relate(self) -> None:
        """Pass the spec to the trace: which sizes are equal, and their bounds.

        Raises:
            InputMismatchError: the examples have other sizes.
        """
        first: dict[str, Any] = {}
        for size in self._sizes:
            low, high = size.spec.min, size.spec.max
            if size.derive is None:
                self._assume(
                    size,
                    size.now == first.setdefault(size.variable, size.now),
                    ("one size for all dimensions of that name"),
                )
            if low is not None and low > 0:
                self._assume(size, size.now >= low, f"{low} or more")
            if isinstance(high, int):
                self._assume(size, size.now <= high, f"{high} or less")
        for size in self._sizes:
            source = first.get(size.variable)
            if size.derive is not None and source is not None:
                self._assume(size, size.now == size.of(source), size.name)
            elif size.of(self._variables[size.variable].example) != size.example:
                self._assume(size, False, size.name)

    def name(self, environment: Any) -> None:
        """Record the caller's names of the symbols, where the trace keeps them."""
        from functionalize._torch.symbols.symbols import NamedDim

        named = [size for size in reversed(self._sizes) if isinstance(size.spec, NamedDim)]
        if hasattr(environment, "dims"):
            environment.dims.update((size.symbol, size.name) for size in named if size.symbol and size.derive is None)

    def _assume(self, size: _Size, condition: Any, expected: str) -> None:
        from functionalize._torch.symbols.symbols import assume

        if condition if type(condition) is bool else hint_of(condition):
            assume(condition)
        elif self._strict:
            raise InputMismatchError(
                f"{size.place} is {size.example}, but dynamic_shapes asks for {expected}",
                hint="pass an example of such a size, or change dynamic_shapes",
            )

    def check(self, environment: Any) -> None:
        """Raise where the program supports only a part of these sizes, unless the spec leaves that open.

        Raises:
            InputMismatchError: names the size, the line that does not support it, and what to ask for instead.
        """
        if not self._strict or not self._sizes:
            return
        from functionalize._torch.symbols.symbols import TakenForGranted, may_specialize

        granted = TakenForGranted(environment, {size.symbol: size.name for size in self._sizes if size.symbol})
        for size in self._sizes:
            if not may_specialize(size.spec) and granted.is_constant(size.now):
                raise _constant(size, granted, self._symbols({}))
        for size in self._sizes:
            variable = self._variables[size.variable]
            if variable.made is None or size.symbol is None:
                continue
            tried = variable.tried(granted.constants)
            broken = [granted.broken_by(self._symbols({size.variable: number})) for number in tried]
            if any(condition is not None for condition in broken):
                larger = _larger_example(size, granted, self._symbols({}))
                raise _narrowed(size, variable, dict(zip(tried, broken, strict=True)), granted, larger)
        self._check_ends(granted)

    def _check_ends(self, granted: Any) -> None:
        """Raise where the program does not support all sizes at their ends together."""
        variables = {name: variable for name, variable in self._variables.items() if variable.made is not None}
        lowest = {name: each.low for name, each in variables.items()}
        highest = {name: _LARGE[-1] if each.high is None else each.high for name, each in variables.items()}
        for values in (lowest, highest):
            condition = granted.broken_by(self._symbols(values))
            if condition is not None:
                asked = [size for size in self._sizes if size.variable in values]
                sizes = dict.fromkeys(f"{size.name} = {size.of(values[size.variable])}" for size in asked)
                at, why = granted.said(condition)
                raise InputMismatchError(
                    f"dynamic_shapes asks for sizes that the program does not support: {', '.join(sizes)}\n"
                    f"    at   {at}\n"
                    f"    why  {why}",
                    hint=f"ask for a smaller range, or for {_ANY}",
                )

    def _symbols(self, changed: Mapping[str, int]) -> dict[Any, int]:
        """The value of each symbol when some variables have other values than in the example."""
        values = {name: variable.example for name, variable in self._variables.items()} | dict(changed)
        return {size.symbol: size.of(values[size.variable]) for size in self._sizes if size.symbol}


def _size(label: str, dim: int, spec: Any, now: Any) -> _Size:
    from functionalize._torch.symbols.symbols import DerivedDim, NamedDim

    place, short = f"dimension {dim} of {label}", f"{label.split('`')[1]}.size({dim})"
    symbol = None if type(now) is int else now.node.expr
    if isinstance(spec, DerivedDim):
        return _Size(place, spec.__name__, spec, now, symbol, spec.root.__name__, spec.fn)
    name = spec.__name__ if isinstance(spec, NamedDim) else short
    return _Size(place, name, spec, now, symbol, name, None)


def _larger_example(size: _Size, granted: Any, example: Mapping[Any, int]) -> tuple[Any, str] | None:
    """The condition by which a size that the program computes is 0 or 1 in the example, and what example to pass."""
    larger = None if size.symbol is None else granted.larger(size.symbol, example)
    if larger is None:
        return None
    from functionalize._torch.symbols.symbols import NamedDim

    condition, value = larger
    asked = f" and a Dim with min={value}" if isinstance(size.spec, NamedDim) and size.derive is None else ""
    why = (
        "the program computes another size from it, which is 0 or 1 in this example, and a program is captured "
        "separately for sizes 0 and 1"
    )
    return condition, f"an example in which {size.place} is {value} or more{asked}: {why}"


def _constant(size: _Size, granted: Any, example: Mapping[Any, int]) -> InputMismatchError:
    larger, said = _larger_example(size, granted, example), granted.said_of(size.name)
    said = granted.said(larger[0]) if said is None and larger is not None else said
    at = "" if said is None else f"\n    at   {said[0]}\n    why  {said[1]}"
    if size.symbol is None and size.now > 1:
        hint = "pass an example that is not a fake tensor (a fake tensor's mode has fixed its size), or use Dim.STATIC"
    elif size.symbol is None:
        hint = (
            "pass an example of size 2 or more (a program is captured separately for sizes 0 and 1), or use Dim.STATIC"
        )
    elif larger is not None:
        hint = f"pass {larger[1]}; or use Dim.STATIC"
    else:
        hint = "Dim.AUTO or Dim.STATIC, or change what the program does with the size"
    if said is not None and said[0] == _BACKWARD:
        hint = f"{_NO_BACKWARD}, or {hint}"
    what = f"dynamic_shapes makes {size.place} dynamic, but the program supports only the size {int(size.now)}"
    return InputMismatchError(f"{what}{at}", hint=hint)


def _narrowed(
    size: _Size, variable: _Variable, broken: Mapping[int, Any], granted: Any, larger: tuple[Any, str] | None
) -> InputMismatchError:
    wrong = next(number for number, condition in broken.items() if condition is not None)
    at, why = granted.said(broken[wrong])
    low, high = size.of(variable.low), None if variable.high is None else size.of(variable.high)
    asked = f"from {low} on" if high is None else f"from {low} to {high}"
    right = [number for number, condition in broken.items() if condition is None]
    if granted.equates(broken[wrong]):
        advice = ["one Dim for both sizes"]
    else:
        dims = _other_dims(variable, list(broken), right, derived=size.derive is not None)
        dims = (dim if size.derive is None else size.name.replace(size.variable, dim) for dim in dims)
        advice = [_NO_BACKWARD] * (at == _BACKWARD) + list(dims)
        advice = advice if larger is None or larger[0] != broken[wrong] else [larger[1], *advice]
    return InputMismatchError(
        f"dynamic_shapes asks for {size.place} {asked}, but the program does not support {size.of(wrong)}\n"
        f"    at   {at}\n"
        f"    why  {why}",
        hint=", or ".join([*advice, _ANY]),
    )


def _other_dims(variable: _Variable, tried: list[int], right: Sequence[int], *, derived: bool) -> Iterator[str]:
    """The Dim around the example whose sizes the program supports, as code; of every n-th size if need be."""
    for step in sorted({1, math.gcd(*right)} - {0}):
        run = [number for number in tried if number % step == 0]
        if variable.example not in run or (step > 1 and (derived or "'" not in str(variable.made))):
            continue
        middle = run.index(variable.example)
        start = next((n + 1 for n in range(middle, -1, -1) if run[n] not in right), 0)
        end = next((n for n in range(middle, len(run)) if run[n] not in right), len(run))
        if end - start > 1:
            highest = "" if end == len(run) and variable.high is None else f", max={run[end - 1] // step}"
            bounds = f"min={run[start] // step}{highest})"
            made = str(variable.made)
            yield (
                f"{made}{bounds}" if step == 1 else f"{step} * {made.replace(chr(39), chr(39) + 'part_of_', 1)}{bounds}"
            )
            return
