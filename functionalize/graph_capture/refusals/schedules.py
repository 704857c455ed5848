"""Schedulers of learning rates that a program steps: a call steps them itself, once all else is done.

A scheduler computes with Python numbers, and each path of its code would be one more variant of the program. So a
capture records that a scheduler is stepped, and does not step it; guards do not compare what schedulers hold.

Invariant: a program that reads or writes what a scheduler holds, or reads a rate after a step, is captured again, and
the code of the step is traced like the program's own. Limits: torch's own schedulers, of rates that are not tensors,
without the user's functions; the code of others is traced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler as schedulers

from functionalize._torch.symbols.tracing import SYMBOLS
from functionalize.call_stack import Location, user_location
from functionalize.graph_capture.inputs.watched_state import WatchedState
from functionalize.python_state.containers import copy_of, unchanged, write
from functionalize.python_state.walk import StateWalk
from functionalize.runtime.guards.python_guards import PythonGuards, is_whole
from functionalize.runtime.outputs.side_effects import ScheduleStep

_CLASSES = [value for value in vars(schedulers).values() if inspect.isclass(value)]
KINDS: frozenset[Any] = frozenset(kind for kind in _CLASSES if issubclass(kind, schedulers.LRScheduler))
_NUMBERS = (bool, int, float, *SYMBOLS)
_PLAIN = frozenset({*_NUMBERS, str, type(None)})


class NumberRead(BaseException):
    """A program reads what a step changes: no error of its own, which it could catch."""


@dataclass(frozen=True)
class _Step:
    """A step that the program does: what its scheduler was given, and where."""

    scheduler: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    line: Location


class Schedules:
    """The schedulers among a program's state."""

    def __init__(self, state: StateWalk) -> None:
        self._state = state
        touched = [(one, self._touched(one)) for one in state.seen if type(one) in KINDS]
        self.touched: dict[int, list[Any]] = {id(one): found for one, found in touched if found is not None}
        self.attributes: list[dict[str, Any]] = [vars(one) for one, found in touched if found is not None]
        inner = [value for own in self.attributes for value in own.values() if _is_plain(value)]
        self._held = {id(one) for own in self.attributes for one in (own, *inner)}
        if self._held and any(
            id(slot.get()) in self._held for slot in state.entered if self._is_elsewhere(slot.container)
        ):
            self.touched, self.attributes, self._held = {}, [], set()

    def _is_elsewhere(self, container: Any) -> bool:
        return id(container) not in self._held

    def _touched(self, scheduler: Any) -> list[Any] | None:
        """The containers that a step reads or changes; None where it may do more."""
        found, todo, seen = list[Any](), [scheduler], set[int]()
        while todo:
            one = todo.pop()
            if id(one) in seen or _is_plain(one):
                continue
            seen.add(id(one))
            if isinstance(one, torch.optim.Optimizer):
                groups = one.param_groups
                if any(isinstance(value, torch.Tensor) for group in groups for value in group.values()):
                    return None
                found += [groups, *groups]
            elif type(one) in KINDS:
                found.append(vars(one))
                todo += vars(one).values()
            elif type(one) in (list, tuple):
                todo += one
            elif not (inspect.isfunction(one) and one.__module__ == schedulers.__name__):
                return None
        return found if self._state.containers.keys() >= set(map(id, found)) else None

    def leave_out(self, guards: PythonGuards) -> None:
        """Have a call not be asked what they hold."""
        if self.attributes:
            guards.rows = [
                one
                for one in guards.rows
                if self._is_elsewhere(one.container) or not (_is_plain(one.value) or is_whole(one.key))
            ]


class ScheduleSteps:
    """The steps of one run of a program."""

    def __init__(self, watched: WatchedState, schedules: Schedules) -> None:
        self._watched, self._state, self._schedules = watched, watched.walk, schedules
        self._thread = threading.get_ident()
        self._steps: list[_Step] = []
        self._places: list[tuple[Any, Any, Any]] = []  # containers and keys, what is to be there again
        self._contents: dict[int, tuple[Any, Any]] = {}  # containers that steps read, as they were when these began
        self._unread = _Unread()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the steps of schedulers, instead of doing them.

        Raises:
            NumberRead: the program knows what they hold, or rates after a step, or changes them.
        """
        if not self._schedules.attributes:
            yield
            return
        before = {kind: vars(kind)["step"] for kind in KINDS if "step" in vars(kind)}
        for kind, step in before.items():
            kind.step = self._noting(step)
        try:
            self._hide(self._schedules.attributes)
            yield
            self._check()
        finally:
            for kind, step in before.items():
                kind.step = step
            for container, key, value in self._places:
                write(container, key, value)

    def described(self, recipe: Callable[[Any, str], Any]) -> tuple[ScheduleStep, ...]:
        """What a call has to do. ``recipe``: how it makes a value."""
        numbers = {id(item): number for number, item in enumerate(self._state.seen)} if self._steps else {}

        def made(value: Any) -> Any:
            return recipe(value, "an argument of a scheduler")

        return tuple(
            ScheduleStep(
                number=numbers[id(step.scheduler)],
                args=tuple(map(made, step.args)),
                kwargs={name: made(value) for name, value in step.kwargs.items()},
                line=str(step.line),
            )
            for step in self._steps
        )

    def _noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def noting(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            known = threading.get_ident() == self._thread and all(map(_is_number, (*args, *kwargs.values())))
            touched = self._schedules.touched.get(id(scheduler)) if known else None
            if touched is None:
                return step(scheduler, *args, **kwargs)
            self._check()
            self._hide(touched)
            kept = {name: _kept(value) for name, value in kwargs.items()}
            self._steps.append(_Step(scheduler, list(map(_kept, args)), kept, user_location()))
            return None

        return noting

    def _hide(self, containers: Sequence[Any]) -> None:
        """Have nobody read the numbers in some containers from now on."""
        begun = dict(zip(self._state.containers, self._watched.begun, strict=True))
        for container in containers:
            for key, value in list(container.items()) if isinstance(container, dict) else ():
                if type(value) is not _Unread and _is_plain(value):
                    if value is not begun[id(container)].get(key):
                        raise NumberRead  # the program has changed it before
                    self._places.append((container, key, value))
                    write(container, key, self._unread)
            self._contents[id(container)] = container, copy_of(container)

    def _check(self) -> None:
        """Raise if the program has changed what a step reads or changes."""
        if not all(unchanged(container, content) for container, content in self._contents.values()):
            raise NumberRead


def _is_number(value: Any) -> bool:
    """Whether a step may be given it: Python's or the graph's, a tensor of one element, nothing."""
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return value is None or one or isinstance(value, _NUMBERS)


def _kept(value: Any) -> Any:
    """What a step is given, as it is now."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers and text alone."""
    kind = type(value)
    if issubclass(kind, (list, tuple, dict)):
        return all(map(_is_plain, value.values() if issubclass(kind, dict) else value))
    return kind in _PLAIN


def _read(*args: Any, **kwargs: Any) -> Any:
    raise NumberRead


_ASKED = {name for kind in (bool, float, complex, str, list, dict) for name in dir(kind) if name.startswith("__")}
_OF_CLASSES = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__doc__"}
_Unread: Any = type("_Unread", (), dict.fromkeys(_ASKED - _OF_CLASSES, _read))
