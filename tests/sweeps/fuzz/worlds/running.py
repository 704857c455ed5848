"""A world that is run: its calls one after the other, what each gives and what the world is like afterwards.

Invariant: a call draws what the world's random state says; nobody but the world changes that.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.sweeps.fuzz.worlds.program import World
from tests.sweeps.fuzz.worlds.snapshot import Snapshot

SEED = 5  # of the default generator, when a world begins


class Running:
    """One twin."""

    def __init__(self, world: World) -> None:
        self._world = world
        torch.manual_seed(SEED)
        with _quiet():
            self.program, self._read, self._changes = world.made()
        self._arguments = [_argument(world, number) for number in range(world.calls)]
        self.results: list[Any] = []
        self._random = torch.get_rng_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """With this world's random state: the twins take turns."""
        others = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            with _quiet():
                yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(others)

    def argument(self, number: int) -> torch.Tensor:
        """Of the n-th call."""
        return self._arguments[number]

    def change(self, number: int) -> None:
        """What the caller does before the n-th call."""
        if number:
            self._changes[number - 1]()

    def call(self, number: int, program: Callable[..., Any]) -> None:
        """The n-th call, and what the caller does with its result."""
        result = program(self._arguments[number])
        self.results.append(result)
        roots = [result] if isinstance(result, torch.Tensor) and result.requires_grad else []
        if self._world.after == "backward" and roots:
            roots[0].sum().backward()
        if self._world.after == "grad" and roots:
            leaves = [t for t in self.snapshot().tensors if t.requires_grad and t.is_leaf and t is not result]
            gradients = torch.autograd.grad(roots[0].sum(), leaves, allow_unused=True) if leaves else ()
            plain = [g.clone(memory_format=torch.contiguous_format) for g in gradients if g is not None]
            self.results.append(plain)  # the strides of gradients are autograd's own affair

    def snapshot(self, versions: dict[int, int] | None = None) -> Snapshot:
        """Of all that the caller knows: the variables, the arguments, the results so far."""
        known = {"program": self.program, **self._read(), "arguments": self._arguments, "results": self.results}
        return Snapshot(known, versions)


def runs(world: World) -> bool:
    """Whether eager runs all calls."""
    try:
        run = Running(world)
        with run.active():
            for number in range(world.calls):
                run.change(number)
                run.call(number, run.program)
    except Exception:
        return False
    return True


def _argument(world: World, number: int) -> torch.Tensor:
    return ((torch.arange(6.0) + number).reshape(2, 3) / 4).requires_grad_(world.requires_grad)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, of schedulers that are stepped first and the like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
