"""Interpolation by scales: the exporter takes the quotients of the sizes, or the scales of all dimensions or none."""

from __future__ import annotations

from typing import Any

from functionalize._torch.decompositions import decomposition_of
from functionalize.backends.interpolation import SCALED
from functionalize.backends.onnx.rewrites.registry import REWRITES, Rewrite
from functionalize.errors import UnsupportedExportError


def _by_scales(op: Any) -> Rewrite:
    def rewrite(*args: Any) -> Any:
        if not any(isinstance(scale, float) for scale in args[-SCALED[op] :]):
            return NotImplemented
        function = decomposition_of(op)
        if function is None:
            cause = UnsupportedExportError.cause(
                f"{op} has a scale that is not the quotient of the sizes",
                why="ONNX Runtime takes the quotient",
                hint="give the size, or recompute_scale_factor=True",
            )
            raise UnsupportedExportError("ONNX", [cause])
        return function(*args)

    return rewrite


REWRITES.update({op: _by_scales(op) for op in SCALED})
