"""Steps of schedulers in a graph: each way that their code may go, and numbers that are chosen among these.

What torch's schedulers do is arithmetic on a few numbers, and comparisons of these say which. An exported program has
one graph for all calls: so the code of a step is run once for each way that it may go, and each number that it leaves
is chosen by what was compared.

Invariant: what a step leaves is what the code leaves that goes by the values; a way that raises is a decision by data,
against it. Limits: a step that computes with tensors, or may leave other things than other numbers, is followed as
any code is, each comparison a decision.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from functionalize._torch.dispatch import TorchDispatchMode
from functionalize._torch.symbols.traced_symbols import chosen_number
from functionalize.graph_capture.refusals.schedules import KINDS
from functionalize.python_state.containers import assign, copy_of, unchanged
from functionalize.python_state.walk import StateWalk

_MANY = 256  # ways, from which on a step is followed instead
_PLAIN = (int, float, bool, str)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_Asked = list[tuple[Any, bool]]  # conditions, and how they were answered


class _NoWayOn(BaseException):
    """A way on which Python must know a number: no error of the program's, which it could catch."""


class _NotMerged(BaseException):
    """A step computes with tensors, or may leave other things than other numbers."""


class _NumbersAlone(TorchDispatchMode):
    """Lets nobody compute with tensors, which may be a write, other than to read a number off one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            raise _NotMerged
        return func(*args, **(kwargs or {}))


class MergedSteps:
    """The steps of one run of a program, whose numbers are those of a trace."""

    def __init__(self, state: StateWalk, environment: Any, tracer: Any) -> None:
        self._state, self._environment, self._tracer = state, environment, tracer
        self._running = False

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """While steps of schedulers go all ways at once."""
        before = {kind: vars(kind)["step"] for kind in KINDS if "step" in vars(kind)}
        for kind, step in before.items():
            kind.step = self._merging(step)
        try:
            yield
        finally:
            for kind, step in before.items():
                kind.step = step

    def _merging(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def merging(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or not any(scheduler is one for one in self._state.seen):
                return step(scheduler, *args, **kwargs)
            self._running = True
            try:
                containers = [container for container, _ in self._state.containers.values()]
                ways = _Ways(containers, lambda: step(scheduler, *args, **kwargs), self._environment, self._tracer)
                if not ways.merge():
                    return step(scheduler, *args, **kwargs)
            finally:
                self._running = False

        return merging


class _Ways:
    """All ways of one step."""

    def __init__(self, containers: Sequence[Any], step: Callable[[], Any], environment: Any, tracer: Any) -> None:
        self._containers, self._step, self._environment, self._tracer = containers, step, environment, tracer
        self._before = [copy_of(one) for one in containers]
        self._count = 0
        self._closed: list[_Asked] = []  # ways that raise

    def merge(self) -> bool:
        """Leave what the step leaves, whichever way it goes; false, and all as it was, where that cannot be."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of ways that are not gone
                left = self._explored(())
        except _NotMerged:
            left = None
        if left is None or not all(map(self._is_not_gone, self._closed)):
            return False
        for container, content in zip(self._containers, left, strict=True):
            if not unchanged(container, content):
                assign(container, content)
        return True

    def _explored(self, way: tuple[bool, ...]) -> list[Any] | None:
        """What the containers hold after the ways that begin like one; None if all of these raise."""
        self._count += 1
        if self._count > _MANY:
            raise _NotMerged
        asked: _Asked = []
        left = self._left_by(way, asked)
        for at in reversed(range(len(way), len(asked))):
            other = self._explored((*way, *(answer for _, answer in asked[len(way) : at]), False))
            if left is None or other is None:
                left = other if left is None else left
            else:
                pairs = zip(left, other, strict=True)
                left = [self._chosen(asked[at][0], one, another) for one, another in pairs]
        return left

    def _left_by(self, way: tuple[bool, ...], asked: _Asked) -> list[Any] | None:
        """What the containers hold after one way, and then what they held before; ``asked`` gets what it asks."""

        def answer(number: Any) -> bool:
            if number.pytype is not bool:
                raise _NoWayOn
            known = next((given for one, given in asked if one.node.expr == number.expr), None)
            if known is None:
                known = way[len(asked)] if len(asked) < len(way) else True
                asked.append((torch.SymBool(number), known))
            return known

        try:
            with self._environment.choosing(answer), _NumbersAlone():
                self._step()
            return [copy_of(one) for one in self._containers]
        except (Exception, _NoWayOn):
            self._closed.append(asked)
            return None
        finally:
            for container, content in zip(self._containers, self._before, strict=True):
                if not unchanged(container, content):
                    assign(container, content)

    def _is_not_gone(self, way: _Asked) -> bool:
        """Whether a way is another one than that of the example's numbers, which is a decision by data."""
        gone: Any = True
        for condition, answer in way:
            gone = gone & (condition if answer else torch.sym_not(condition))
        return not gone

    def _chosen(self, condition: Any, one: Any, other: Any) -> Any:
        """A value where a condition holds, and another where it does not."""
        if one is other:
            return one
        kind = type(one)
        if kind is type(other) and kind in (list, tuple, dict) and len(one) == len(other):
            if kind is not dict:
                return kind(self._chosen(condition, *pair) for pair in zip(one, other, strict=True))
            if list(one) == list(other):
                return {key: self._chosen(condition, value, other[key]) for key, value in one.items()}
        if kind is type(other) and kind in _PLAIN and repr(one) == repr(other):
            return one
        if kind in _NUMBERS and type(other) in _NUMBERS:
            return chosen_number(self._tracer, condition, one, other)
        raise _NotMerged
