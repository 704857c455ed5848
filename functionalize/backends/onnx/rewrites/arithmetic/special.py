"""Special functions, of which ONNX has none but ``erf``.

Invariant: computed with float64, and as exact as the dtype. Limits: ``erfinv`` of at most 32 bits.
Sources: Stirling's series for the gamma function, with recurrence and reflection (NIST DLMF, 5.4, 5.5 and 5.11);
M. Giles, "Approximating the erfinv function", GPU Computing Gems (2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from functionalize.backends.onnx.rewrites.registry import Rewrite, rewrite

aten = torch.ops.aten

_STEPS = 7  # by which a small argument is moved up, to where the series has all digits of float64
_OF_LGAMMA = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_OF_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_OF_TRIGAMMA = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
_ERFINV_NEAR = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_ERFINV_FAR = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def _wide(of_float64: Rewrite) -> Rewrite:
    """A function of float64, of any real dtype."""

    def computed(values: Any) -> Any:
        if values.is_complex():
            return NotImplemented
        dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
        found = of_float64(values.to(torch.float64))
        return found if found is NotImplemented else found.to(dtype)

    return computed


def _polynomial(factors: Sequence[float], x: Any) -> Any:
    """By Horner's scheme, the highest power first."""
    found = x * factors[0] + factors[1]
    for factor in factors[2:]:
        found = found * x + factor
    return found


def _moved_up(x: Any) -> tuple[Any, Any, Any, Any]:
    """Where ``x`` is to be reflected to ``1 - x`` and where that is small; where it begins, and where steps lead to."""
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    is_small = y < _STEPS
    return reflected, is_small, torch.where(is_small, y, 1.0), torch.where(is_small, y + _STEPS, y)


@rewrite(aten.lgamma.default)
@_wide
def lgamma(x: Any) -> Any:
    """Below 1/2 by reflection; the sine of what is left of whole numbers has all digits, and is 0 at the poles."""
    reflected, is_small, moved, z = _moved_up(x)
    product = moved
    for step in range(1, _STEPS):
        product = product * (moved + step)
    series = _polynomial(_OF_LGAMMA[::-1], 1 / (z * z)) / z
    found = (z - 0.5) * (z.log() - 1) + (math.log(2 * math.pi) - 1) / 2 + series
    found = torch.where(is_small, found - product.log(), found)
    sine = (math.pi * (x - aten.round.default(x))).sin().abs()
    found = torch.where(reflected, math.log(math.pi) - sine.log() - found, found)
    return torch.where(x.isinf(), math.inf, found)


@rewrite(aten.digamma.default)
@_wide
def digamma(x: Any) -> Any:
    """The derivative of :func:`lgamma`, by the same steps; no number at the poles, and infinite at zero by its sign."""
    reflected, is_small, moved, z = _moved_up(x)
    steps = 1 / moved
    for step in range(1, _STEPS):
        steps = steps + 1 / (moved + step)
    square = 1 / (z * z)
    found = z.log() - 0.5 / z - _polynomial(_OF_DIGAMMA[::-1], square) * square
    found = torch.where(is_small, found - steps, found)
    angle = math.pi * (x - aten.round.default(x))
    found = torch.where(reflected, found - math.pi * angle.cos() / angle.sin(), found)
    return torch.where(x == 0, -1 / x, torch.where(reflected & (angle == 0), math.nan, found))


def _trigamma(values: Any) -> Any:
    """The derivative of :func:`digamma`, by the same steps.

    At poles and beside them it has the sine of torch's kernel, that of a product rounded to the argument's own dtype.
    """
    if values.is_complex():
        return NotImplemented
    own = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return _wide(lambda x: _reflected_trigamma(x, (math.pi * own).sin().to(torch.float64)))(values)


def _reflected_trigamma(x: Any, sine: Any) -> Any:
    reflected, is_small, moved, z = _moved_up(x)
    steps = 1 / (moved * moved)
    for step in range(1, _STEPS):
        steps = steps + 1 / ((moved + step) * (moved + step))
    square = 1 / (z * z)
    found = 1 / z + 0.5 * square + _polynomial(_OF_TRIGAMMA[::-1], square) * square / z
    found = torch.where(is_small, found + steps, found)
    return torch.where(reflected, math.pi**2 / (sine * sine) - found, found)


@rewrite(aten.polygamma.default)
def polygamma(n: int, values: Any) -> Any:
    """Of the first two orders, which are the derivatives that gradients of ``lgamma`` and ``digamma`` take."""
    return {0: digamma, 1: _trigamma}[n](values) if n in (0, 1) else NotImplemented


def _erfinv(x: Any) -> Any:
    w = -((1 - x) * (1 + x)).log()
    found = torch.where(w < 5, _polynomial(_ERFINV_NEAR, w - 2.5), _polynomial(_ERFINV_FAR, w.sqrt() - 3)) * x
    return torch.where(x.abs() == 1, x * math.inf, found)


@rewrite(aten.erfinv.default)
def erfinv(values: Any) -> Any:
    return NotImplemented if values.dtype is torch.float64 else _wide(_erfinv)(values)
