"""Marks are unique states of generators, each with a meaning that is looked up by the state.

Invariant: a generator keeps its seed, which programs may read. Limits: on devices other than the CPU and CUDA the seed
itself is the mark.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from functionalize._torch.tensors import memory_of
from functionalize.deferred.random.mersenne import HEADER

Meaning = TypeVar("Meaning")
_BITS = 60
_CPU, _CUDA = struct.Struct("<QQ"), struct.Struct("<Q")  # the CPU's first words; CUDA's count of draws
_HALF = (1 << 32) - 1


class Marks(Generic[Meaning]):
    """Marked states, each with its meaning."""

    def __init__(self) -> None:
        self._next = secrets.randbits(_BITS - 1)
        self._meanings: dict[int, Meaning] = {}

    def __iter__(self) -> Iterator[Meaning]:
        return iter(self._meanings.values())

    def put(self, generator: torch.Generator, meaning: Meaning) -> None:
        """Set a generator to a new mark with a meaning."""
        self._next += 1
        _mark(generator, self._next)
        self._meanings[self._next] = meaning

    def of(self, generator: torch.Generator) -> Meaning | None:
        """The meaning of a generator's state; None if it is not a mark."""
        return self._meanings.get(_mark_of(generator))


def _mark(generator: torch.Generator, mark: int) -> None:
    if generator.device.type not in ("cpu", "cuda"):
        generator.manual_seed(mark)
        return
    state = generator.get_state()
    memory = memory_of(state.untyped_storage())
    if generator.device.type == "cpu":
        HEADER.pack_into(memory, 0, generator.initial_seed(), 1, 1, 0)  # as after a seed, without one kept for later
        memory[HEADER.size :] = bytes(len(memory) - HEADER.size)
        _CPU.pack_into(memory, HEADER.size, mark & _HALF, mark >> 32)
    else:
        _CUDA.pack_into(memory, _CUDA.size, mark * 4)  # it draws four at a time
    generator.set_state(state)


def _mark_of(generator: torch.Generator) -> int:
    if generator.device.type not in ("cpu", "cuda"):
        return generator.initial_seed()
    state = generator.get_state()
    memory = memory_of(state.untyped_storage())
    if generator.device.type == "cpu":
        low, high = _CPU.unpack_from(memory, HEADER.size)
        return int(low | high << 32)
    (count,) = _CUDA.unpack_from(memory, _CUDA.size)
    return int(count // 4)
