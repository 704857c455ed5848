"""Operators that ONNX has not, by those that it has: the table, a row each.

Invariant: both sides compute the same; a row holds for all arguments that it takes, else it gives NotImplemented.
Limits: what torch decomposes by itself needs no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnxscript
import torch

aten = torch.ops.aten
OPSET: Any = onnxscript.opset18  # of operators that are written as ONNX's own
Rewrite = Callable[..., Any]
REWRITES: dict[Any, Rewrite] = {}
# What torch decomposes although the exporter translates it. ONNX's running variance is a biased one; of other results
# than the first, which backwards read, the exporter makes up some.
BY_TORCH = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_group_norm.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
)
# What torch decomposes where it computes with float64, or takes a data-dependent number: to ONNX's operators
# numbers are attributes of 32 bits, and some have no kernels for 64 bits.
BY_TORCH_IF_WIDE = (
    aten.addcdiv.default,
    aten.addcmul.default,
    aten.addmm.default,
    aten.celu.default,
    aten.elu.default,
    aten.gelu.default,
    aten.hardsigmoid.default,
    aten.hardswish.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.mish.default,
    aten.native_layer_norm.default,
    aten.softplus.default,
)
# Operators of which the exporter gives the first result alone.
FIRST_ALONE = frozenset(
    {
        aten.embedding_bag.default,
        aten.embedding_bag.padding_idx,
        aten._linalg_det.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
)


def tensor_of(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of a dtype, of a tensor or a number."""
    return value.to(dtype) if isinstance(value, torch.Tensor) else aten.full.default([], value, dtype=dtype)


def rewrite(*ops: Any) -> Callable[[Rewrite], Rewrite]:
    """Register a row; behind one that there is for the arguments that this one does not take."""

    def register(function: Rewrite) -> Rewrite:
        for op in ops:
            REWRITES[op] = either_of(REWRITES[op], function) if op in REWRITES else function
        return function

    return register


def either(*tables: Mapping[Any, Rewrite]) -> dict[Any, Rewrite]:
    """The rows of several tables; of two for one operator the second where the first does not take the arguments."""
    found: dict[Any, Rewrite] = {}
    for table in tables:
        found |= {op: either_of(found[op], row) if op in found else row for op, row in table.items()}
    return found


def either_of(one: Rewrite, other: Rewrite) -> Rewrite:
    """The second where the first does not take the arguments."""

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        made = one(*args, **kwargs)
        return other(*args, **kwargs) if made is NotImplemented else made

    return rewritten
