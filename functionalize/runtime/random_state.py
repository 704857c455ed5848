"""The state of the generators that a call draws random numbers from: another run draws the same ones.

Invariant: a run under the state of a call leaves the generators as it found them. Limits: generators of the CPU and of
CUDA devices, and those that are passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from functionalize.ops.calls import draws


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return draws(node.target, node.args, node.kwargs)


@dataclass(frozen=True, eq=False)
class RandomState:
    """Generators, each with its state at a call."""

    states: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def now(cls, draws: Sequence[Any], inputs: Mapping[str, Any]) -> RandomState:
        """The state now. ``draws``: generators, devices that have one, and names of inputs that are one."""
        found = (generator_of(source, inputs) for source in draws)
        return cls(tuple((generator, generator.get_state()) for generator in found)) if draws else _NONE

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw once more what was drawn from this state on."""
        before = [(generator, generator.get_state()) for generator, _ in self.states]
        try:
            for generator, state in self.states:
                generator.set_state(state)
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


_NONE = RandomState()


def generator_of(source: Any, inputs: Mapping[str, Any]) -> torch.Generator:
    """A generator, by itself, by the device whose default it is, or by the name of an input."""
    if isinstance(source, torch.Generator):
        return source
    if isinstance(source, str):
        return inputs[source]  # type: ignore[no-any-return]
    if source.type == "cuda":
        index = torch.cuda.current_device() if source.index is None else source.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
