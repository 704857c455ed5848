"""The default generator of torch, as a program that is captured finds it: seeds that it sets, states that it puts back.

Nothing is drawn while a program runs on fake tensors. Where the generator stands is therefore a position: the seed that
the program has set, and how often it has drawn since. A checkpointed region that runs again is set back to the position
of its first run by torch, and what it draws there is what was drawn there first.

Invariant: the generator itself is not touched. A program may set a seed before it draws, and when it has drawn may go
back to the state that it has read in the beginning; what else would set a state is refused. Limits: by functions of
`torch.random`, in the thread that captures; `torch.default_generator.manual_seed` and the like are not intercepted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch import FakeTensor
from functionalize._torch.dispatch import identity_of, kernels_alone
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.trace.checkpointing import CheckpointRegions
from functionalize.runtime.random_state import Seed

SETS = "sets the state of a torch generator"
_SEEDS = "seeds torch's generator after it has drawn from it"
_SEEDS_AT_RANDOM = "seeds torch's generator non-deterministically"
_DRAWS = "draws from torch's generator after it has restored its state"
WHY_DRAWN = "this would happen once, at the capture, and not at each call"
SEED_BEFORE = (
    "seed before the program is called; or, inside it, call torch.manual_seed before anything is drawn, or make a "
    "generator (torch.Generator().manual_seed(seed))"
)


@dataclass(frozen=True)
class Position:
    """Where a generator stands: ``draws`` draws after its seed, or after the state that a call finds."""

    seed: int | None = None
    draws: int = 0


_BEGIN = Position()


class DefaultGenerator:
    """What stands in for the default generator in `torch.random`."""

    def __init__(self, regions: CheckpointRegions | None = None) -> None:
        """``regions``: where one is computed again, torch sets states, and the program its seeds."""
        self._regions, self._thread = regions, threading.get_ident()
        self._at = self._end = _BEGIN  # where it stands, and the furthest position
        self._seeded = torch.Generator()
        self._drawn = dict[Position, Node]()  # what was drawn first at each position
        self._draws_elsewhere = 0  # from the generators of other devices, which a seed sets as well
        self._reads: list[tuple[torch.Tensor, Position]] = []  # states that were read, and where it stood

    @property
    def given(self) -> Seed | None:
        """What the program has set it to."""
        taken_back = self._at == _BEGIN != self._end
        return Seed(self._end.seed, taken_back) if taken_back or self._end.seed is not None else None

    @property
    def draws(self) -> int:
        """How often the program has drawn so far."""
        return self._end.draws

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """While the program runs."""
        functions = vars(torch.random)
        before = {name: functions[name] for name in ("default_generator", "_manual_seed_impl")}
        plain = before["_manual_seed_impl"]  # would seed other devices first
        functions["default_generator"] = self
        functions["_manual_seed_impl"] = lambda seed: self.manual_seed(seed) if self._is_captured else plain(seed)
        try:
            yield
        finally:
            functions |= before

    def begun(self, generator: torch.Generator) -> torch.Generator:
        """The generator in the state from which the program draws of one."""
        return self._seeded if self._end.seed is not None and is_default(generator) else generator

    def note_draw(self, node: Node) -> Node | None:
        """The program draws random numbers. Gives the node that drew the same, in a region that runs again.

        Raises:
            UnsupportedProgramError: it has set back the generator before.
        """
        first = self._drawn.setdefault(self._at, node)
        if self._at != self._end if first is node else not self.runs_again:
            refuse_drawn([_DRAWS])
        self._at = Position(self._at.seed, self._at.draws + 1)
        if first is not node:
            return first
        self._end = self._at
        return None

    def note_draw_elsewhere(self) -> None:
        """The program draws random numbers on another device."""
        self._draws_elsewhere += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        """The state: the same however much the program has drawn."""
        if not self._is_captured:
            return torch.default_generator.get_state()
        state = (torch.default_generator if self._at.seed is None else self._seeded).get_state()
        self._reads.append((state, self._at))
        return state

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Refused, but where it sets what there is, what there was in the beginning, or what a second run begins at."""
        if not self._is_captured:
            return torch.default_generator.set_state(state)
        read = None if isinstance(state, FakeTensor) else self._read(state)
        if read is None or not (read in (self._at, _BEGIN) or self.runs_again):
            refuse_drawn([SETS])
        else:
            self._at = read
        return torch.default_generator

    def _read(self, state: torch.Tensor) -> Position | None:
        """Where it stood when the program read a state; None if nobody can tell."""
        positions = [position for read, position in self._reads if read is state]
        positions = positions or [position for read, position in self._reads if bytes_of(read) == bytes_of(state)]
        return positions[0] if len(set(positions)) == 1 else None

    def manual_seed(self, seed: int) -> torch.Generator:
        """Refused, but where nothing was drawn before, or what was drawn is drawn again."""
        if not self._is_captured:
            return torch.default_generator.manual_seed(seed)
        self._at = Position(int(seed))
        if not self.runs_again:
            if self.draws or self._draws_elsewhere:
                refuse_drawn([_SEEDS])
            with kernels_alone():
                self._seeded.manual_seed(int(seed))
            self._end = self._at
        return torch.default_generator

    def seed(self) -> int:
        """Refused: it is another one each time."""
        if self._is_captured:
            refuse_drawn([_SEEDS_AT_RANDOM])
        return torch.default_generator.seed()

    def initial_seed(self) -> int:
        """Refused: a call may find another."""
        if self._is_captured:
            raise UnsupportedProgramError(
                "the program reads the seed of torch's generator",
                why="the seed would be a constant of the captured program",
                hint="pass the seed as an argument",
            )
        return torch.default_generator.initial_seed()

    @property
    def runs_again(self) -> bool:
        """Whether a checkpointed region is computed again."""
        return self._regions is not None and self._regions.runs_again

    @property
    def _is_captured(self) -> bool:
        return threading.get_ident() == self._thread


def is_default(generator: torch.Generator) -> bool:
    """Whether it is the default generator of the CPU."""
    return identity_of(generator) == identity_of(torch.default_generator)


def bytes_of(state: torch.Tensor) -> bytes:
    """The state of a generator, to compare."""
    with kernels_alone():
        return state.numpy().tobytes()


def refuse_drawn(done: list[str]) -> None:
    """Raise if a program did something to a generator of torch's.

    Raises:
        UnsupportedProgramError: it did.
    """
    if done:
        raise UnsupportedProgramError(f"the program {done[0]}", why=WHY_DRAWN, hint=SEED_BEFORE)
