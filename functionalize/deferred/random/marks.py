"""States of generators that stand for something: from the state the meaning is found again.

Invariant: a generator keeps its seed, by which programs ask for it. Limits: on devices whose state is not known here,
the seed itself is the mark.
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
_CPU, _CUDA = struct.Struct("<QQ"), struct.Struct("<Q")  # the first words of the CPU's, where CUDA counts its draws
_HALF = (1 << 32) - 1


class Marks(Generic[Meaning]):
    """Marked states, each with what it stands for."""

    def __init__(self) -> None:
        self._next = secrets.randbits(_BITS - 1)
        self._meanings: dict[int, Meaning] = {}

    def __iter__(self) -> Iterator[Meaning]:
        return iter(self._meanings.values())

    def put(self, generator: torch.Generator, meaning: Meaning) -> None:
        """Have the state of a generator stand for something."""
        self._next += 1
        _mark(generator, self._next)
        self._meanings[self._next] = meaning

    def of(self, generator: torch.Generator) -> Meaning | None:
        """What the state of a generator stands for; None where it is a state of its own."""
        return self._meanings.get(_mark_of(generator))


def _mark(generator: torch.Generator, mark: int) -> None:
    if generator.device.type not in ("cpu", "cuda"):
        generator.manual_seed(mark)
        return
    state = generator.get_state()
    memory = memory_of(state.untyped_storage())
    if generator.device.type == "cpu":
        HEADER.pack_into(memory, 0, generator.initial_seed(), 1, 1, 0)  # as after a seed: no number kept for later
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
