"""The default generator of torch, as a program that is captured finds it: seeds that it sets, states that it puts back.

Invariant: the generator itself is not touched. A program may set a seed before it draws, and when it has drawn may go
back to the state that it has read in the beginning; what else would set a state is refused. Limits: by functions of
`torch.random`, in the thread that captures; `torch.default_generator.manual_seed` and the like are not heard of.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from functionalize._torch import FakeTensor
from functionalize._torch.dispatch import identity_of, kernels_alone
from functionalize.errors import UnsupportedProgramError
from functionalize.graph_capture.checkpointing import CheckpointRegions
from functionalize.runtime.random_state import Seed

SETS = "sets the state of a generator of torch's"
_SEEDS = "seeds torch's generator when it has drawn from it"
_ANEW = "seeds torch's generator by chance"
_DRAWS = "draws from torch's generator when it has set it back"
WHY_DRAWN = "the capture would do so once, and calls of the program not at all"
SEED_BEFORE = (
    "seed before the program is called; or inside of it, by torch.manual_seed before anything is drawn, or a generator "
    "that it makes there (torch.Generator().manual_seed(seed))"
)


class DefaultGenerator:
    """What stands in for the default generator in `torch.random`."""

    def __init__(self, regions: CheckpointRegions | None = None) -> None:
        """``regions``: where one is computed again, torch sets states, and the program its seeds."""
        self._regions, self._thread = regions, threading.get_ident()
        self.given: Seed | None = None  # what the program has set it to
        self._seeded = torch.Generator()
        self.draws = 0  # of the program so far
        self._draws_elsewhere = 0  # from the generators of other devices, which a seed sets as well
        self._reads: list[tuple[torch.Tensor, Seed | None, int]] = []  # states that it read, the seed and draws by then

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
        seeded = self.given is not None and self.given.number is not None and is_default(generator)
        return self._seeded if seeded else generator

    def note_draw(self) -> None:
        """The program draws random numbers.

        Raises:
            UnsupportedProgramError: it has set back the generator before.
        """
        if self.given is not None and self.given.taken_back:
            refuse_drawn([_DRAWS])
        self.draws += 1

    def note_draw_elsewhere(self) -> None:
        """The program draws random numbers on another device."""
        self._draws_elsewhere += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def get_state(self) -> torch.Tensor:
        """The state: the same however much the program has drawn."""
        if not self._is_captured:
            return torch.default_generator.get_state()
        seeded = self.given is not None and not self.given.taken_back
        state = (self._seeded if seeded else torch.default_generator).get_state()
        self._reads.append((state, self.given, self.draws))
        return state

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Refused, but where it sets what there is, or what there was in the beginning."""
        if not self._is_captured:
            return torch.default_generator.set_state(state)
        if self.runs_again:
            return torch.default_generator
        read = None if isinstance(state, FakeTensor) else self._read(state)
        if read == (None, 0) and (self.given is not None or self.draws):  # nothing is drawn before a seed is set
            self.given = Seed(None if self.given is None else self.given.number, taken_back=True)
        elif read != (self.given, self.draws):
            refuse_drawn([SETS])
        return torch.default_generator

    def _read(self, state: torch.Tensor) -> tuple[Seed | None, int] | None:
        """When the program has read a state: which seed it had set, how much it had drawn; None if nobody can tell."""
        found = [read for read in self._reads if read[0] is state]
        found = found or [read for read in self._reads if bytes_of(read[0]) == bytes_of(state)]
        when = {(seed, draws) for _, seed, draws in found}
        return when.pop() if len(when) == 1 else None

    def manual_seed(self, seed: int) -> torch.Generator:
        """Refused, but where nothing was drawn before."""
        if not self._is_captured:
            return torch.default_generator.manual_seed(seed)
        if not self.runs_again:
            if self.draws or self._draws_elsewhere:
                refuse_drawn([_SEEDS])
            with kernels_alone():
                self._seeded.manual_seed(int(seed))
            self.given = Seed(int(seed), taken_back=False)
        return torch.default_generator

    def seed(self) -> int:
        """Refused: it is another one each time."""
        if self._is_captured:
            refuse_drawn([_ANEW])
        return torch.default_generator.seed()

    def initial_seed(self) -> int:
        """Refused: a call may find another."""
        if self._is_captured:
            raise UnsupportedProgramError(
                "the program asks for the seed of torch's generator",
                why="it would be a constant of what is captured",
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
