"""Meta kernels of cuDNN's recurrent layers, after ``aten/src/ATen/native/cudnn/RNN.cpp``.

Invariant: sizes and strides are those of the kernel. Limits: layers that join their weights themselves; the tensor that
cuDNN keeps for the backward has a size of its own, and is empty here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _layers(
    input: Any, weight: Sequence[Any], stride: int, buffer: Any, hidden: Any, cell: Any, mode: int, *others: Any
) -> Any:
    size, projected, _, batch_first, _, _, both, batch_sizes, _ = others
    if buffer is not None or batch_first or batch_sizes:
        return NotImplemented
    output = input.new_empty([*input.size()[:2], (projected or size) * (1 + both)])
    last = input.new_empty([0]) if cell is None else cell.new_empty(cell.size())
    joined = input.new_empty([sum(part.numel() for part in weight)])
    return output, hidden.new_empty(hidden.size()), last, input.new_empty([0], dtype=torch.uint8), joined


def _gradients(
    input: Any, weight: Sequence[Any], stride: int, buffer: Any, hidden: Any, cell: Any, *others: Any
) -> tuple[Any, ...]:
    def like(tensor: Any) -> torch.Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    *_, wanted = others
    of_cell = input.new_empty([0]) if cell is None else like(cell)
    return like(input), like(hidden), of_cell, [like(tensor) for tensor in weight] if wanted[3] else []


CUDNN_METAS: Mapping[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _layers,
    aten._cudnn_rnn_backward.default: _gradients,
}
