"""What cuDNN's recurrent layers give on fake tensors, after ``aten/src/ATen/native/cudnn/RNN.cpp``.

Invariant: sizes and strides are those of the kernel. Limits: layers that are to put their weights together themselves;
what cuDNN keeps for the backward has a size of its own, and is empty here.
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
    given = input.new_empty([*input.size()[:2], (projected or size) * (1 + both)])
    last = input.new_empty([0]) if cell is None else cell.new_empty(cell.size())
    joined = input.new_empty([sum(one.numel() for one in weight)])
    return given, hidden.new_empty(hidden.size()), last, input.new_empty([0], dtype=torch.uint8), joined


def _gradients(
    input: Any, weight: Sequence[Any], stride: int, buffer: Any, hidden: Any, cell: Any, *others: Any
) -> tuple[Any, ...]:
    def like(one: Any) -> torch.Tensor:
        return torch.empty_like(one, memory_format=torch.contiguous_format)

    *_, wanted = others
    of_cell = input.new_empty([0]) if cell is None else like(cell)
    return like(input), like(hidden), of_cell, [like(one) for one in weight] if wanted[3] else []


CUDNN_METAS: Mapping[Any, Callable[..., Any]] = {
    aten._cudnn_rnn.default: _layers,
    aten._cudnn_rnn_backward.default: _gradients,
}
