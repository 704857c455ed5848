"""Simplifies an ONNX graph, as the optimizer of torch's exporter does, by onnxscript's passes and rules.

Invariant: a graph computes the same before and after. So some of what the exporter's optimizer does is left out. It
takes constants that are near to 0 or 1 for these: the 1e-8 of an optimizer's step is 0 to it. It joins two clamps of
one tensor under one name. It folds windows (pooling, convolutions) over constants by a reference implementation,
which reads other elements than ONNX Runtime does where a window has a wide stride.
Limits: nothing of onnxscript or torch is changed, so other exports in the process are as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir
from onnx_ir.convenience import get_const_tensor
from onnx_ir.passes import Sequential
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewriteRule, rewrite
from onnxscript.rewriter.rules import common as rules

_ROUNDS = 2  # as the exporter's optimizer: what one round folds, another may simplify
_NOT_FOLDED = frozenset(
    {"AveragePool", "Conv", "ConvTranspose", "GridSample", "LpPool", "MaxPool", "Resize", "RoiAlign"}
)


def _neutral(operation: Callable[[Any, Any], Any], number: int) -> RewriteRule:
    """The rule that `operation(x, number)` is `x`, for a scalar that is exactly `number`."""

    def pattern(op: Any, x: Any, scalar: Any) -> Any:
        return operation(x, scalar)

    def is_number(context: Any, x: Any, scalar: Any) -> bool:
        constant = get_const_tensor(scalar)
        return constant is not None and constant.shape.rank() == 0 and bool(constant.numpy().item() == number)

    def identity(op: Any, x: Any, scalar: Any) -> Any:
        return op.Identity(x)

    return RewriteRule(pattern, identity, is_number)


_RULES = (
    *_neutral(lambda x, one: x * one, 1).commute(),
    *_neutral(lambda x, zero: x + zero, 0).commute(),
    _neutral(lambda x, zero: x - zero, 0),
    _neutral(lambda x, one: x / one, 1),
    rules.dropout_zero_rule,
    rules.dropout_inference_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.two_reshapes_matmul_reshape_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.flatten_to_reshape_rule,  # before the next: what it gives is joined there
    rules.reshape_reshape_rule,
    rules.slice_split_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.no_op_dynamic_scatter_nd_rule,  # its twin for static indices takes an addition for a replacement
    rules.normalize_pad_format_conv_rule,
    rules.normalize_pad_format_conv_integer_rule,
    rules.fuse_pad_into_conv_rule,
    rules.fuse_pad_into_conv_integer_rule,
    rules.fuse_batchnorm_into_conv_rule,
    rules.fuse_batchnorm_into_conv_transpose_rule,
    rules.fuse_batchnorm_into_gemm_rule,
    rules.remove_optional_bias_from_conv_rule,
    rules.remove_optional_bias_from_conv_transpose_rule,
    rules.remove_optional_bias_from_qlinear_conv_rule,
    rules.remove_optional_bias_from_gemm_rule,
)


def _folds(node: Any) -> bool | None:
    """Whether to fold a node whose inputs are constants; None: as onnxscript decides."""
    return False if node.op_type in _NOT_FOLDED or _widens_weight(node) else None


def _widens_weight(node: Any) -> bool:
    """Whether a node makes wide numbers of a weight of few bits, which is to stay small in the file."""
    weight = node.inputs[0].const_value if node.op_type == "Cast" else None
    if weight is None or weight.dtype is onnx_ir.DataType.BOOL:
        return False
    return bool(weight.dtype.bitwidth <= 8 and weight.size > 1)


def optimize(model: Any) -> None:
    """Simplify a model (`onnx_ir.Model`) in place."""
    passes.InlinePass()(model)
    for _ in range(_ROUNDS):
        fold_constants(model, onnx_shape_inference=True, should_fold=_folds)
        rewrite(model, _RULES)
    Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)
