"""Generators of torch's, watched while a program runs that draws nothing: its own, and the default ones of GPUs.

While the program runs, each generator has a state that nothing else has, and advances at each node that draws from it,
so that a state which the program sets shows.

Invariant: after a capture they are as they were. Limits: GPUs that are in use when the program starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from functionalize._torch.dispatch import identity_of, kernels_alone
from functionalize.graph_capture.trace.random.default_generator import bytes_of
from functionalize.refusals.random_numbers import GENERATOR_SET
from functionalize.runtime.random_state import default_generators_of_devices


@dataclass(eq=False)
class WatchedGenerator:
    """A generator of torch's: its state before the program, and the state that it should have now."""

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
        """Whether the generator has a state."""
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
    drawn: dict[bytes, Node] = field(default_factory=dict)  # what was drawn first in each state


class DeviceGenerators:
    """The default generators of all devices but the CPU."""

    def __init__(self) -> None:
        self._by_identity: dict[int, _OfDevice] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the generators while the program runs.

        Raises:
            UnsupportedProgramError: the program has set one to another state.
        """
        for generator in default_generators_of_devices():
            watched = WatchedGenerator.of(generator)
            watched.go_on()
            self._by_identity[identity_of(generator)] = _OfDevice(watched)
        try:
            yield
            if any(of_device.watched.is_changed for of_device in self._by_identity.values()):
                raise GENERATOR_SET.error()
        finally:
            for of_device in self._by_identity.values():
                of_device.watched.generator.set_state(of_device.watched.before)

    def states(self) -> list[torch.Tensor]:
        """The states that they should have now."""
        return [of_device.watched.expected for of_device in self._by_identity.values()]

    def has(self, generator: torch.Generator) -> bool:
        """Whether a generator is one of these."""
        return identity_of(generator) in self._by_identity

    def note_draw(self, generator: torch.Generator, node: Node, runs_again: bool) -> Node | None:
        """The program draws from one of these. Returns the node that drew the same, in a region that runs again.

        Raises:
            UnsupportedProgramError: the program has set it to another state.
        """
        of_device = self._by_identity[identity_of(generator)]
        expected, state = of_device.watched.expected, generator.get_state()
        first = of_device.drawn.setdefault(bytes_of(state), node)
        if of_device.watched.is_changed if first is node else not runs_again:
            raise GENERATOR_SET.error()
        of_device.watched.go_on()
        if first is node:
            return None
        of_device.watched.expected = expected
        return first

    def before(self, generator: torch.Generator) -> torch.Tensor | None:
        """The state at which the program begins to draw from a generator; None for other generators."""
        of_device = self._by_identity.get(identity_of(generator))
        return None if of_device is None else of_device.watched.before
