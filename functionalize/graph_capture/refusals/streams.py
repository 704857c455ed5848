"""Streams of a GPU: a call runs all of its graph on the stream that is current then, and waits for no other.

Invariant: what a program has streams and events do is refused; streams that others use are not concerned; captures run
one at a time, so each puts back what it replaced. Limits: by the classes in `torch.cuda`, once a GPU is in use.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize.errors import UnsupportedProgramError

_CALLS: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "set_stream", "runs on another stream of a GPU"),
    *(
        (owner, name, f"calls {name}() of {said} of a GPU")
        for owner, said, names in (
            (torch.cuda.Stream, "a stream", ("record_event", "wait_event", "wait_stream")),
            (torch.cuda.Event, "an event", ("record", "wait")),
        )
        for name in names
    ),
)


@contextlib.contextmanager
def streams_refused() -> Iterator[None]:
    """While a program runs in this thread.

    Raises:
        UnsupportedProgramError: it runs on another stream, or has one wait.
    """
    own = threading.get_ident()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _CALLS if torch.cuda.is_initialized()]

    def refusing(call: Callable[..., Any], said: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != own:
                return call(*args, **kwargs)
            raise UnsupportedProgramError(
                f"the program {said}",
                why="a call runs its whole graph on the current stream, and waits for no other",
                hint="keep streams and events outside the captured program: wait, or select a stream, around its calls",
            )

        return called

    for (owner, name, call), (_, _, said) in zip(before, _CALLS, strict=False):
        setattr(owner, name, refusing(call, said))
    try:
        yield
    finally:
        for owner, name, call in before:
            setattr(owner, name, call)
