"""Facts about operators that neither their schemas nor their tags state: sets of operators, each with its reason.

In: names as the tables write them, without ``aten::``. Out: frozen sets of overloads, and of packets if a fact holds
for each overload; mappings if the fact is one argument. Guarantees: each operator exists in the running torch, or the
import fails. Limits: only facts; their users decide what to do about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from functionalize.ops.tables import overload


def _overloads(*names: str) -> frozenset[Any]:
    return frozenset(overload(f"aten::{name}") for name in names)


def _packets(*names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in names)


# The strides of results

# Elementwise operators whose results have the strides of a copy of their argument (`torch.preserve_format`).
PRESERVES_FORMAT = _overloads(
    *("clone", "_to_copy", "flip", "hardtanh", "nan_to_num", "empty_like", "zeros_like", "ones_like", "full_like"),
    *("rand_like", "randn_like", "randint_like"),
)
# Elementwise operators whose results are contiguous, where torch's meta kernels keep the strides of the arguments.
LOSES_STRIDES = _overloads(
    *("pow.Scalar", "_foreach_pow.ScalarAndTensor", "rrelu_with_noise", "rrelu_with_noise_functional")
)
# All elementwise operators whose results are contiguous, whatever the strides of their arguments.
GIVES_CONTIGUOUS = LOSES_STRIDES | _overloads("masked_fill.Scalar", "masked_fill.Tensor")
# Operators that torch tags as elementwise but that call other operators: their results have the strides of a sum, a
# product, another kernel's result.
CALLS_OTHER_KERNELS = _overloads("mvlgamma", "ldexp.Tensor", "angle", "_conj_physical")
# Elementwise operators whose kernels take their operands in reverse.
SWAPS_OPERANDS = _overloads("rsub.Tensor", "rsub.Scalar")
# Products of matrices and reductions: their results have the same strides, whatever strides their arguments have.
IGNORES_STRIDES = _overloads(
    *("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "_grouped_mm"),
    *("sum", "sum.dim_IntList", "mean", "mean.dim", "amax", "amin"),
    *("var.correction", "std.correction", "linalg_vector_norm", "logsumexp"),
)
# Views of pairs of numbers as complex numbers, and back.
OF_PAIRS = _overloads("view_as_complex", "view_as_real")
# Copies of views: an operator that reads the copy may read the view instead.
READABLE_AS_VIEW = _overloads(
    *("t_copy", "transpose_copy.int", "permute_copy", "expand_copy", "unsqueeze_copy", "squeeze_copy.dim"),
    *("squeeze_copy.dims", "select_copy.int", "slice_copy.Tensor", "view_copy"),
)
# Their result has the elements of the first argument, in the same order, and often its size.
COPIES = _overloads("clone", "_to_copy")
# Their results are dense, in the order of their first argument.
GIVES_DENSE = _overloads(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"),
    *("_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional"),
    *("_batch_norm_no_update", "native_channel_shuffle", "max_unpool2d"),
)
# The argument that they copy, when autograd calls them on a gradient that it stores as the first of a tensor.
COPIES_GRADIENT: Mapping[Any, int] = {
    overload("aten::clone"): 0,
    overload("aten::copy"): 1,
    overload("aten::new_empty_strided"): 0,
    overload("aten::_to_copy"): 0,
}
# They drop dimensions of one position.
SQUEEZES = _packets("squeeze", "squeeze_", "squeeze_copy")
# They view a tensor's elements in another size.
RESIZING_VIEWS = _overloads("view", "_unsafe_view")
# In inference mode their results are inference tensors, unlike those of other views.
MADE_FOR_INFERENCE = _overloads("view.dtype")

# Dependence on the strides of arguments

# Whether they are legal, or what they return, depends on the strides and the conjugate bit of their argument.
LEGAL_BY_LAYOUT = _overloads("view", "view.dtype", "view_as_complex", "view_as_real")
# They copy their source with all of its storage, as elements of its dtype; so the copy has the source's offset.
KEEPS_OFFSET = _overloads("slice_scatter", "select_scatter", "diagonal_scatter")
SCATTERS = KEEPS_OFFSET | _overloads("as_strided_scatter")
# They address the storage of their argument by strides and an offset: those that read; those in view rules; all.
READS_BY_ADDRESS = _overloads("as_strided", "as_strided_copy")
VIEWS_BY_ADDRESS = _overloads("as_strided", "as_strided_scatter")
BY_ADDRESS = READS_BY_ADDRESS | VIEWS_BY_ADDRESS
# The factors of a determinant are those of the transpose if the matrix is contiguous, and the backward checks the
# strides of the matrix, not of the factors.
FACTORS_BY_STRIDES = _overloads("_linalg_det", "_linalg_slogdet")
# They refuse matrices whose rows, or columns if these are dense, do not begin at multiples of `ALIGNED_BYTES`.
ALIGNED_BYTES = 16
NEEDS_ALIGNED_ROWS = _overloads("_grouped_mm")
# They choose a kernel by sizes, and by the memory formats of their arguments; kernels round differently.
CHOOSES_KERNEL = _overloads("convolution", "convolution_backward")
# They trust that several arguments have the same strides, or how another result was computed. Found by running each
# operator of torch's databases, and backwards, on arguments of other strides: its results changed, or it raised.
TRUSTS_STRIDES = (
    FACTORS_BY_STRIDES
    | NEEDS_ALIGNED_ROWS
    | CHOOSES_KERNEL
    | _overloads(
        *("native_group_norm", "native_group_norm_backward", "native_layer_norm_backward"),
        *("adaptive_max_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
        *("nll_loss2d_backward", "_pdist_forward", "_pdist_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    )
)
# They trust that the last dimension is dense, which the functions of torch check before they call them. It is dense in
# a value if it is in the handle: the value is a copy, or a result of the same operator.
TRUSTS_LAST_STRIDE = _overloads(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
)
# This argument is a bias whose rows torch has padded, so that each begins at a multiple of `ALIGNMENT` elements: a part
# of a wider tensor, whose value does not have such gaps.
ALIGNMENT = 16
ALIGNED_BIAS: Mapping[Any, int] = {
    overload("aten::_scaled_dot_product_efficient_attention"): 3,
    overload("aten::_scaled_dot_product_efficient_attention_backward"): 4,
    overload("aten::_scaled_dot_product_cudnn_attention"): 3,
}

# Sizes and data

# They return a bool or a number that depends on tensor values.
ANSWERS_BY_DATA = _overloads("equal", "allclose", "_local_scalar_dense")
# They broadcast their arguments, as elementwise operators do.
BROADCASTS = _overloads("expand", "copy_", "copy", "normal.Tensor_Tensor", "normal_functional")
# They read a tensor's size, dtype and device, and not its values.
READS_METADATA_ONLY = _overloads(
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"
)
# In training they read the values of the running statistics only to update them.
UPDATES_STATISTICS = _overloads("_native_batch_norm_legit_functional", "native_batch_norm_backward")
# In grad mode their kernels return the workspace of the backward, else None.
WORKSPACE_IN_GRAD_MODE = _overloads("mkldnn_rnn_layer")

# Writes

# Functional operators that write a part of a copy of their first argument.
WRITES_PART = _overloads(
    *("index_copy", "index_put", "index_add", "index_fill.int_Scalar", "scatter.src", "scatter.value", "scatter_add"),
    "masked_fill.Scalar",
)
# Applied twice they do the same as once, so an element may be reached any number of times.
IDEMPOTENT = _packets(
    *("abs_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "fill_", "floor_", "nan_to_num_", "relu_"),
    *("round_", "sgn_", "sign_", "trunc_", "zero_"),
)
# Writes to an expanded tensor that eager allows and that write the same at all positions of an element.
WRITES_ALIKE_EVERYWHERE = IDEMPOTENT | _packets("masked_fill_")
# Elementwise writes without the tag that says so.
WRITES_BY_ELEMENT = _overloads("bernoulli_.Tensor", "copy_", "masked_fill_.Tensor")
# Their kernels read the value from its tensor, or copy it, before they write.
READS_VALUE_FIRST = _overloads("fill_.Tensor", "index_fill_.int_Tensor", "masked_fill_.Tensor")
# Of an element and itself they compute the element; those of the second set only of bools.
KEEPS_EQUAL = _packets(
    *("bitwise_and_", "bitwise_or_", "clamp_max_", "clamp_min_", "copy_", "_foreach_clamp_max_"),
    *("_foreach_clamp_min_", "_foreach_copy_", "_foreach_maximum_", "_foreach_minimum_"),
)
KEEPS_EQUAL_BOOLS = _packets("logical_and_", "logical_or_")
# With their first argument as `out=` they read what they wrote. Other operators that are not elementwise do not, or
# copy first.
READS_WHAT_IT_WROTE = _packets(
    *("avg_pool2d", "avg_pool3d", "bmm", "dot", "linalg_ldl_solve", "linalg_solve_triangular", "linear"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "mm", "mv", "ormqr", "vdot"),
)
# For complex numbers they compute complex ones, and copy the real part to `out=`, which is contiguous if resized.
COPIES_TO_OUT = _overloads("abs.out", "angle.out")
# Multiplications by a number, which their in-place variants round to the tensor's dtype: the overload for a tensor.
BY_TENSOR: Mapping[Any, Any] = {
    overload("aten::_foreach_mul.Scalar"): overload("aten::_foreach_mul.List"),
    overload("aten::_foreach_mul.ScalarList"): overload("aten::_foreach_mul.List"),
    overload("aten::mul.Scalar"): overload("aten::mul.Tensor"),
}

# One step of an optimizer for lists of parameters: in torch they have no meta kernel.
STEPS_OF_OPTIMIZERS = frozenset(
    getattr(packet, name)
    for packet in _packets("_fused_sgd", "_fused_adam", "_fused_adamw", "_fused_adagrad")
    for name in packet.overloads()
    if not name.endswith("out")
)
# Higher-order operators whose first argument is a body, whose last operands are the last argument.
MAPS_ROWS = frozenset(getattr(torch.ops.higher_order, name) for name in ("map_impl", "scan", "associative_scan"))

# Random numbers

# Random operators of one tensor whose results have its shape, element by element: those that draw in the order of a
# contiguous tensor whatever the strides of their argument, those that read its elements, those that fill another.
DRAWS_CONTIGUOUSLY = _overloads("bernoulli", "bernoulli.p")
DRAWS_BY_ELEMENT = DRAWS_CONTIGUOUSLY | _overloads("native_dropout")
_FILLS_ALIKE = _overloads(
    *("cauchy", "exponential", "geometric", "log_normal", "normal_functional", "uniform"),
    *("random", "random.to", "random.from"),
)
DRAWS_TO_FILL = _FILLS_ALIKE | _overloads("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
# Random operators whose variants in place draw the same numbers with the same arguments.
FILLS = _FILLS_ALIKE | _overloads("bernoulli.p")
# Random operators that take a size, and draw what an in-place operator without arguments writes.
FILLS_AS: Mapping[Any, Any] = {
    **dict.fromkeys(_overloads("rand", "rand.generator", "rand_like"), overload("aten::uniform_")),
    **dict.fromkeys(_overloads("randn", "randn.generator", "randn_like"), overload("aten::normal_")),
}
