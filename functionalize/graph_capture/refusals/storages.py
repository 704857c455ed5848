"""What a program does to storages without tensors or operators: no mode sees it, and no call could do the same.

Invariant: operators that resize (`resize_`, an `out=`) are not refused here. Limits: it sees a storage whose size at
the end differs from that at the beginning, where sizes are not symbols; other reads of storages raise by themselves,
as fake storages have no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from functionalize._torch import is_symbolic, storage_key
from functionalize.aliasing.alias_graph import AliasGraph
from functionalize.refusals.writes import STORAGE_RESIZED
from functionalize.transform.epilogue import Input


def refuse_resized(
    graph: AliasGraph, entries: Sequence[Input], handles: Sequence[torch.Tensor], freed: Iterable[torch.Tensor]
) -> None:
    """Raise where a program, which has run, has resized the storage of an input, or freed that of a result.

    ``entries``: its inputs as they were; ``handles``: the tensors that the caller gets; ``freed``: those that a call
    frees as well.

    Raises:
        UnsupportedProgramError: it has.
    """
    also = set(map(storage_key, freed))
    for entry in (entry for entry in entries if entry.storage > 0 and entry.storage not in also):
        base, tensor = graph.bases.get(entry.storage), entry.handle
        by_operator = base is not None and base.capacity is not None
        if by_operator or is_symbolic(tensor) or storage_key(tensor) != entry.storage:
            continue
        if _plain_size(tensor) not in (None, entry.capacity):
            raise STORAGE_RESIZED.error(size=tuple(tensor.size()))
    for tensor in handles:
        if storage_key(tensor) > 0 and not is_symbolic(tensor) and tensor.numel() and _plain_size(tensor) == 0:
            raise STORAGE_RESIZED.error(size=tuple(tensor.size()))


def _plain_size(tensor: torch.Tensor) -> int | None:
    """How many bytes a tensor's storage holds; None where that is not a plain number."""
    size = tensor.untyped_storage().nbytes()
    return size if type(size) is int else None
