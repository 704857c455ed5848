"""Functions of torch with a behavior above the dispatcher that no operator shows.

Out: frozen sets of functions, and the positions of some arguments. Guarantees: the entries are the objects that
`__torch_function__` gets as its function. Limits: functions of torch's Python API; operators are in `traits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# They return a tensor that shares no gradients with its source.
DETACHING: frozenset[Any] = frozenset(
    {
        *(torch.detach, torch.detach_, torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__),  # type: ignore[attr-defined]
        *(torch.tensor, torch.Tensor.new_tensor, torch.ops.aten.detach.default, torch.ops.aten.detach),
    }
)
# They run a backward: the position of the tensors whose gradients are wanted.
GRADIENTS_OF: Mapping[Any, int] = {torch.autograd.grad: 1, torch.autograd.backward: 5, torch.Tensor.backward: 4}
# What they do depends on the strides of the tensor: they copy unless these are as wanted.
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
# If a mode is active, they return a new tensor instead of writing the one that is passed as `out=`.
LOSES_OUT: frozenset[Any] = frozenset({torch.linalg.matrix_rank})
# A dropout that drops nothing returns its input, but a copy if sizes are symbolic (pytorch/pytorch#195422).
DROPOUTS: frozenset[Any] = frozenset({torch.dropout, torch.nn.functional.dropout})
# A dispatch mode sees the operators that these call, but not the call of the function.
UNDISPATCHED = RESHAPING | LOSES_OUT | DROPOUTS
