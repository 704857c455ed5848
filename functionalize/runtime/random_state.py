"""The states of the generators that a call draws random numbers from, so that another run draws the same numbers.

Invariant: a run under the state of a call leaves the generators as they were before it. Limits: the default generators
of the CPU and of CUDA devices, and generators that are passed.
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


def fresh_generator(generator: torch.Generator) -> torch.Generator:
    """The generator that a program makes at each call, in the state in which the capture's own began."""
    return generator.clone_state()


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return draws(node.target, node.args, node.kwargs)


def source_of(node: Node, root: torch.nn.Module) -> Any:
    """The source of a node's random numbers: a generator, a device, a node with one; None if it draws none.

    ``root``: the module that holds the graph's attributes, such as bodies of higher-order ops, which may draw too.
    """
    if is_random(node):
        generator = node.kwargs.get("generator")
        if isinstance(generator, Node) and generator.op == "get_attr":
            return getattr(root, str(generator.target))
        return _device_of(node) if generator is None else generator
    for argument in node.all_input_nodes:
        body = getattr(root, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(body, GraphModule):
            inside = (source_of(inner, body) for inner in body.graph.nodes)
            source = next((source for source in inside if source is not None), None)
            if source is not None:
                return source if isinstance(source, torch.Generator) else _device_of(node)
    return None


def _device_of(node: Node) -> torch.device:
    """The device that a node draws on: that of its result or, if the node has no value yet, of its inputs."""
    device = node.kwargs.get("device")
    if isinstance(device, (str, torch.device)):
        return torch.device(device)
    values = pytree.tree_leaves([source.meta.get("val") for source in (node, *node.all_input_nodes)])
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def sources(graph: Graph, root: torch.nn.Module) -> tuple[Any, ...]:
    """The generators, devices and names of inputs that the nodes of a graph draw from, for :class:`RandomState`."""
    of_nodes = (source_of(node, root) for node in graph.nodes)
    outer = (source for source in of_nodes if not (isinstance(source, Node) and source.target is fresh_generator))
    named = (source.name if isinstance(source, Node) else source for source in outer)
    return tuple(dict.fromkeys(source for source in named if source is not None))


@dataclass(frozen=True, eq=False)
class RandomState:
    """Generators, each with its state at a call."""

    states: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def now(cls, draws: Sequence[Any], inputs: Mapping[str, Any]) -> RandomState:
        """The state now. ``draws``: generators, devices for their default ones, names of inputs that are generators."""
        generators = (generator_of(source, inputs) for source in draws)
        return cls(tuple((generator, generator.get_state()) for generator in generators)) if draws else _NONE

    def restore(self) -> None:
        """Set the generators to this state."""
        for generator, state in self.states:
            generator.set_state(state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run in this state: what runs draws the same numbers once more."""
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
    """Restore torch's default generators afterwards."""
    before = RandomState(tuple((generator, generator.get_state()) for generator in _default_generators()))
    try:
        yield
    finally:
        before.restore()


def default_generators_of_devices() -> tuple[torch.Generator, ...]:
    """The default generators of all devices in use, without the CPU's."""
    return tuple(torch.cuda.default_generators) if torch.cuda.is_initialized() else ()


def _default_generators() -> list[torch.Generator]:
    return [torch.default_generator, *default_generators_of_devices()]


def generator_of(source: Any, inputs: Mapping[str, Any]) -> torch.Generator:
    """The generator for a source: itself, the default one of a device, or the input of a name."""
    if isinstance(source, torch.Generator):
        return source
    if isinstance(source, str):
        return inputs[source]  # type: ignore[no-any-return]
    if source.type == "cuda":
        index = torch.cuda.current_device() if source.index is None else source.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
