"""Meta kernels for ops where torch's own refuses arguments that eager's kernel takes, or gives other sizes or strides.

Invariant: sizes, strides, dtypes and refusals are those of eager's kernel. Limits: builds of
torch for ROCm make dense results of `_grouped_mm`; they keep torch's meta kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from functionalize._torch.symbols.sizes import forget_offset, unbacked
from functionalize._torch.tensors import INTERPOLATIONS, suggest_memory_format
from functionalize.aliasing.tensor_queries import tensor_leaves
from functionalize.ops import traits
from functionalize.refusals.values import LEAST_SQUARES_DEVICE, LEAST_SQUARES_DRIVER, PADDED_SEQUENCE_PACKED
from functionalize.tracing.cudnn_metas import CUDNN_METAS
from functionalize.tracing.sparse_elements import SPARSE_METAS

aten = torch.ops.aten
_ALIGNMENT = 16  # bytes, of rows


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> torch.Tensor:
    """After ``aten/src/ATen/native/GroupedMMUtils.h``; torch's meta kernel takes only bfloat16, as some GPUs do."""
    for name, matrix in (("mat_a", a), ("mat_b", b)):
        is_supported = matrix.dtype in (torch.float32, torch.bfloat16, torch.float16)
        _check(is_supported, f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {matrix.dtype}")
        _check(matrix.dim() in (2, 3), f"{name} has to be 2 or 3d")
        _check_strides(matrix)
    flat = [matrix.dim() == 2 for matrix in (a, b)]
    _check(all(flat) or a.size(-1) == b.size(-2), "contraction dimension of mat_a and mat_b must match")
    _check((offs is not None) == any(flat), "Have to provide offsets if there is a 2d matrix, else none")
    _check(offs is None or (offs.dim() == 1 and offs.dtype == torch.int32), "offs has to be 1D, of int32")
    _check(bias is None, "Bias not supported yet")
    _check(out_dtype in (None, a.dtype), "Grouped gemm output dtype must match `mat_a` dtype")
    groups = [matrix.size(0) for matrix in (a, b) if matrix.dim() == 3] + ([] if offs is None else [offs.size(0)])
    _check(all(count == groups[0] for count in groups), "matrix batch sizes have to match")
    size = [a.size(-2), b.size(-1)]
    per_row = _ALIGNMENT // a.itemsize
    row = (size[1] + per_row - 1) // per_row * per_row
    stride = [row, 1]
    if flat[0] == flat[1]:
        size, stride = [groups[0], *size], [size[0] * row, *stride]
    return torch.empty_strided(size, stride, dtype=a.dtype, device=a.device)


def _check_strides(matrix: Any) -> None:
    (rows, columns), (down, across) = matrix.size()[-2:], matrix.stride()[-2:]
    if down == 1 and across >= max(1, rows):
        leading = across
    else:
        _check(
            across == 1 and down >= max(1, columns),
            f"Invalid strides/sizes, got {matrix.stride()} for strides and {tuple(matrix.size())} for sizes",
        )
        leading = down
    _check(leading % (_ALIGNMENT // matrix.itemsize) == 0, "strides should be multiple of 16 bytes")


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _pack_padded_sequence(input: Any, lengths: Any, batch_first: bool) -> Any:
    """Refused: kernels of recurrent layers on the CPU read its result as numbers, step by step."""
    raise PADDED_SEQUENCE_PACKED.error()


def _multilabel_margin_loss_forward(input: Any, target: Any, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """After ``aten/src/ATen/native/LossMultiLabelMargin.cpp``; for one row torch's meta kernel gives a vector."""
    size, dims = list(input.size()), input.dim()
    whole = dims == 0 or (dims <= 2 and size[-1] != 0)
    _check(whole, f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {size}")
    alike = target.numel() == input.numel() if dims < 2 and target.dim() < 2 else list(target.size()) == size
    _check(alike, f"inconsistent target size: {list(target.size())} for input of size: {size}")
    by_row = dims == 2 and reduction == 0  # `Reduction::None`
    return input.new_empty(size[:1] if by_row else []), input.new_empty(target.size())


def _multilabel_margin_loss_backward(gradient: Any, input: Any, *others: Any) -> torch.Tensor:
    """After the same file."""
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _angle(tensor: Any) -> torch.Tensor:
    """After ``aten/src/ATen/native/UnaryOps.cpp``: angles of complex numbers are dense, whatever the input is."""
    if tensor.is_complex():
        return torch.empty(tensor.size(), dtype=tensor.dtype.to_real(), device=tensor.device)
    return torch.atan(tensor)


def _ctc_loss(log_probs: Any, targets: Any, steps: Any, lengths: Any, *options: Any) -> tuple[torch.Tensor, ...]:
    """After ``aten/src/ATen/native/LossCTC.cpp``; lengths in tensors make the longest length data-dependent."""
    states = _data_dependent_count(log_probs) if isinstance(lengths, torch.Tensor) else 2 * max(lengths, default=0) + 1
    return log_probs.new_empty([log_probs.size(1)]), log_probs.new_empty([log_probs.size(1), log_probs.size(0), states])


def _data_dependent_count(tensor: Any) -> Any:
    from functionalize._torch.symbols.symbols import assume  # here: loads sympy

    count = tensor.fake_mode.shape_env.create_unbacked_symint()
    assume(count >= 1)
    return count


def _ctc_loss_backward(gradient: Any, log_probs: Any, *others: Any) -> torch.Tensor:
    """After the same file."""
    made: torch.Tensor = log_probs.new_empty(log_probs.size())
    return made


def _lstsq(a: Any, b: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    """After ``aten/src/ATen/native/BatchLinearAlgebra.cpp``; torch has no meta kernel: sizes may be data-dependent."""
    if a.device.type != "cpu":
        raise LEAST_SQUARES_DEVICE.error(device=a.device.type)
    driver, vectors = driver or "gelsy", a.dim() - b.dim()
    _check(a.dim() >= 2 and 0 <= vectors <= 1, "input.dim() must be greater or equal to other.dim(), by 1 at most")
    columns = b.unsqueeze(-1) if vectors else b
    (rows, n), count = a.size()[-2:], columns.size(-1)
    _check(rows == columns.size(-2), "input.size(-2) should match other.size(-2)")
    own, batch = a.size()[:-2], torch.broadcast_shapes(a.size()[:-2], columns.size()[:-2])
    by_singular_values = driver in ("gelss", "gelsd")
    if by_singular_values and rows > n:
        raise LEAST_SQUARES_DRIVER.error(driver=driver)
    solution = columns.new_empty([*batch, count, max(rows, n)]).mT[..., :n, :]
    residuals = [*batch, count] if driver == "gels" and rows > n else [0]
    singular = [*own, min(rows, n)] if by_singular_values else [0]
    rank = a.new_empty([0] if driver == "gels" else own, dtype=torch.int64)
    solutions = solution.squeeze(-1) if vectors else solution
    return solutions, _real(a, residuals), rank, _real(a, singular)


def _real(tensor: Any, size: Any) -> Any:
    return tensor.new_empty(size, dtype=tensor.dtype.to_real())


def _dense(op: Any) -> Callable[..., Any]:
    """For kernels of the CPU that make dense results, by rows or by channels, whatever the strides of the input."""

    def meta(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != "cpu" or not tensor.dim():
            return NotImplemented
        form = suggest_memory_format(tensor)
        if tensor.is_contiguous(memory_format=form):
            return NotImplemented
        return op(tensor.contiguous(memory_format=form), *args, **kwargs)

    return meta


def _of_contiguous(op: Any) -> Callable[..., Any]:
    """For kernels whose results are contiguous, whatever the strides of their arguments."""

    def contiguous(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [*map(contiguous, arg)]
        return arg.contiguous() if isinstance(arg, torch.Tensor) else arg

    def meta(*args: Any, **kwargs: Any) -> Any:
        if all(leaf.is_contiguous() for leaf in tensor_leaves(args, kwargs)):
            return NotImplemented
        return op(*map(contiguous, args), **kwargs)

    return meta


def _rounded(dividend: Any, divisor: Any, *, rounding_mode: str | None = "floor") -> Any:
    """Floor division, which torch decomposes: the result has the strides of a sum."""
    is_floor = rounding_mode == "floor" and isinstance(dividend, torch.Tensor) and dividend.dtype is not torch.bool
    return torch.add(dividend, divisor) if is_floor else NotImplemented


def _interpolated(input: Any, size: Any, *options: Any) -> Any:
    """On symbols. Torch decomposes it there, into operators that its dispatcher in Python would have to see."""
    return _in_format_of(input, [*input.size()[:2], *size])


def _interpolated_backward(gradient: Any, output_size: Any, input_size: Any, *options: Any) -> Any:
    """On symbols, as above."""
    return _in_format_of(gradient, input_size)


def _in_format_of(other: Any, size: Any) -> Any:
    if not any(isinstance(number, torch.SymInt) for number in (*other.size(), *size)):
        return NotImplemented
    return other.new_empty(size).contiguous(memory_format=suggest_memory_format(other))


def _stepped(op: Any) -> Callable[..., Any]:
    """A fused step of an optimizer: it returns the lists that it updates, which are its first arguments."""
    count = len(op._schema.returns)
    return lambda *args, **options: tuple([torch.empty_like(tensor) for tensor in updated] for updated in args[:count])


def _fake_quantized(x: Any, *parameters: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """After ``aten/src/ATen/native/quantized``; torch has no meta kernels for fake quantization."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learned_scale_backward(gradient: Any, x: Any, scale: Any, zero_point: Any, *parameters: Any) -> Any:
    return torch.empty_like(x), scale.new_empty(scale.size()), zero_point.new_empty(zero_point.size())


def _select_copy(x: Any, dim: int, index: Any) -> Any:
    """At a data-dependent index: torch guards on whether it is in bounds, which only a call knows."""
    if not unbacked([index]):
        return NotImplemented
    size = list(x.size())
    del size[dim]
    return x.new_empty(size)


def _slice_copy(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Between data-dependent bounds: torch guards on whether they are negative, unless the slice is a view."""
    if not unbacked([start, end]):
        return NotImplemented
    view = aten.slice.Tensor(x, dim, start, end, step)
    forget_offset(view)
    return x.new_empty(view.size())


def _like_first(x: Any, *parameters: Any) -> Any:
    return torch.empty_like(x)


def _dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    return torch.mul(gradient, mask)


METAS: Mapping[Any, Callable[..., Any]] = {  # each returns NotImplemented where torch's own is right
    **SPARSE_METAS,
    **CUDNN_METAS,
    **({} if torch.version.hip else {aten._grouped_mm.default: _grouped_mm}),
    aten.angle.default: _angle,
    aten.select_copy.int: _select_copy,
    # Torch decomposes these into operators whose results have other strides; the results of these operators match.
    **dict.fromkeys((aten.copysign.Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default), torch.atan2),
    **dict.fromkeys((aten.div.Tensor_mode, aten.floor_divide.default), _rounded),
    **{
        op: _stepped(op) for op in traits.STEPS_OF_OPTIMIZERS
    },  # torch has no meta kernel for some, and those for others do not run on symbols
    **{op: _dense(op) for op in traits.GIVES_DENSE},
    **{op: _of_contiguous(op) for op in traits.LOSES_STRIDES},
    **{getattr(aten, call.__name__).default: _interpolated for call in INTERPOLATIONS},
    **{getattr(aten, f"{call.__name__}_backward").default: _interpolated_backward for call in INTERPOLATIONS},
    **dict.fromkeys((aten.logaddexp.default, aten.logaddexp2.default), torch.add),
    **dict.fromkeys((aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default), torch.eq),
    **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), _ctc_loss),
    **dict.fromkeys((aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor), _ctc_loss_backward),
    aten.linalg_lstsq.default: _lstsq,
    aten.native_dropout_backward.default: _dropout_backward,
    aten._pack_padded_sequence.default: _pack_padded_sequence,
    aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantized,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _fake_quantized,
    aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantized,
    aten._fake_quantize_learnable_per_tensor_affine.default: _like_first,
    aten._fake_quantize_learnable_per_channel_affine.default: _like_first,
    aten._fake_quantize_learnable_per_tensor_affine_backward.default: _learned_scale_backward,
    aten._fake_quantize_learnable_per_channel_affine_backward.default: _learned_scale_backward,
    aten.multilabel_margin_loss_backward.default: _multilabel_margin_loss_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss_forward,
}
# For graphs that are traced again, where nobody answers torch's guards on data-dependent bounds.
METAS_OF_EXPORTS: Mapping[Any, Callable[..., Any]] = {**METAS, aten.slice_copy.Tensor: _slice_copy}
