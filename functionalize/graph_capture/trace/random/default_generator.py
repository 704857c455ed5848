"""The default generator of torch while a program is captured: its draws are counted, and no program sets its state.

Fake tensors draw nothing, so the position of the generator is the number of draws so far. Torch sets a checkpointed
region that runs again back to the position of its first run; what the region draws there is what was drawn there first.

Invariant: the generator itself is not touched. A program that seeds it or sets another state is refused. Limits: by
functions of `torch.random`, in the thread that captures; `torch.default_generator.manual_seed` is not intercepted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import FakeTensor
from functionalize._torch.dispatch import identity_of, kernels_alone
from functionalize.graph_capture.trace.checkpointing import CheckpointRegions
from functionalize.refusals.random_numbers import (
    DRAWN_AFTER_RESTORE,
    GENERATOR_SEEDED,
    GENERATOR_SEEDED_AT_RANDOM,
    GENERATOR_SET,
    SEED_READ,
)


class DefaultGenerator:
    """Substitute for the default generator in `torch.random`."""

    def __init__(self, regions: CheckpointRegions) -> None:
        """``regions``: torch sets states where it computes one again."""
        self._regions, self._thread = regions, threading.get_ident()
        self._at = self._end = 0  # its position, and the furthest one, in draws since the program began
        self._drawn = dict[int, Node]()  # what was drawn first at each position
        self._reads: list[tuple[torch.Tensor, int]] = []  # states that were read, and its positions then

    @contextlib.contextmanager
    def intercepted(self) -> Iterator[None]:
        """Intercept functions of `torch.random` while the program runs."""
        functions = vars(torch.random)
        before = {name: functions[name] for name in ("default_generator", "_manual_seed_impl")}
        plain = before["_manual_seed_impl"]  # would seed other devices first
        functions["default_generator"] = self
        functions["_manual_seed_impl"] = lambda seed: self.manual_seed(seed) if self._is_captured else plain(seed)
        try:
            yield
        finally:
            functions |= before

    def note_draw(self, node: Node) -> Node | None:
        """The program draws random numbers. Returns the node that drew the same, in a region that runs again.

        Raises:
            UnsupportedProgramError: it has set back the generator before.
        """
        first = self._drawn.setdefault(self._at, node)
        if self._at != self._end if first is node else not self.runs_again:
            raise DRAWN_AFTER_RESTORE.error()
        self._at += 1
        if first is not node:
            return first
        self._end = self._at
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        """The state, which does not depend on what the program has drawn."""
        if not self._is_captured:
            return torch.default_generator.get_state()
        state = torch.default_generator.get_state()
        self._reads.append((state, self._at))
        return state

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Refused, unless it sets the current state, or the one at which a region begins to run again."""
        if not self._is_captured:
            return torch.default_generator.set_state(state)
        read = None if isinstance(state, FakeTensor) else self._read(state)
        if read is None or not (read == self._at or self.runs_again):
            raise GENERATOR_SET.error()
        self._at = read
        return torch.default_generator

    def _read(self, state: torch.Tensor) -> int | None:
        """The position when the program read a state; None if it is not known."""
        positions = [position for read, position in self._reads if read is state]
        positions = positions or [position for read, position in self._reads if bytes_of(read) == bytes_of(state)]
        return positions[0] if len(set(positions)) == 1 else None

    def manual_seed(self, seed: int) -> torch.Generator:
        """Refused: a call would not set it."""
        if self._is_captured:
            raise GENERATOR_SEEDED.error()
        return torch.default_generator.manual_seed(seed)

    def seed(self) -> int:
        """Refused: the seed differs each time."""
        if self._is_captured:
            raise GENERATOR_SEEDED_AT_RANDOM.error()
        return torch.default_generator.seed()

    def initial_seed(self) -> int:
        """Refused: a call may find another seed."""
        if self._is_captured:
            raise SEED_READ.error()
        return torch.default_generator.initial_seed()

    @property
    def runs_again(self) -> bool:
        """Whether a checkpointed region is computed again."""
        return self._regions.runs_again

    @property
    def _is_captured(self) -> bool:
        return threading.get_ident() == self._thread


def is_default(generator: torch.Generator) -> bool:
    """Whether a generator is the default generator of the CPU."""
    return identity_of(generator) == identity_of(torch.default_generator)


def bytes_of(state: torch.Tensor) -> bytes:
    """The state of a generator, to compare."""
    with kernels_alone():
        return state.numpy().tobytes()
