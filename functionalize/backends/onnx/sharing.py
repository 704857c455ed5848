"""Which arguments of a call share memory.

Invariant: equal for calls whose arguments lie to one another in the same way. Limits: sizes and strides count apart.
"""

from __future__ import annotations

import torch


def shared_memory(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, int]]:
    """Pairs of tensors that share a storage, and how many bytes the second begins after the first."""
    first: dict[int, tuple[str, int]] = {}
    found = []
    for name, tensor in tensors.items():
        start = tensor.data_ptr()
        key = tensor.untyped_storage().data_ptr()
        if key in first:
            other, begin = first[key]
            found.append((other, name, start - begin))
        else:
            first[key] = name, start
    return found
