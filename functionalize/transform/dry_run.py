"""Copies of an op's arguments on which it can be tried: real ones, also where the arguments are fake.

Invariant: copies share memory as the originals do. Limits: strided layout; those of fake tensors hold zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from functionalize._torch import storage_key
from functionalize.aliasing.geometry import hint


def copies(handles: Sequence[torch.Tensor], copy: Callable[..., torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies by the identity of the originals, which share storages as those do."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = {}
    for handle in handles:
        key = storage_key(handle)
        copies[id(handle)] = copy(handle, storages.get(key))
        storages[key] = copies[id(handle)].untyped_storage()
    return copies


AT_MOST = 2**26  # bytes, beyond which a trace should not compute for the sake of an error message


def zeros(tensor: torch.Tensor, storage: torch.UntypedStorage | None, symbolic: bool) -> torch.Tensor:
    if storage is None:
        storage = torch.zeros(hint(tensor.untyped_storage().nbytes()), dtype=torch.uint8).untyped_storage()
    size, stride = [hint(n) for n in tensor.size()], [hint(n) for n in tensor.stride()]
    if symbolic:  # where a dimension has one position, its stride may be other than eager's, and says nothing
        stride = [1 if n == 1 else s for n, s in zip(size, stride, strict=True)]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, hint(tensor.storage_offset()), size, stride)
