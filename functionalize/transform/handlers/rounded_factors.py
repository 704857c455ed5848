"""Factors that eager rounds when it multiplies in place.

The kernels behind `_foreach_mul_` and `mul_.Scalar` make the factor a tensor of the dtype that they write:
on the CPU that rounds it to bfloat16 and float16 first (0.999 to 1.0), where the functional variants multiply in float.

Invariant: in a graph the factor is such a tensor. Limits: dense tensors on the CPU; GPUs round neither.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize.ops import traits
from functionalize.transform.context import FunctionalizationContext
from functionalize.transform.writing_call import VariantCall

aten = torch.ops.aten

_ROUNDING = (torch.bfloat16, torch.float16)
_DTYPES = ((int, torch.int64), (complex, torch.complex128))  # of other factors, by their class: bool is an int


def of_tensors(context: FunctionalizationContext, variant: VariantCall) -> VariantCall:
    """The call of a functional variant, with tensors for the factors that the kernel in place rounds."""
    first, factor = variant.args[0], variant.args[1]
    written = first if isinstance(first, (list, tuple)) else [first]
    if not any(tensor.dtype in _ROUNDING and tensor.is_cpu for tensor in written):
        return variant
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * len(written)
    made: dict[Any, Any] = {}

    def tensor_of(factor: Any, tensor: torch.Tensor) -> Any:
        dtype = tensor.dtype if tensor.dtype in _ROUNDING else _dtype_of(factor)
        key = id(factor), dtype
        if key not in made:
            made[key] = context.executor.call(aten.scalar_tensor.default, factor, dtype=dtype)
        return made[key]

    tensors = [tensor_of(factor, tensor) for factor, tensor in zip(factors, written, strict=True)]
    args = [first, tensors if isinstance(first, (list, tuple)) else tensors[0]]
    return VariantCall(traits.BY_TENSOR[variant.op], args, variant.kwargs)


def _dtype_of(factor: Any) -> torch.dtype:
    return next((dtype for type_, dtype in _DTYPES if isinstance(factor, type_)), torch.float64)
