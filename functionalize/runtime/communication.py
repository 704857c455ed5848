"""What one call has communicated so far: each collective happens once, whatever variants and captures the call needs.

A call may learn midway that it takes another branch, or be captured first, and then starts again from the beginning;
or an operator raises, and the program itself runs. Its collectives, by their position in the program, give what they
gave before.

In: an operator and its position. Out: its result. Invariant: a call starts the collectives of the program in its order,
each once. Limits: one thread; a graph may order collectives in no other way than the program.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize._torch.dispatch import TorchDispatchMode
from functionalize._torch.distributed.collectives import completed, group_of
from functionalize.ops.calls import argument
from functionalize.ops.collectives import Collective, Way, collective
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


def run_as_written(original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the program itself, whose first collectives give what the call has received already."""
    log = _CURRENT.log
    replays = contextlib.nullcontext() if log is None or not log.started else _Replay(log.started)
    with logging_to(None), replays:  # it may call captured programs, each of which has a log of its own
        return original(*args, **kwargs)


class _Replay(TorchDispatchMode):
    """Has the first collectives of a program give the results of others, and runs those that follow."""

    def __init__(self, started: Sequence[_Started]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._started = iter(started)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row, kwargs = collective(func), kwargs or {}
        if row is None or row.way not in (Way.TWIN, Way.VALUE):
            return func(*args, **kwargs)
        before = next(self._started, None)
        if before is None:
            return func(*args, **kwargs)
        if before.op.name().partition(".")[0] != (row.twin or row.op):
            raise OUT_OF_STEP.error(op=func.name(), before=before.op.name())
        return before.result if row.way is Way.VALUE else _received(before, row, func, args, kwargs)


def _received(before: _Started, row: Collective, func: Any, args: Any, kwargs: Any) -> Any:
    """What a collective that writes to its arguments returns, once they have what an earlier one has received."""
    group = group_of(argument(func, "process_group", args, kwargs)).group_name
    written = argument(func, row.written, args, kwargs) if row.written else []
    lists = [written] if isinstance(written, torch.Tensor) else list(written)
    if isinstance(before.result, list) and lists and isinstance(lists[0], list):  # each result has parts of all ranks
        lists = [list(parts) for parts in zip(*lists, strict=True)]
    targets = pytree.tree_leaves(lists)
    results = [torch.ops._c10d_functional.wait_tensor(result) for result in pytree.tree_leaves(before.result)]
    sizes = [target.numel() for target in targets]
    if group not in pytree.tree_leaves(before.constants) or (targets and sum(sizes) != sum(r.numel() for r in results)):
        raise OUT_OF_STEP.error(op=func.name(), before=f"{before.op.name()} with other arguments")
    if targets:
        parts = torch.cat([result.reshape(-1) for result in results]).split(sizes)
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.view(target.shape))
    work = completed(targets)
    return (written, work) if len(func._schema.returns) > 1 else work


def once(op: Any, position: int, *args: Any, **kwargs: Any) -> Any:
    """The result of a collective, by its position among those of the program."""
    log = _CURRENT.log
    return op(*args, **kwargs) if log is None else log.result(op, position, args, kwargs)


def call_once(op: Any, position: int) -> Callable[..., Any]:
    """The same as a function, known to FX by its name."""
    call: Any = partial(once, op, position)
    call.__name__, call.__module__ = f"{str(op).replace('.', '_')}_{position}", "functionalize"
    return call  # type: ignore[no-any-return]
