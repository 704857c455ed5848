"""Streams of a GPU: a call runs its whole graph on the stream that is current then, and waits for no other stream.

Invariant: a program that uses streams and events is refused; streams that others use are not affected.
Limits: by the classes in `torch.cuda`, once a GPU is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from functionalize.patches import Patch
from functionalize.refusals.python_objects import STREAM_USED


class _Call(NamedTuple):
    """A function that is refused, and what a program that calls it does."""

    owner: Any
    name: str
    what: str


_CALLS = (
    _Call(torch.cuda, "set_stream", "runs on another stream of a GPU"),
    *(
        _Call(owner, name, f"calls {name}() of {said} of a GPU")
        for owner, said, names in (
            (torch.cuda.Stream, "a stream", ("record_event", "wait_event", "wait_stream")),
            (torch.cuda.Event, "an event", ("record", "wait")),
        )
        for name in names
    ),
)


def rows_for_streams() -> Iterator[Patch]:
    """Have the program raise `UnsupportedProgramError` where it runs on another stream, or makes a stream wait."""
    calls = _CALLS if torch.cuda.is_initialized() else ()
    return (Patch(call.owner, call.name, partial(_refusing, call.what)) for call in calls)


def _refusing(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        raise STREAM_USED.error(action=what)

    return called
