"""Tensors in memory that torch does not own: that of an array (`torch.from_numpy`, `torch.frombuffer`), or of a file.

A trace has a copy for what `torch.from_numpy` gives. As long as both memories stay as they are, and the caller does not
get the tensor, this makes no difference.

Invariant: what a program did is noted, and not judged. Limits: memory of the CPU; a write by others is noticed in up to
1 MiB, and not where it leaves what was there.
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
    """What a program did to a tensor in memory of others."""

    tensor: torch.Tensor
    did: str
    at: Location | None  # where it was made, of what a tensor of the trace's stands for, which is not in that memory


@dataclass(frozen=True, eq=False)
class _Lifted:
    """A tensor in such memory, the handle that stands for it, and what its bytes summed up to when that was made."""

    source: torch.Tensor
    handle: torch.Tensor
    check_sum: int | None
    at: Location | None


class BorrowedMemory:
    """The tensors in memory of others that one program meets; ``held``: values that may have such, as an array has."""

    def __init__(self, held: Sequence[Any]) -> None:
        self.held = held
        self._lifted: list[_Lifted] = []

    def note_lifted(self, source: torch.Tensor, handle: torch.Tensor) -> None:
        """Note that a handle stands for a tensor that was made just now."""
        if _is_borrowed(source):
            self._lifted.append(_Lifted(source, handle, _sum_of(source), user_location()))

    def found(
        self, graph: AliasGraph, handles: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> list[Borrowed]:
        """What the program, which has ended, did to such tensors.

        ``handles``: what the caller gets; ``written``: tensors of no trace that were written.
        """
        given = list(handles)
        found = [Borrowed(one, WRITES, None) for one in written if _is_borrowed(one)]
        found += [Borrowed(one, GIVES, None) for one in given if _is_borrowed(one)]
        keys = set(map(storage_key, given)) if self._lifted else set()
        for lifted in self._lifted:
            view = graph.find(lifted.handle)
            if view is not None and len(view.base.log):
                found.append(Borrowed(lifted.source, WRITES, lifted.at))
            if storage_key(lifted.handle) in keys:
                found.append(Borrowed(lifted.source, GIVES, lifted.at))
            if _sum_of(lifted.source) != lifted.check_sum:
                found.append(Borrowed(lifted.source, MISSES, lifted.at))
        return found


def _is_borrowed(tensor: Any) -> bool:
    plain = type(tensor) is not FakeTensor and type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and belongs_to_others(tensor.untyped_storage())


def _sum_of(tensor: torch.Tensor) -> int | None:
    storage = tensor.untyped_storage()
    return check_sum(storage) if storage.nbytes() <= _MAX_BYTES else None
