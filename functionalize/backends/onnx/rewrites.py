"""Operators that ONNX has not, by those that it has: a row each.

Invariant: both sides compute the same; a row holds for all arguments that it takes, else it gives NotImplemented.
Limits: what torch takes apart by itself needs no row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Rewrite = Callable[..., Any]
REWRITES: dict[Any, Rewrite] = {}
# Operators that ONNX has, otherwise than torch: torch takes them apart. ONNX's running variance is a biased one.
BY_TORCH = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
)


def rewrite(*ops: Any) -> Callable[[Rewrite], Rewrite]:
    """Register a row."""

    def register(function: Rewrite) -> Rewrite:
        REWRITES.update(dict.fromkeys(ops, function))
        return function

    return register
