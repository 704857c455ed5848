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
KINDS: frozenset[Any] = frozenset(cls for cls in _CLASSES if issubclass(cls, schedulers.LRScheduler))
_NUMBERS = (bool, int, float, *SYMBOLS)
_PLAIN = frozenset({*_NUMBERS, str, type(None)})


class NumberRead(BaseException):
    """A program reads what a step changes: not an `Exception`, which the program could catch."""


@dataclass(frozen=True)
class _Step:
    """A step that the program does: the scheduler, its arguments, and the line."""

    scheduler: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    line: Location


class Schedules:
    """The schedulers in a program's state."""

    def __init__(self, state: StateWalk) -> None:
        self._state = state
        touched = [(item, self._touched(item)) for item in state.seen if type(item) in KINDS]
        self.touched: dict[int, list[Any]] = {
            id(item): containers for item, containers in touched if containers is not None
        }
        self.attributes: list[dict[str, Any]] = [vars(item) for item, containers in touched if containers is not None]
        inner = [value for own in self.attributes for value in own.values() if _is_plain(value)]
        self._held = {id(container) for own in self.attributes for container in (own, *inner)}
        if self._held and any(
            id(slot.get()) in self._held for slot in state.entered if self._is_elsewhere(slot.container)
        ):
            self.touched, self.attributes, self._held = {}, [], set()

    def _is_elsewhere(self, container: Any) -> bool:
        return id(container) not in self._held

    def _touched(self, scheduler: Any) -> list[Any] | None:
        """The containers that a step reads or changes; None where it may do more."""
        containers, todo, seen = list[Any](), [scheduler], set[int]()
        while todo:
            value = todo.pop()
            if id(value) in seen or _is_plain(value):
                continue
            seen.add(id(value))
            if isinstance(value, torch.optim.Optimizer):
                groups = value.param_groups
                if any(isinstance(entry, torch.Tensor) for group in groups for entry in group.values()):
                    return None
                containers += [groups, *groups]
            elif type(value) in KINDS:
                containers.append(vars(value))
                todo += vars(value).values()
            elif type(value) in (list, tuple):
                todo += value
            elif not (inspect.isfunction(value) and value.__module__ == schedulers.__name__):
                return None
        return containers if self._state.containers.keys() >= set(map(id, containers)) else None

    def leave_out(self, guards: PythonGuards) -> None:
        """Leave what they hold out of the guards."""
        if self.attributes:
            guards.rows = [
                guard
                for guard in guards.rows
                if self._is_elsewhere(guard.container) or not (_is_plain(guard.value) or is_whole(guard.key))
            ]


class ScheduleSteps:
    """The steps of one run of a program."""

    def __init__(self, watched: WatchedState, schedules: Schedules) -> None:
        self._watched, self._state, self._schedules = watched, watched.walk, schedules
        self._thread = threading.get_ident()
        self._steps: list[_Step] = []
        self._places: list[tuple[Any, Any, Any]] = []  # containers, keys, and the values to restore
        self._contents: dict[int, tuple[Any, Any]] = {}  # containers that steps read, with their contents then
        self._unread = _Unread()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record the steps of schedulers instead of doing them.

        Raises:
            NumberRead: the program reads what schedulers hold, or rates after a step, or changes them.
        """
        if not self._schedules.attributes:
            yield
            return
        before = {cls: vars(cls)["step"] for cls in KINDS if "step" in vars(cls)}
        for cls, step in before.items():
            cls.step = self._noting(step)
        try:
            self._hide(self._schedules.attributes)
            yield
            self._check()
        finally:
            for cls, step in before.items():
                cls.step = step
            for container, key, value in self._places:
                write(container, key, value)

    def described(self, describe: Callable[[Any, str], Any]) -> tuple[ScheduleStep, ...]:
        """What a call has to do. ``describe``: how it makes a value."""
        numbers = {id(item): number for number, item in enumerate(self._state.seen)} if self._steps else {}

        def made(value: Any) -> Any:
            return describe(value, "an argument of a scheduler")

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
            is_recorded = threading.get_ident() == self._thread and all(map(_is_number, (*args, *kwargs.values())))
            touched = self._schedules.touched.get(id(scheduler)) if is_recorded else None
            if touched is None:
                return step(scheduler, *args, **kwargs)
            self._check()
            self._hide(touched)
            kept = {name: _kept(value) for name, value in kwargs.items()}
            self._steps.append(_Step(scheduler, list(map(_kept, args)), kept, user_location()))
            return None

        return noting

    def _hide(self, containers: Sequence[Any]) -> None:
        """Have every read of the numbers in some containers raise from now on."""
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
    """Whether a step can take a value: a number of Python's or the graph's, a tensor of one element, None."""
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return value is None or is_scalar or isinstance(value, _NUMBERS)


def _kept(value: Any) -> Any:
    """An argument of a step, as it is now."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers and text alone."""
    cls = type(value)
    if issubclass(cls, (list, tuple, dict)):
        return all(map(_is_plain, value.values() if issubclass(cls, dict) else value))
    return cls in _PLAIN


def _read(*args: Any, **kwargs: Any) -> Any:
    raise NumberRead


_ASKED = {name for cls in (bool, float, complex, str, list, dict) for name in dir(cls) if name.startswith("__")}
_OF_CLASSES = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__doc__"}
_Unread: Any = type("_Unread", (), dict.fromkeys(_ASKED - _OF_CLASSES, _read))
