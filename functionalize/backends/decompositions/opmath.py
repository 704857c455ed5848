"""Numbers beside tensors of 16 bits, as eager's kernels take them: in 32 bits (torch's ``opmath_type``), or rounded.

Engines round a number to the 16 bits of the tensor, or do not, as they like; what is decomposed here leaves no choice.
Invariant: a call whose numbers 16 bits can hold is left as it is. Limits: kernels of the CPU; a data-dependent
number is taken in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from functionalize._torch import SYMBOLS, pytree

aten = torch.ops.aten
_NARROW = (torch.float16, torch.bfloat16)
# Kernels that take their numbers, and tensors without dimensions behind the first, in 32 bits.
_WIDE = frozenset(
    {
        aten.addcdiv.default,
        aten.addcmul.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.celu.default,
        aten.div.Scalar,
        aten.div.Scalar_mode,
        aten.div.Tensor,
        aten.div.Tensor_mode,
        aten.elu.default,
        aten.elu_backward.default,
        aten.floor_divide.Scalar,
        aten.floor_divide.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu.default,
        aten.leaky_relu_backward.default,
        aten.lerp.Scalar,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.softplus.default,
        aten.softplus_backward.default,
        aten.softshrink.default,
        aten.threshold.default,
        aten.threshold_backward.default,
    }
)
# Kernels that round them; engines round the others of this kind by themselves.
_ROUNDING = frozenset(getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def wide(x: Any) -> Any:
    """A tensor as kernels compute with it: 16 bits in 32."""
    return x.float() if x.dtype in _NARROW else x


def counts(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call has a number that is another one in 16 bits than in 32. ``args``: what they look like."""
    if op not in _WIDE and op not in _ROUNDING:
        return False
    dtype = _narrow(args)
    return dtype is not None and any(_differs(op, one, dtype) for one in (*args[1:], *kwargs.values()))


def spelt_out(op: Any) -> Callable[..., Any]:
    """A function of an operator's arguments that gives what eager's kernel gives; NotImplemented: the operator does."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if not counts(op, args, kwargs):
            return NotImplemented
        dtype: Any = _narrow(args)
        if op in _ROUNDING:
            return op(args[0], _rounded(args[1], dtype))
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: x.float() if x.dtype == dtype else x, (args, kwargs)
        )
        return op(*args, **kwargs).to(dtype)

    return function


SPELT_OUT = {op: spelt_out(op) for op in _WIDE | _ROUNDING}
"""By operator, what :func:`spelt_out` gives."""


def _narrow(args: Any) -> torch.dtype | None:
    """The floats of 16 bits that a call computes with; None where it does with others."""
    floats = [one for one in args if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())]
    dtypes = {one.dtype for one in floats if one.dim()} or {one.dtype for one in floats}
    return next((dtype for dtype in _NARROW if dtypes == {dtype}), None)


def _differs(op: Any, value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, torch.Tensor):
        return op in _WIDE and not value.dim() and value.dtype not in (dtype, torch.bool)
    if isinstance(value, SYMBOLS):
        return op in _WIDE
    return isinstance(value, (int, float)) and value == value and _rounded(value, dtype) != value


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The number of a dtype that is nearest; without a tensor, of which a trace would hear."""
    bits = torch.finfo(dtype)
    if not value or math.isinf(value):
        return value
    exponent = max(math.frexp(value)[1], math.frexp(bits.tiny)[1])
    step = math.ldexp(bits.eps, exponent - 1)
    found = round(value / step) * step
    return found if abs(found) <= bits.max else math.copysign(math.inf, value)
