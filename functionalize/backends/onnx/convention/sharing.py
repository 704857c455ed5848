"""Which arguments of a call share memory.

Invariant: what is said of pairs holds for calls whose arguments lie to one another in the same way. Limits: sizes and
strides count apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch


def shared_memory(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, int]]:
    """Pairs of tensors that share a storage, and how many bytes the second begins after the first."""
    first: dict[int, tuple[str, int]] = {}
    found = []
    for name, (storage, start) in _places(tensors).items():
        if storage in first:
            other, begin = first[storage]
            found.append((other, name, start - begin))
        else:
            first[storage] = name, start
    return found


def lie_alike(tensors: dict[str, torch.Tensor], shared: Sequence[Sequence[Any]], written: Collection[str]) -> bool:
    """Whether tensors share memory as pairs say, and what is written is shared by no others.

    What nothing writes is read by its values: there others may share memory, or not.
    """
    places = _places(tensors)
    groups: dict[str, set[str]] = {}
    for one, other, distance in shared:
        if one not in places or other not in places:
            return False
        (storage, begin), (other_storage, start) = places[one], places[other]
        if storage != other_storage or start - begin != distance:
            return False
        groups[other] = groups.setdefault(one, {one})
        groups[one].add(other)
    touched: dict[int, set[str]] = {places[name][0]: groups.get(name, {name}) for name in written if name in places}
    return all(name in touched.get(storage, (name,)) for name, (storage, _) in places.items())


def _places(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """The storage of each, and where it begins there."""
    return {name: (tensor.untyped_storage().data_ptr(), tensor.data_ptr()) for name, tensor in tensors.items()}
