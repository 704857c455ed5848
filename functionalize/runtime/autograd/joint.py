"""The forward and the backward of a program as graphs: joint, cut in two, and those of higher derivatives.

Invariant: a call's forward gives what the program's own graph gives, and what the backward takes besides. Limits: the
halves are functions of tensors and plain values, compiled by whoever cut the joint graph.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from functionalize._torch import counted_with, storage_key
from functionalize._torch.dispatch import BelowVersions, any_autocast, without_autocast
from functionalize.aliasing.geometry import Layout
from functionalize.aliasing.strided_layout import with_layout
from functionalize.errors import DataDependentError
from functionalize.runtime.capturing import CAPTURING
from functionalize.runtime.guards.modes import in_modes, modes_now
from functionalize.runtime.guards.sizes import Sizes
from functionalize.runtime.metadata import SymbolSources

Function = Callable[..., Sequence[Any]]


class Sources(NamedTuple):
    """What gradients are computed from: for each a bit for each input, then each tangent."""

    every: tuple[int, ...]
    contents: tuple[int, ...]  # without those whose values do not matter
    flowing: tuple[int, ...]  # of these, those that gradients could flow to: not through masks and integers alone
    tangents: tuple[int, ...]  # for each a bit for each tangent from which autograd gets there


@dataclass(frozen=True, eq=False)
class JointGraph:
    """A program's forward and backward in one graph: of ``primals_N`` and ``tangents_N``.

    Its outputs are results of the forward, gradients of inputs, and for each tangent what the backward writes to it.
    """

    module: GraphModule
    numbers: tuple[int, ...]  # of the program's inputs that it takes: `primals_N` is the N-th of all
    names: tuple[str, ...]  # of these
    results: tuple[int, ...]  # which of the program's results it gives, before the values of bases
    bases: tuple[int, ...]  # of which bases it gives the values, after the results
    layouts: tuple[Layout | None, ...]  # of both; None: as they come
    tangents: tuple[int, ...]  # which of both have one
    gradients: tuple[int | None, ...]  # for each input its position among the gradients
    at_risk: frozenset[int]  # inputs in whose storages a call writes, or grows a version
    detached: frozenset[int]  # inputs that require gradients before a call, and not afterwards
    reads_storages: bool  # whether it reads at addresses in their storages
    hides_writes: bool  # whether tensors were written that autograd takes for what they were before
    symbols: SymbolSources  # in positions of these inputs and results
    sources: Sources  # what the gradients are computed from
    draws: tuple[Any, ...]  # generators that the graph draws random numbers from, as `RandomState` names them


class Backward(enum.Enum):
    """In the place of a joint graph: what has gradients, but was recorded without its backward (order 0)."""

    UNTRACED = enum.auto()


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """The two halves of a joint graph, and how they fit together."""

    joint: JointGraph
    forward: Function
    backward: Function | None  # None: no input gets a gradient
    saved: Sequence[int]  # what the backward takes before the tangents: positions among inputs, then results
    gradients: Sequence[int | None]  # for each input of the graph the backward's result that is its gradient
    written: Sequence[int | None]  # for each tangent the backward's result that is written to it
    doubles: Sequence[int]  # results that are inputs, or stand there twice: autograd wants tensors of their own
    views: Sequence[
        tuple[int, int]
    ]  # results in the memory of inputs, or of others: of which, counted as what is saved
    strides: Sequence[tuple[int, ...] | None]  # of each tangent, where these are plain numbers

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The forward's results, and after them what else is to be saved."""
        detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
        with torch.enable_grad(), BelowVersions():  # kernels ask whether to keep what a backward needs
            results = list(called(self.forward, detached))
        for position in self.doubles:
            if isinstance(results[position], torch.Tensor):
                results[position] = results[position].detach()
        symbols = self.joint.symbols.bind(inputs, results)
        with BelowVersions():  # to autograd they are no views, which nobody may write where a function made them
            for position, layout in enumerate(self.joint.layouts):  # graphs without views, and compilers, choose others
                if layout is not None:
                    now = layout if layout.static else symbols.layout(layout)
                    results[position] = with_layout(results[position], now)
        for position, source in self.views:  # the graph, below what counts writes, gave them counters of their own
            of = inputs[source] if source < len(inputs) else results[source - len(inputs)]
            results[position] = counted_with(results[position], of)
        return results

    @property
    def differentiated(self) -> list[int]:
        """The inputs that get a gradient."""
        return [number for number, position in enumerate(self.gradients) if position is not None]

    @functools.cached_property
    def without_gradient(self) -> list[int]:
        """The other inputs."""
        return [number for number, position in enumerate(self.gradients) if position is None]

    @functools.cached_property
    def sources(self) -> frozenset[int]:
        """The inputs that some gradient is computed from."""
        return self._inputs_among(self.joint.sources.every)

    @functools.cached_property
    def read(self) -> frozenset[int]:
        """Those of them whose values matter."""
        return self._inputs_among(self.joint.sources.contents)

    @functools.cached_property
    def copied(self) -> frozenset[int]:
        """The inputs that the call is about to write, and that are needed afterwards as they were."""
        return self.joint.at_risk.intersection(self.read.union(self.saved))

    def safe(self, saved: list[Any], inputs: Sequence[Any]) -> list[Any]:
        """What is saved, where it is a view of an input that the call is about to write, as a copy."""
        at_risk = {storage_key(inputs[n]) for n in self.joint.at_risk if isinstance(inputs[n], torch.Tensor)}
        if not at_risk:
            return saved
        tensors = [isinstance(value, torch.Tensor) and storage_key(value) in at_risk for value in saved]
        return [value.clone() if risky else value for value, risky in zip(saved, tensors, strict=True)]

    def watched(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """What is saved besides, so that writes are noticed: sparse tensors with views, which count their own."""
        sources = {source for _, source in self.views if values[source].layout is not torch.strided}
        return [values[source] for source in sources.difference(self.joint.at_risk)]

    def _inputs_among(self, sources: Sequence[int]) -> frozenset[int]:
        known = functools.reduce(operator.or_, sources, 0)
        every = self.joint.hides_writes  # what was overwritten has gradients, and is not one of the sources
        return frozenset(number for number in range(len(self.joint.names)) if every or known >> number & 1)

    def may_require_grad(self, required: Sequence[bool]) -> list[bool]:
        """Of each gradient: whether it is computed from what requires gradients, of inputs and tangents."""
        bits = sum(1 << number for number, one in enumerate(required) if one)
        positions = [self.joint.gradients[number] for number in self.differentiated]
        return [bool(self.joint.sources.flowing[position] & bits) for position in positions]  # type: ignore[index]

    def unreached(self, tangents: Sequence[Any]) -> list[int]:
        """The inputs that get no gradient where some ``tangents``, of all results, are None."""
        given = sum(1 << n for n, result in enumerate(self.joint.tangents) if tangents[result] is not None)
        positions = ((number, self.joint.gradients[number]) for number in self.differentiated)
        return [number for number, position in positions if not self.joint.sources.tangents[position] & given]  # type: ignore[index]


def tangent_name(order: int, number: int) -> str:
    """What the next order calls a tangent; the inputs of a program have names without capitals."""
    return f"Tangent_{order}_{number}"


_KEPT = 8  # derivatives of one order, for different sizes; the oldest goes


class Derivative(NamedTuple):
    """What is called for a derivative of some order, and for which sizes that is right."""

    call: ForwardCall
    serves: Callable[[Sizes], bool]


class Orders:
    """The derivatives of one program, by order: each is captured when it is first asked for.

    One that branches on sizes serves only calls of sizes that take the same branches; others get one of their own.
    """

    def __init__(
        self,
        first: ForwardCall,
        capture: Callable[[int, Sizes], Derivative],
        sizes_of: Callable[[Sequence[Any]], Sizes] | None = None,
    ) -> None:
        """``capture``: makes the call whose forward computes the derivative before a given order, for some sizes.

        ``sizes_of``: of a call's inputs, what sizes may differ; None where none may.
        """
        self.first, self.sizes_of, self._capture = first, sizes_of, capture
        self._kept, self._modes = dict[int, list[Derivative]](), modes_now()
        self._last = dict[int, tuple[Sizes, ForwardCall]]()

    def call(self, order: int, sizes: Sizes) -> ForwardCall:
        """What is called for a derivative of an order, of a call of such sizes, and is differentiated for the next.

        Raises:
            DataDependentError: it branches on tensor values.
            RuntimeError: there is none, and why.
        """
        last, found = self._last.get(order, ((), None))
        if found is not None and last == sizes:  # what it decides takes long to check
            return found
        found = self._known(order, sizes)
        if found is None:
            with CAPTURING:
                found = self._known(order, sizes) or self._captured(order, sizes)
        self._last[order] = sizes, found
        return found

    def _known(self, order: int, sizes: Sizes) -> ForwardCall | None:
        kept = self._kept.get(order, ())
        return next((derivative.call for derivative in kept if derivative.serves(sizes)), None)

    def _captured(self, order: int, sizes: Sizes) -> ForwardCall:
        try:
            # In the modes that the program was called in; in this thread, as that of a device may wait for the lock.
            with in_modes(self._modes), torch.autograd.set_multithreading_enabled(False):
                made = self._capture(order, sizes)
        except DataDependentError:
            raise
        except Exception as error:
            raise RuntimeError(f"the derivative of order {order} of a captured program: {error}") from error
        self._kept[order] = [made, *self._kept.get(order, ())][:_KEPT]
        return made.call


def called(function: Function, inputs: Sequence[Any]) -> Sequence[Any]:
    """A graph's results. Graphs of operators below autocast must not be cast again."""
    if any_autocast():
        with without_autocast():
            results = function(*inputs)
    else:
        results = function(*inputs)
    return results if isinstance(results, (list, tuple)) else (results,)
