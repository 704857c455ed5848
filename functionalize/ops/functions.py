"""What functions of torch do above the dispatcher, where no operator shows it.

Out: frozen sets of functions, and where one of their arguments stands. Guarantees: what `__torch_function__` gets as
its function is what stands here. Limits: functions of torch's Python API; operators stand in `traits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# They give a tensor that shares no gradients with its source.
DETACHING: frozenset[Any] = frozenset(
    {
        *(torch.detach, torch.detach_, torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__),  # type: ignore[attr-defined]
        *(torch.tensor, torch.Tensor.new_tensor, torch.ops.aten.detach.default, torch.ops.aten.detach),
    }
)
# They run a backward; where they take the tensors whose gradients are wanted.
GRADIENTS_OF: Mapping[Any, int] = {torch.autograd.grad: 1, torch.autograd.backward: 5, torch.Tensor.backward: 4}
# They copy unless the tensor lies in memory as they want it.
RESHAPING: frozenset[Any] = frozenset(
    getattr(namespace, name)
    for name in ("contiguous", "flatten", "is_contiguous", "ravel", "reshape", "reshape_as")
    for namespace in (torch, torch.Tensor)
    if hasattr(namespace, name)
) | {
    operator
    for name in ("contiguous", "flatten", "ravel", "reshape", "reshape_as")
    for packet in [getattr(torch.ops.aten, name)]
    for operator in (packet, *(getattr(packet, overload) for overload in packet.overloads()))
}
# Where a mode is active they compute a new tensor in place of writing the one that is passed as `out=`.
LOSES_OUT: frozenset[Any] = frozenset({torch.linalg.matrix_rank})
# What drops nothing returns its input, but a copy where sizes are symbolic (pytorch/pytorch#195422).
DROPOUTS: frozenset[Any] = frozenset({torch.dropout, torch.nn.functional.dropout})
# A dispatch mode sees what these call, and not that they are called.
UNDISPATCHED = RESHAPING | LOSES_OUT | DROPOUTS
