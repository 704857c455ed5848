"""What a program takes for granted of the sizes of its arguments: as text in its file, and as a check of each call.

Invariant: what is written is checked; a condition that this table cannot read is refused when the file is written.
Limits: sizes that the caller passes; for data-dependent sizes the program itself has assertions.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize.errors import InputMismatchError

Size = int | str  # a number, or an expression of symbols


@dataclass
class Sizes:
    """Sizes of arguments by name, the bounds of symbols, conditions on these, and what they were at the capture."""

    arguments: dict[str, list[Size]] = field(default_factory=dict)
    bounds: dict[str, list[int | None]] = field(default_factory=dict)
    conditions: list[str] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)

    def example(self, name: str) -> list[int] | None:
        """The sizes of an argument at the capture, where some may differ."""
        if name not in self.arguments:
            return None
        sizes = self.arguments[name]
        return [evaluate(size, self.examples) if isinstance(size, str) else size for size in sizes]

    def renamed(self, names: Mapping[str, str]) -> Sizes:
        """The same, with other names of symbols."""
        arguments = {
            name: [renamed(size, names) if isinstance(size, str) else size for size in sizes]
            for name, sizes in self.arguments.items()
        }
        bounds = {renamed(symbol, names): ends for symbol, ends in self.bounds.items()}
        examples = {renamed(symbol, names): size for symbol, size in self.examples.items()}
        return Sizes(arguments, bounds, [renamed(condition, names) for condition in self.conditions], examples)

    def check(self, values: Mapping[str, Any]) -> None:
        """Hold the arguments of a call to it.

        Raises:
            InputMismatchError: says which argument and what is expected.
        """
        known: dict[str, int] = {}
        for name, dim, expected, actual in self._found(values):
            if isinstance(expected, str) and expected.isidentifier():
                known.setdefault(expected, actual)
                self._check_bounds(f"dimension {dim} of the argument `{name}`", expected, actual)
        for name, dim, expected, actual in self._found(values):
            wanted = evaluate(expected, known) if isinstance(expected, str) else expected
            if wanted != actual:
                raise InputMismatchError(
                    f"dimension {dim} of the argument `{name}` is {actual}, but the program was captured for {wanted}",
                    hint="pass a tensor of that size, or capture again",
                )
        for condition in self.conditions:
            if not evaluate(condition, known):
                sizes = ", ".join(f"{symbol} = {size}" for symbol, size in known.items())
                raise InputMismatchError(
                    f"the program was captured for sizes with {condition}, and this call has {sizes}",
                    hint="pass sizes that satisfy this condition, or capture again",
                )

    def _found(self, values: Mapping[str, Any]) -> Iterator[tuple[str, int, Size, int]]:
        for name, sizes in self.arguments.items():
            value = values[name]
            if isinstance(value, torch.Tensor):
                for dim, (expected, actual) in enumerate(zip(sizes, value.size(), strict=True)):
                    yield name, dim, expected, actual

    def _check_bounds(self, label: str, symbol: str, actual: int) -> None:
        low, high = self.bounds.get(symbol, [None, None])
        if (low is not None and actual < low) or (high is not None and actual > high):
            raise InputMismatchError(
                f"{label} is {actual}, but the program was captured for {low} to {'any' if high is None else high}",
                hint="pass a size in that range, or capture again (a program is captured separately for sizes 0 and 1)",
            )


def renamed(text: str, names: Mapping[str, str]) -> str:
    """An expression with other names of symbols."""
    return re.sub(r"[^\W\d]\w*", lambda match: names.get(match[0], match[0]), text)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: lambda one, other: one and other,
    ast.BitOr: lambda one, other: one or other,
    ast.USub: operator.neg,
    ast.Invert: operator.not_,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {  # as sympy and torch print them
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda one, other: -(-one // other),
    "IntTrueDiv": operator.truediv,
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
    "Max": max,
    "Min": min,
    "PowByNatural": operator.pow,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": float,
    "TruncToInt": int,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
}


def evaluate(text: str, known: Mapping[str, int]) -> Any:
    """The value of an expression of symbols.

    Raises:
        ValueError: it has something else than arithmetic and comparisons.
    """
    return _value(_parsed(text), known)


@functools.lru_cache(maxsize=1 << 10)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, known: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, known), _value(right, known))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand, known))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, known), _value(right, known))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(arg, known) for arg in args))
    raise ValueError(f"`{ast.unparse(node)}` is not an arithmetic expression of sizes")
