"""Forward and backward of a program as graphs: the joint graph, its two halves, and those of higher derivatives.

Invariant: the forward of a call computes what the program's own graph computes, and what the backward needs besides.
Limits: the halves are functions of tensors and plain values, compiled by whoever partitions the joint graph.
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
from functionalize.runtime.autograd.wrappers import Gradients
from functionalize.runtime.capturing import CAPTURING
from functionalize.runtime.guards.modes import in_modes, modes_now
from functionalize.runtime.guards.sizes import Sizes
from functionalize.runtime.metadata import SymbolSources

Function = Callable[..., Sequence[Any]]


class Sources(NamedTuple):
    """What gradients are computed from: for each gradient, a bit for each input, then for each tangent."""

    every: tuple[int, ...]
    contents: tuple[int, ...]  # without those whose values do not matter
    flowing: tuple[int, ...]  # of these, those that gradients can flow to: not through masks and integers alone
    tangents: tuple[int, ...]  # for each gradient, a bit for each tangent from which autograd reaches it


@dataclass(frozen=True, eq=False)
class JointGraph:
    """A program's forward and backward in one graph, with the inputs ``primals_N`` and ``tangents_N``.

    Its outputs are the forward's results, the gradients of inputs, and for each tangent what the backward writes to it.
    """

    module: GraphModule
    numbers: tuple[int, ...]  # of the program's inputs that it takes: `primals_N` is the program's N-th input
    names: tuple[str, ...]  # of these inputs
    results: tuple[int, ...]  # which of the program's results it gives, before the values of bases
    bases: tuple[int, ...]  # the bases whose values it gives, after the results
    layouts: tuple[Layout | None, ...]  # of results and bases; None: as the graph gives them
    tangents: tuple[int, ...]  # which results and bases have a tangent
    gradients: Gradients
    at_risk: frozenset[int]  # inputs whose storages a call writes, or whose versions it grows
    detached: frozenset[int]  # inputs that require gradients before a call, and not afterwards
    reads_storages: bool  # whether it reads the storages of inputs by offset
    hides_writes: bool  # whether tensors were written for which autograd still has the history from before
    symbols: SymbolSources  # by positions of these inputs and results
    sources: Sources  # of the gradients
    draws: tuple[Any, ...]  # generators that the graph draws random numbers from, as `RandomState` names them


class Backward(enum.Enum):
    """In the place of the joint graph of a program with gradients that was recorded without its backward (order 0)."""

    UNTRACED = enum.auto()


@dataclass(frozen=True, eq=False)
class ForwardCall:
    """The two halves of a joint graph, and how the outputs of one are the inputs of the other."""

    joint: JointGraph
    forward: Function
    backward: Function | None  # None: no input gets a gradient
    saved: Sequence[int]  # the backward's inputs before the tangents, as positions among inputs, then results
    gradients: Sequence[int | None]  # for each of the joint graph's gradients, the backward's result
    written: Sequence[int | None]  # for each tangent, the backward's result that is written to it
    doubles: Sequence[int]  # results that are inputs or earlier results: autograd requires distinct tensors
    views: Sequence[tuple[int, int]]  # results in the memory of inputs or results: these, by positions as in `saved`
    strides: Sequence[tuple[int, ...] | None]  # of each tangent, if these are plain numbers

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The forward's results, then other values to save."""
        detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
        with torch.enable_grad(), BelowVersions():  # kernels ask whether to keep what a backward needs
            results = list(called(self.forward, detached))
        for position in self.doubles:
            if isinstance(results[position], torch.Tensor):
                results[position] = results[position].detach()
        symbols = self.joint.symbols.bind(inputs, results)
        with BelowVersions():  # autograd must not see views: those that a custom function returns cannot be written
            for position, layout in enumerate(self.joint.layouts):  # a graph without views, or a compiler, has others
                if layout is not None:
                    now = layout if layout.static else symbols.layout(layout)
                    results[position] = with_layout(results[position], now)
        for position, source in self.views:  # as the graph ran below the counting of writes, each has its own counter
            of = inputs[source] if source < len(inputs) else results[source - len(inputs)]
            results[position] = counted_with(results[position], of)
        return results

    @property
    def differentiated(self) -> list[int]:
        """The inputs that get a gradient."""
        return [number for number, position in enumerate(self.gradients) if position is not None]

    @functools.cached_property
    def without_gradient(self) -> list[int]:
        """The inputs that get no gradient."""
        return [number for number in range(len(self.joint.names)) if self.gradients[number] is None]

    @functools.cached_property
    def sources(self) -> frozenset[int]:
        """The inputs that some gradient is computed from."""
        return self._inputs_among(self.joint.sources.every)

    @functools.cached_property
    def read(self) -> frozenset[int]:
        """The inputs whose values some gradient is computed from."""
        return self._inputs_among(self.joint.sources.contents)

    @functools.cached_property
    def copied(self) -> frozenset[int]:
        """The inputs that the call will write, and whose old values are needed afterwards."""
        return self.joint.at_risk.intersection(self.read.union(self.saved))

    def safe(self, saved: list[Any], inputs: Sequence[Any]) -> list[Any]:
        """The saved values, with copies of those that are views of inputs that the call will write."""
        at_risk = {storage_key(inputs[n]) for n in self.joint.at_risk if isinstance(inputs[n], torch.Tensor)}
        if not at_risk:
            return saved
        tensors = [isinstance(value, torch.Tensor) and storage_key(value) in at_risk for value in saved]
        return [value.clone() if risky else value for value, risky in zip(saved, tensors, strict=True)]

    def watched(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Further tensors to save, so that writes are noticed: sparse ones, whose views have their own counters."""
        sources = {source for _, source in self.views if values[source].layout is not torch.strided}
        return [values[source] for source in sources.difference(self.joint.at_risk)]

    def _inputs_among(self, sources: Sequence[int]) -> frozenset[int]:
        bits = functools.reduce(operator.or_, sources, 0)
        every = self.joint.hides_writes  # an overwritten tensor has gradients, but is not among the sources
        return frozenset(number for number in range(len(self.joint.names)) if every or bits >> number & 1)

    def may_require_grad(self, required: Sequence[bool]) -> list[bool]:
        """For each gradient, whether it is computed from inputs or tangents that require gradients."""
        bits = sum(1 << number for number, requires in enumerate(required) if requires)
        positions = [self.joint.gradients.all[number] for number in self.differentiated]
        return [bool(self.joint.sources.flowing[position] & bits) for position in positions]  # type: ignore[index]

    def unreached(self, tangents: Sequence[Any]) -> list[int]:
        """The differentiated inputs that get no gradient if only these ``tangents`` are not None."""
        present = sum(1 << n for n, tangent in enumerate(tangents) if tangent is not None)
        positions = ((number, self.joint.gradients.all[number]) for number in self.differentiated)
        return [number for number, position in positions if not self.joint.sources.tangents[position] & present]  # type: ignore[index]


def tangent_name(order: int, number: int) -> str:
    """The name of a tangent in the next order; the inputs of a program have names without capitals."""
    return f"Tangent_{order}_{number}"


_KEPT = 8  # derivatives of one order, for different sizes; the oldest is dropped


class Derivative(NamedTuple):
    """The call that computes a derivative of some order, and for which sizes it is right."""

    call: ForwardCall
    serves: Callable[[Sizes], bool]


class Orders:
    """The derivatives of one program, by order: each is captured when it is first needed.

    A derivative that branches on sizes serves only sizes that take the same branches; other sizes get another one.
    """

    def __init__(
        self,
        first: ForwardCall,
        capture: Callable[[int, Sizes], Derivative],
        sizes_of: Callable[[Sequence[Any]], Sizes] | None = None,
    ) -> None:
        """``capture``: makes the call whose forward computes the derivative before a given order, for some sizes.

        ``sizes_of``: gives the sizes of a call's inputs that may differ; None if all are fixed.
        """
        self.first, self.sizes_of, self._capture = first, sizes_of, capture
        self._kept, self._modes = dict[int, list[Derivative]](), modes_now()
        self._last = dict[int, tuple[Sizes, ForwardCall]]()

    def call(self, order: int, sizes: Sizes) -> ForwardCall:
        """The call that computes a derivative of an order for such sizes, and is differentiated for the next order.

        Raises:
            DataDependentError: the derivative branches on tensor values.
            RuntimeError: the derivative could not be captured; the message says why.
        """
        last, call = self._last.get(order, ((), None))
        if call is not None and last == sizes:  # the conditions on sizes take long to check
            return call
        call = self._kept_call(order, sizes)
        if call is None:
            with CAPTURING:
                call = self._kept_call(order, sizes) or self._captured(order, sizes)
        self._last[order] = sizes, call
        return call

    def _kept_call(self, order: int, sizes: Sizes) -> ForwardCall | None:
        kept = self._kept.get(order, ())
        return next((derivative.call for derivative in kept if derivative.serves(sizes)), None)

    def _captured(self, order: int, sizes: Sizes) -> ForwardCall:
        try:
            # In the modes of the program's call; in this thread, as a device's autograd thread may wait for the lock.
            with in_modes(self._modes), torch.autograd.set_multithreading_enabled(False):
                made = self._capture(order, sizes)
        except DataDependentError:
            raise
        except Exception as error:
            raise RuntimeError(f"the derivative of order {order} of a captured program: {error}") from error
        self._kept[order] = [made, *self._kept.get(order, ())][:_KEPT]
        return made.call


def called(function: Function, inputs: Sequence[Any]) -> Sequence[Any]:
    """A graph's results, with autocast off: the graph already contains the casts."""
    if any_autocast():
        with without_autocast():
            results = function(*inputs)
    else:
        results = function(*inputs)
    return results if isinstance(results, (list, tuple)) else (results,)
