"""Recurrent layers on fake tensors of a GPU, by the operator of cuDNN that torch calls for them.

Torch looks up the addresses of the weights, which fake tensors do not have. cuDNN needs them in one buffer, in an
order of its own, into which `flatten_parameters` puts them. The operator joins other weights at each call, with a
warning, as in eager.

Invariant: results are those of torch's kernel. Limits: dropout between layers is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functionalize.refusals.values import CUDNN_DROPOUT

Tensor = torch.Tensor
aten = torch.ops.aten
_MODES: Mapping[str, int] = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # as cuDNN numbers them
_PARTS = {"lstm": 2}  # tensors of a state, if it has several


def runs_there(data: Tensor) -> bool:
    """Whether torch has cuDNN compute layers on this data."""
    return data.device.type == "cuda" and torch.backends.cudnn.is_acceptable(data)


def refuse_dropout(dropout: float, train: bool, count: int) -> None:
    """Raise for dropout between layers.

    Raises:
        UnsupportedProgramError: there is dropout.
    """
    if dropout and train and count > 1:
        raise CUDNN_DROPOUT.error()


def layers(
    name: str,
    data: Tensor,
    initial: Any,
    flat: Sequence[Tensor],
    biases: bool,
    count: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The output of layers on sequences of one length, and the last states.

    Raises:
        UnsupportedProgramError: there is dropout between the layers.
    """
    refuse_dropout(dropout, train, count)
    hidden, cell = initial if name in _PARTS else (initial, None)
    size, projected = hidden.size(2), 0
    if cell is not None and cell.size(2) != size:
        size, projected = cell.size(2), size
    steps = data.transpose(0, 1) if batch_first else data
    of_layer = (4 if biases else 2) + (projected != 0)
    sizes = _MODES[name], size, projected, count
    weights = list(flat), of_layer, _joined(flat)
    output, *last = aten._cudnn_rnn(steps, *weights, hidden, cell, *sizes, False, 0.0, train, both, [], None)[:3]
    return output.transpose(0, 1) if batch_first else output, *last[: _PARTS.get(name, 1)]


def _joined(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights in one buffer, in the order of their storage; None if they are in several storages."""
    count: Any = weights[0].untyped_storage().nbytes() // weights[0].itemsize
    end: Any = 0
    parts = list[Tensor]()
    for weight in sorted(weights, key=lambda weight: weight.storage_offset()):
        if weight.untyped_storage().nbytes() // weight.itemsize != count or weight.storage_offset() < end:
            return None
        parts += [weight.new_zeros(weight.storage_offset() - end), weight.detach().reshape(-1)]
        end = weight.storage_offset() + weight.numel()
    return torch.cat([part for part in (*parts, weights[0].new_zeros(count - end)) if part.numel()])
