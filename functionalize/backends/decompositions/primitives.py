"""What torch's references are made of (``torch.ops.prims``), by operators that backends have rows for.

Many of torch's decompositions end in these primitives. Invariant: the operands of one that computes element by element
have one dtype, so that the operator of the same name computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten, prims = torch.ops.aten, torch.ops.prims
Function = Callable[..., Any]

_SAME = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cos",
    "cosh",
    "bitwise_not",
    "ceil",
    "digamma",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "exp2",
    "floor",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "log10",
    "neg",
    "reciprocal",
    "round",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
    "rsqrt",
    "isfinite",
]
_SAME_OF_TWO = ["atan2", "fmax", "fmin", "fmod", "gcd", "hypot", "igamma", "igammac", "maximum", "minimum", "nextafter"]
_TENSORS = [
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "eq",
    "ge",
    "gt",
    "le",
    "lt",
    "ne",
    "mul",
    "sub",
    "add",
    "remainder",
]


def _broadcast_in_dim(a: Any, shape: Any, dimensions: Any) -> Any:
    for dim in range(len(shape)):
        if dim not in dimensions:
            a = aten.unsqueeze.default(a, dim)
    return aten.expand.default(a, shape)


def _div(a: Any, b: Any) -> Any:
    whole = isinstance(a, torch.Tensor) and not (a.is_floating_point() or a.is_complex())
    return aten.div.Tensor_mode(a, b, rounding_mode="trunc") if whole else aten.div.Tensor(a, b)


def _every(a: Any, dims: Any) -> Any:
    return list(range(a.dim())) if dims is None else list(dims)


def _prod(inp: Any, dims: Any, *, output_dtype: Any = None) -> Any:
    for dim in sorted(_every(inp, dims), reverse=True):
        inp = aten.prod.dim_int(inp, dim, dtype=output_dtype or inp.dtype)
    return inp


def _iota(length: Any, *, start: Any, step: Any, dtype: Any, **options: Any) -> Any:
    return aten.arange.start_step(start, start + length * step, step, dtype=dtype)


_SPELT: dict[str, Function] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": lambda a, dtype: aten._to_copy.default(a, dtype=dtype),
    "var": lambda inp, dims, correction=1, *, output_dtype=None: aten.var.correction(inp, dims, correction=correction),
    "sum": lambda inp, dims, *, output_dtype=None: aten.sum.dim_IntList(
        inp, _every(inp, dims), dtype=output_dtype or inp.dtype
    ),
    "amax": lambda inp, dims, *, output_dtype=None: aten.amax.default(inp, _every(inp, dims)),
    "amin": lambda inp, dims, *, output_dtype=None: aten.amin.default(inp, _every(inp, dims)),
    "prod": _prod,
    "div": _div,
    "pow": lambda a, b: aten.pow.Tensor_Tensor(a, b),
    "iota": _iota,
    "collapse_view": lambda a, start, end: aten.view.default(
        a, [*a.size()[:start], a.size()[start : end + 1].numel(), *a.size()[end + 1 :]]
    ),
    "split_dim": lambda a, dim, outer: aten.view.default(
        a, [*a.size()[:dim], outer, a.size(dim) // outer, *a.size()[dim + 1 :]]
    ),
    "squeeze": lambda a, dims: aten.squeeze.dims(a, dims),
    "transpose": lambda a, order: aten.permute.default(a, order),
    "reshape": lambda a, shape: aten.reshape.default(a, shape),
    "view_of": lambda a: aten.alias.default(a),
    "rev": lambda a, dims: aten.flip.default(a, dims),
    "where": lambda pred, a, b: aten.where.self(pred, a, b),
    "cat": lambda tensors, dim: aten.cat.default(tensors, dim),
    "clone": lambda a, *, memory_format=None: aten.clone.default(a),
    "device_put": lambda a, device, non_blocking=False: aten.alias.default(a),
    "item": lambda a: aten._local_scalar_dense.default(a),
    "fill": lambda a, value: aten.full_like.default(a, value),
    "scalar_tensor": lambda s, *, dtype=None, device=None: aten.scalar_tensor.default(s, dtype=dtype),
    "full": lambda shape, value, *, dtype, **_: aten.full.default(shape, value, dtype=dtype),
    "full_like": lambda a, value, *, dtype, **_: aten.full_like.default(a, value, dtype=dtype),
    "empty_strided": lambda shape, strides, *, dtype, **_: aten.empty.memory_format(shape, dtype=dtype),
    "empty_permuted": lambda shape, layout, *, dtype, **_: aten.empty.memory_format(shape, dtype=dtype),
    "shift_left": lambda a, b: aten.bitwise_left_shift.Tensor(a, b),
    "shift_right_arithmetic": lambda a, b: aten.bitwise_right_shift.Tensor(a, b),
    "conj_physical": lambda a: aten.conj_physical.default(a),
    "conj": lambda a: aten.conj_physical.default(a),
    "erf_inv": lambda a: aten.erfinv.default(a),
    "imag": lambda a: aten.select.int(aten.view_as_real.default(a), -1, 1),
    "real": lambda a: aten.select.int(aten.view_as_real.default(a), -1, 0),
    "ndtri": lambda a: aten.special_ndtri.default(a),
    "bessel_i0": lambda a: aten.i0.default(a),
    "bessel_i0e": lambda a: aten.special_i0e.default(a),
    "bessel_i1": lambda a: aten.special_i1.default(a),
    "bessel_i1e": lambda a: aten.special_i1e.default(a),
    "zeta": lambda a, b: aten.special_zeta.default(a, b),
    "uniform": lambda shape, *, low, high, dtype, **_: aten.uniform.default(
        aten.empty.memory_format(shape, dtype=dtype), float(low), float(high)
    ),
    "normal": lambda shape, *, mean, std, dtype, **_: aten.normal_functional.default(
        aten.empty.memory_format(shape, dtype=dtype), float(mean), float(std)
    ),
    "fft_r2c": lambda a, *, dim, onesided: aten._fft_r2c.default(a, dim, 0, onesided),
    "fft_c2c": lambda a, *, dim, forward: aten._fft_c2c.default(a, dim, 0, forward),
    "fft_c2r": lambda a, *, dim, last_dim_size: aten._fft_c2r.default(a, dim, 0, last_dim_size),
}


def _table() -> dict[Any, Function]:
    found = {name: getattr(getattr(aten, name, None), "default", None) for name in _SAME + _SAME_OF_TWO}
    found |= {name: getattr(aten, name).Tensor for name in _TENSORS}
    named = {name: op for name, op in found.items() if op is not None} | _SPELT
    known = {name: getattr(getattr(prims, name, None), "default", None) for name in named}
    return {op: named[name] for name, op in known.items() if op is not None}


PRIMITIVES = _table()
"""By primitive, a function of its arguments that computes the same by operators."""
VIEWS = {op: function for op, function in PRIMITIVES.items() if any(one.alias_info for one in op._schema.returns)}
"""Those of views, which torch takes in no program that it decomposes."""
