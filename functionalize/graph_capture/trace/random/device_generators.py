"""Generators of torch's, watched while a program runs that draws nothing: its own, and the default ones of GPUs.

While the program runs each stands at a state that nobody else knows, and goes on at each node that draws from it, so
that a state which the program sets shows. Those of GPUs may be set back to where they were in the beginning, as by
`torch.random.fork_rng`: then a call sets back all that it draws from.

Invariant: after a capture they are as they were. Limits: GPUs that are in use when the program starts; seeds that are
set for GPUs alone are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from functionalize._torch.dispatch import identity_of, kernels_alone
from functionalize.graph_capture.trace.random.default_generator import SETS, bytes_of, refuse_drawn
from functionalize.runtime.random_state import Seed, default_generators_of_devices

_SOME = "restores the state of some generators that it draws from, but not of all"


@dataclass(eq=False)
class WatchedGenerator:
    """A generator of torch's: its state before the program, and the one that it is to have by now."""

    generator: torch.Generator
    before: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> WatchedGenerator:
        state = generator.get_state()
        return cls(generator, state, state)

    @property
    def is_changed(self) -> bool:
        """Whether somebody else set it to another state, or drew from it."""
        return not self.is_at(self.expected)

    def is_at(self, state: torch.Tensor) -> bool:
        """Whether it stands at a state."""
        with kernels_alone():
            return torch.equal(self.generator.get_state(), state)

    def go_on(self) -> None:
        """Draw, as an operator of the program does when a call runs it."""
        with kernels_alone():
            torch.rand(1, generator=self.generator, device=self.generator.device)
            self.expected = self.generator.get_state()


@dataclass(eq=False)
class _OfDevice:
    """The default generator of a device: the state in which the program found it, and what it drew since."""

    watched: WatchedGenerator
    begun: torch.Tensor
    drawn: dict[bytes, Node] = field(default_factory=dict)  # what was drawn first in each state


class DeviceGenerators:
    """The default generators of all devices but the CPU."""

    def __init__(self) -> None:
        self._found: dict[int, _OfDevice] = {}
        self._back: set[bool] = set()  # of those drawn from, whether they were set back

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the program runs.

        Raises:
            UnsupportedProgramError: the program has set one to another state.
        """
        for generator in default_generators_of_devices():
            watched = WatchedGenerator.of(generator)
            watched.go_on()
            self._found[identity_of(generator)] = _OfDevice(watched, watched.expected)
        try:
            yield
            self._back = {self._is_back(one) for one in self._found.values() if one.drawn or one.watched.is_changed}
        finally:
            for one in self._found.values():
                one.watched.generator.set_state(one.watched.before)

    def _is_back(self, one: _OfDevice) -> bool:
        back = one.watched.is_at(one.begun)
        if one.watched.is_changed and not back:
            refuse_drawn([SETS])
        return back

    def states(self) -> list[torch.Tensor]:
        """Where they stand by now."""
        return [one.watched.expected for one in self._found.values()]

    def has(self, generator: torch.Generator) -> bool:
        """Whether it is one of these."""
        return identity_of(generator) in self._found

    def note_draw(self, generator: torch.Generator, node: Node, runs_again: bool) -> Node | None:
        """The program draws from one of these. Gives the node that drew the same, in a region that runs again.

        Raises:
            UnsupportedProgramError: the program has set it to another state.
        """
        one = self._found[identity_of(generator)]
        expected, state = one.watched.expected, generator.get_state()
        first = one.drawn.setdefault(bytes_of(state), node)
        if one.watched.is_changed if first is node else not runs_again:
            refuse_drawn([SETS])
        one.watched.go_on()
        if first is node:
            return None
        one.watched.expected = expected
        return first

    def before(self, generator: torch.Generator, seed: Seed | None) -> torch.Tensor | None:
        """The state from which the program draws of one; None for another generator."""
        one = self._found.get(identity_of(generator))
        if one is None:
            return None
        if seed is None or seed.number is None:
            return one.watched.before
        with kernels_alone():
            return torch.Generator(generator.device).manual_seed(seed.number).get_state()

    def joined(self, seed: Seed | None, drawn: bool) -> Seed | None:
        """What a call does to all default generators; ``seed``: to that of the CPU, ``drawn``: which it draws from.

        Raises:
            UnsupportedProgramError: some were set back, and others not.
        """
        number = None if seed is None else seed.number
        of_the_cpu = {seed is not None and seed.taken_back} if drawn or number is not None else set()
        back = self._back | of_the_cpu
        if not self._back or len(back) > 1:
            refuse_drawn([_SOME] if self._back else [])
            return seed
        taken_back = back.pop()
        return Seed(number, taken_back) if taken_back or number is not None else None
