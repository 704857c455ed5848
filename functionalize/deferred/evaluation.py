"""Computes nodes of a recording: the slice of the graph that they need, in the order of the program.

Invariant: a node has the value that eager would have given it. A value is dropped after its last use, and an operator
that would change a copy of it there changes the value itself. Limits: those of the operators on the device.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from functionalize._torch import OpOverload, pytree
from functionalize._torch.deferred import is_sole_user
from functionalize._torch.dispatch import kernels_alone
from functionalize.deferred.externals import Externals
from functionalize.deferred.random.draws import Draws
from functionalize.deferred.random.fills import fill_of
from functionalize.deferred.specs import spec_of
from functionalize.ops import traits
from functionalize.ops.variants import in_place_of, written_view
from functionalize.refusals.deferred import DEFERRED_FOR_MISSING_DEVICE

aten = torch.ops.aten
Done = Callable[[Node, Any], None]


class Evaluation:
    """One run over a part of the graph."""

    def __init__(self, root: torch.nn.Module, draws: Draws, externals: Externals, device: torch.device | None) -> None:
        """``device``: where to compute what was recorded for a device that this machine does not have."""
        self._root, self._draws, self._externals, self._device = root, draws, externals, device
        self._values: dict[Node, Any] = {}
        self._uses: Counter[Node] = Counter()

    def run(self, wanted: Iterable[Node], done: Done) -> None:
        """Compute nodes. ``done`` gets each with its value, and owns the value where :func:`is_sole_user` holds."""
        pending = Counter(wanted)
        needed = needs(pending)
        self._uses = Counter(argument for inputs in needed.values() for argument in inputs)
        self._uses.update(set(pending))
        with kernels_alone(), torch.inference_mode(False), self._draws.running():
            for node in sorted(needed):
                value = self._values[node] = self._computed(node)
                for argument in needed[node]:
                    self._used(argument)
                if node in pending:
                    if self._uses[node] == 1:
                        del self._values[node]
                    done(node, value)
                del value

    def values(self, nodes: Iterable[Node]) -> list[Any]:
        """The values of nodes, in the order of the program."""
        values: list[Any] = []
        self.run(nodes, lambda node, value: values.append(value))
        return values

    def compute(self, node: Node) -> None:
        """Compute one node for its effect on a generator."""
        Evaluation(self._root, self._draws, self._externals, self._device).values([node])

    def _used(self, node: Node) -> None:
        self._uses[node] -= 1
        if not self._uses[node]:
            self._values.pop(node, None)

    def _computed(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self._externals.read(node, self._root)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return self._values[source][node.args[1]]
        if "draw" in node.meta:
            return self._draws.perform(node, lambda: self._called(node), self.compute)
        return self._called(node)

    def _called(self, node: Node) -> Any:
        fill = fill_of(node)
        if fill is not None:
            generator = None if fill.generator is None else self._values.get(fill.generator, fill.generator)
            return fill.run(fill.spec.empty(self.place(fill.spec.device)), generator)
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        if self._may_overwrite(node):
            base, *rest = args
            if node.target in traits.COPIES:
                return base
            view = written_view(node.target)
            if view is None:
                return in_place_of(node.target)(base, *rest, **kwargs)
            source, *where = rest
            view(base, *where).copy_(source)
            return base
        args, kwargs = pytree.tree_map_only(torch.device, self.place, (args, kwargs))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _may_overwrite(self, node: Node) -> bool:
        """Whether an op may write its result to its first argument: after its last use, and at the same layout."""
        base: Any = node.args[0] if node.args else None
        if not (isinstance(base, Node) and self._uses[base] == 1 and isinstance(node.target, OpOverload)):
            return False
        op = node.target
        by_element = op in traits.WRITES_PART or torch.Tag.pointwise in op.tags
        in_place = in_place_of(op) if by_element else written_view(op)
        if in_place is None and op not in traits.COPIES:
            return False
        value, spec = self._values[base], spec_of(node)
        if spec is None or spec != spec_of(base) or base.op == "get_attr":
            return False
        return isinstance(value, torch.Tensor) and value.stride() == spec.stride and is_sole_user(value)

    def place(self, device: torch.device) -> torch.device:
        """The device on which to compute what was recorded for a device."""
        if available(device) == device:
            return device
        if self._device is None:
            raise DEFERRED_FOR_MISSING_DEVICE.error(device=device)
        return self._device


def available(device: torch.device) -> torch.device:
    """The device, or the CPU for CUDA on a machine without CUDA."""
    return torch.device("cpu") if device.type == "cuda" and not torch.cuda.is_available() else device


def needs(wanted: Iterable[Node]) -> Mapping[Node, Sequence[Node]]:
    """Some nodes and all that they are computed from, each with the nodes that it reads itself."""
    inputs_of: dict[Node, list[Node]] = {}
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in inputs_of:
            inputs = node.all_input_nodes
            if fill_of(node) is not None:  # it does not read the tensor that it fills
                inputs = [argument for argument in inputs if argument is node.kwargs.get("generator")]
            inputs_of[node] = inputs
            waiting += inputs
    return inputs_of
