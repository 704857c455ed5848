"""What Python computes with data-dependent integers, as ONNX's own operators.

Invariant: as Python's, as long as 64 bits hold the numbers: divisions go to the lower one, powers are exact. Limits:
shifts by numbers that are known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from onnxscript.ir import DataType

from functionalize.backends.onnx.rewrites.registry import OPSET

_BITS_OF_EXPONENTS = 6  # larger ones are those of 0, 1 and -1, which the last bit tells
_MOST = 62  # bits of a power of two


def _number(value: Any) -> Any:
    return OPSET.Constant(value_int=int(value)) if isinstance(value, int) else value


def _floor_divided(one: Any, other: Any) -> Any:
    """By the rest, which has the sign of the divisor."""
    one, other = _number(one), _number(other)
    return OPSET.Div(OPSET.Sub(one, OPSET.Mod(one, other)), other)


def _power(base: Any, exponent: Any) -> Any:
    """By squares."""
    op, square, exponent = OPSET, _number(base), _number(exponent)
    one, two, most = map(_number, (1, 2, 2**_BITS_OF_EXPONENTS - 2))
    exponent = op.Min(exponent, op.Add(most, op.Mod(exponent, two)))
    found = one
    for bit in range(_BITS_OF_EXPONENTS):
        counts = op.Equal(op.Mod(op.Div(exponent, _number(1 << bit)), two), one)
        found = op.Where(counts, op.Mul(found, square), found)
        square = op.Mul(square, square)
    return found


def _product(one: Any, other: Any) -> Any:
    return OPSET.Mul(_number(one), _number(other))


def _shifting(step: Callable[[Any, int], Any]) -> Callable[[Any, Any], Any]:
    def shifted(number: Any, by: Any) -> Any:
        if not isinstance(by, int):
            raise NotImplementedError("a shift by a data-dependent number, which Python refuses if it is negative")
        while by > _MOST:
            number, by = step(number, 1 << _MOST), by - _MOST
        return step(number, 1 << by)

    return shifted


def _bits(of_truths: str, of_numbers: str) -> Callable[[Any, Any], Any]:
    def computed(one: Any, other: Any) -> Any:
        dtypes = {value.dtype for value in (one, other) if not isinstance(value, int)}
        if not dtypes <= {DataType.BOOL}:
            return getattr(OPSET, of_numbers)(_number(one), _number(other))
        truths = [OPSET.Cast(_number(v), to=DataType.BOOL) if isinstance(v, int) else v for v in (one, other)]
        return getattr(OPSET, of_truths)(*truths)

    return computed


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sym_numel.default: lambda x: OPSET.Size(x),
    operator.floordiv: _floor_divided,
    operator.pow: _power,
    operator.lshift: _shifting(_product),
    operator.rshift: _shifting(_floor_divided),
    operator.and_: _bits("And", "BitwiseAnd"),
    operator.or_: _bits("Or", "BitwiseOr"),
}
"""Functions of Python's, and the number of elements, by functions of values of ONNX that give such."""
