"""Tensors in memory that torch does not own: that of an array (`torch.from_numpy`, `torch.frombuffer`), or of a file.

In a trace the result of `torch.from_numpy` is a copy. That makes no difference as long as neither memory is written,
and the caller does not get the tensor.

Invariant: notes what a program did, and refuses nothing. Limits: memory of the CPU; writes outside of torch are noticed
in up to 1 MiB, if they change its contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from functionalize._torch import PLAIN_TYPES, FakeTensor, storage_key
from functionalize._torch.tensors import belongs_to_others, check_sum
from functionalize.aliasing.alias_graph import AliasGraph
from functionalize.call_stack import Location, user_location

_MAX_BYTES = 2**20
WRITES, GIVES, MISSES = "writes to", "returns or keeps", "writes, without torch, to"


class Borrowed(NamedTuple):
    """What a program did to a tensor in borrowed memory."""

    tensor: torch.Tensor
    did: str
    at: Location | None  # where the tensor was made, if a copy in the trace stands for it


@dataclass(frozen=True, eq=False)
class _Lifted:
    """A tensor in borrowed memory, the handle that stands for it, and its checksum when the handle was made."""

    source: torch.Tensor
    handle: torch.Tensor
    check_sum: int | None
    at: Location | None


class BorrowedMemory:
    """The tensors in borrowed memory that one program uses; ``held``: values that may own such memory, as arrays do."""

    def __init__(self, held: Sequence[Any]) -> None:
        self.held = held
        self._lifted: list[_Lifted] = []

    def note_lifted(self, source: torch.Tensor, handle: torch.Tensor) -> None:
        """Note that a handle stands for a new tensor."""
        if _is_borrowed(source):
            self._lifted.append(_Lifted(source, handle, _sum_of(source), user_location()))

    def found(
        self, graph: AliasGraph, handles: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> list[Borrowed]:
        """What the program did to tensors in borrowed memory, once it has ended.

        ``handles``: tensors that the caller gets; ``written``: written tensors outside of the trace.
        """
        returned = list(handles)
        uses = [Borrowed(tensor, WRITES, None) for tensor in written if _is_borrowed(tensor)]
        uses += [Borrowed(tensor, GIVES, None) for tensor in returned if _is_borrowed(tensor)]
        keys = set(map(storage_key, returned)) if self._lifted else set()
        for lifted in self._lifted:
            view = graph.find(lifted.handle)
            if view is not None and len(view.base.log):
                uses.append(Borrowed(lifted.source, WRITES, lifted.at))
            if storage_key(lifted.handle) in keys:
                uses.append(Borrowed(lifted.source, GIVES, lifted.at))
            if _sum_of(lifted.source) != lifted.check_sum:
                uses.append(Borrowed(lifted.source, MISSES, lifted.at))
        return uses


def _is_borrowed(tensor: Any) -> bool:
    plain = type(tensor) is not FakeTensor and type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and belongs_to_others(tensor.untyped_storage())


def _sum_of(tensor: torch.Tensor) -> int | None:
    storage = tensor.untyped_storage()
    return check_sum(storage) if storage.nbytes() <= _MAX_BYTES else None
