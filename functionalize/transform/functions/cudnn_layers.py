"""Recurrent layers on fake tensors of a GPU, by the operator of cuDNN that torch calls for them.

torch looks up the addresses of the weights, which fake tensors do not have. cuDNN wants them in one buffer, in an
order of its own: that of the weights once `flatten_parameters` has put them there. Others the operator puts
together at each call, and warns that it does, as in eager.

Invariant: each gives what torch's kernel gives. Limits: layers that drop out between one another are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functionalize.refusals.values import CUDNN_DROPOUT

Tensor = torch.Tensor
aten = torch.ops.aten
_MODES: Mapping[str, int] = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # as cuDNN numbers them
_PARTS = {"lstm": 2}  # of a state, where it is not one


def runs_there(data: Tensor) -> bool:
    """Whether torch has cuDNN compute layers of this."""
    return data.device.type == "cuda" and torch.backends.cudnn.is_acceptable(data)


def refuse_dropout(dropout: float, train: bool, count: int) -> None:
    """Raise for layers that drop out between one another.

    Raises:
        UnsupportedProgramError: they do.
    """
    if dropout and train and count > 1:
        raise CUDNN_DROPOUT.error()


def layers(
    name: str,
    data: Tensor,
    given: Any,
    flat: Sequence[Tensor],
    biases: bool,
    count: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """What layers give of sequences of one length: that, and the last states.

    Raises:
        UnsupportedProgramError: they drop out between one another.
    """
    refuse_dropout(dropout, train, count)
    hidden, cell = given if name in _PARTS else (given, None)
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
    """The weights in one buffer, in the order of theirs; None if they are in several."""
    count: Any = weights[0].untyped_storage().nbytes() // weights[0].itemsize
    end: Any = 0
    parts = list[Tensor]()
    for weight in sorted(weights, key=lambda one: one.storage_offset()):
        if weight.untyped_storage().nbytes() // weight.itemsize != count or weight.storage_offset() < end:
            return None
        parts += [weight.new_zeros(weight.storage_offset() - end), weight.detach().reshape(-1)]
        end = weight.storage_offset() + weight.numel()
    return torch.cat([part for part in (*parts, weights[0].new_zeros(count - end)) if part.numel()])
