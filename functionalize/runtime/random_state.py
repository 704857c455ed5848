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
from torch.fx import Graph, GraphModule, Node

from functionalize._torch import pytree
from functionalize.ops.calls import draws


def anew(generator: torch.Generator) -> torch.Generator:
    """The generator that a program makes at each call: as the one that the capture saw began."""
    return generator.clone_state()


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return draws(node.target, node.args, node.kwargs)


def source_of(node: Node, root: torch.nn.Module) -> Any:
    """What a node draws random numbers from: a generator, a device that has one, a node; None if it draws none.

    ``root``: what the graph's attributes are found on: bodies of higher-order ops, which draw as well.
    """
    if is_random(node):
        generator = node.kwargs.get("generator")
        if isinstance(generator, Node) and generator.op == "get_attr":
            return getattr(root, str(generator.target))
        return _device_of(node) if generator is None else generator
    for argument in node.all_input_nodes:
        body = getattr(root, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(body, GraphModule):
            inside = (source_of(one, body) for one in body.graph.nodes)
            found = next((source for source in inside if source is not None), None)
            if found is not None:
                return found if isinstance(found, torch.Generator) else _device_of(node)
    return None


def _device_of(node: Node) -> torch.device:
    """The device that a node draws on: what it gives may not be known yet."""
    given = node.kwargs.get("device")
    if isinstance(given, (str, torch.device)):
        return torch.device(given)
    values = pytree.tree_leaves([one.meta.get("val") for one in (node, *node.all_input_nodes)])
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def sources(graph: Graph, root: torch.nn.Module) -> tuple[Any, ...]:
    """What the nodes of a graph draw random numbers from, as :class:`RandomState` names it."""
    found = (source_of(node, root) for node in graph.nodes)
    there = (source for source in found if not (isinstance(source, Node) and source.target is anew))
    named = (source.name if isinstance(source, Node) else source for source in there)
    return tuple(dict.fromkeys(source for source in named if source is not None))


@dataclass(frozen=True, eq=False)
class RandomState:
    """Generators, each with its state at a call."""

    states: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def now(cls, draws: Sequence[Any], inputs: Mapping[str, Any]) -> RandomState:
        """The state now. ``draws``: generators, devices that have one, and names of inputs that are one."""
        found = (generator_of(source, inputs) for source in draws)
        return cls(tuple((generator, generator.get_state()) for generator in found)) if draws else _NONE

    def restore(self) -> None:
        """Have the generators go on from here."""
        for generator, state in self.states:
            generator.set_state(state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw once more what was drawn from this state on."""
        before = [(generator, generator.get_state()) for generator, _ in self.states]
        try:
            self.restore()
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


_NONE = RandomState()


@contextlib.contextmanager
def default_generators_kept() -> Iterator[None]:
    """Around what draws, and leaves torch's generators as they were."""
    before = RandomState(tuple((generator, generator.get_state()) for generator in _default_generators()))
    try:
        yield
    finally:
        before.restore()


def default_generators_of_devices() -> tuple[torch.Generator, ...]:
    """The default generators of all devices that are in use, but the CPU's."""
    return tuple(torch.cuda.default_generators) if torch.cuda.is_initialized() else ()


def _default_generators() -> list[torch.Generator]:
    return [torch.default_generator, *default_generators_of_devices()]


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
