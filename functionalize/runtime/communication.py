"""What one call has communicated so far: each collective happens once, whatever variants and captures the call needs.

A call may learn midway that it takes another branch, or be captured first, and then starts again from the beginning.
Its collectives, by their position in the program, give what they gave before.

In: an operator and its position. Out: its result. Invariant: a call starts the collectives of the program in its order,
each once. Limits: one thread; a graph may order collectives in no other way than the program.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.refusals.values import OUT_OF_STEP


@dataclass(frozen=True, eq=False)
class _Started:
    """A collective that the call has started."""

    op: Any
    constants: Any  # its arguments, without tensors
    result: Any


@dataclass(eq=False)
class CallLog:
    """The collectives of one call, in the order of the program.

    ``capture``: the name of the program and the number of the capture, for captures outside of calls.
    """

    capture: str | None = None
    started: list[_Started] = field(default_factory=list)

    def result(self, op: Any, position: int, args: Any, kwargs: Any) -> Any:
        """What a collective gives: what it has given, or what it gives now.

        Raises:
            UnsupportedProgramError: the call had another collective at this position.
        """
        constants = pytree.tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        if position == len(self.started):
            self.started.append(_Started(op, constants, op(*args, **kwargs)))
        before = self.started[position] if position < len(self.started) else None
        if before is None or before.op is not op or before.constants != constants:
            raise OUT_OF_STEP.error(op=op.name(), before="nothing" if before is None else before.op.name())
        return before.result


class _Current(threading.local):
    log: CallLog | None = None


_CURRENT = _Current()
_CAPTURES = Counter[str]()  # how often this process has captured programs outside of calls, by their names


def current_log() -> CallLog | None:
    """The log of the call that runs, or is captured; None outside of calls that may start again."""
    return _CURRENT.log


@contextlib.contextmanager
def logging_to(log: CallLog | None) -> Iterator[None]:
    """Log what is communicated inside; None: do not."""
    before, _CURRENT.log = _CURRENT.log, log
    try:
        yield
    finally:
        _CURRENT.log = before


@contextlib.contextmanager
def logging_capture(program: str) -> Iterator[CallLog]:
    """Log what a capture communicates: for the call or the capture that it is part of, if there is one."""
    if _CURRENT.log is not None:
        yield _CURRENT.log
        return
    _CAPTURES[program] += 1
    log = CallLog(f"{program}/{_CAPTURES[program]}")
    with logging_to(log):
        yield log


def once(op: Any, position: int, *args: Any, **kwargs: Any) -> Any:
    """The result of a collective, by its position among those of the program."""
    log = _CURRENT.log
    return op(*args, **kwargs) if log is None else log.result(op, position, args, kwargs)


def call_once(op: Any, position: int) -> Callable[..., Any]:
    """The same as a function, known to FX by its name."""
    call: Any = partial(once, op, position)
    call.__name__, call.__module__ = f"{str(op).replace('.', '_')}_{position}", "functionalize"
    return call  # type: ignore[no-any-return]
