"""What a program does to sources of random numbers otherwise than by operators, and to arrays that are no tensors.

Operators that draw are nodes of the graph. A seed that is set, a number that Python or NumPy draws, or an element of an
array that is written, would be done once, by the capture.

Invariant: after a capture the sources are as they were. Limits: torch's generator of the CPU, generators and arrays
among the program's state and arguments, `random`, and NumPy where it is loaded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from functionalize.errors import UnsupportedProgramError
from functionalize.runtime.opaque_values import ARRAYS, GENERATORS, access_to


@dataclass(frozen=True, eq=False)
class _Source:
    """One source of random numbers."""

    name: str
    what: str  # a program does to it that changes its state
    read: Callable[[], Any]
    write: Callable[[Any], object]


class RandomSources:
    """The sources, as they are when this is made."""

    def __init__(self, values: Iterable[Any]) -> None:
        """``values``: what a program reaches, generators among it."""
        seeds, draws = "seeds", "draws numbers from"
        found = [_Source("torch's generator", seeds, torch.get_rng_state, torch.set_rng_state)]
        own = {id(value): value for value in values if isinstance(value, torch.Generator)}
        found += [_Source("a torch.Generator", seeds, one.get_state, one.set_state) for one in own.values()]
        for value in {id(value): value for value in values}.values():
            for table, does in ((GENERATORS, draws), (ARRAYS, "writes to")):
                access = access_to(value, table)
                if access is not None:
                    read, write = partial(access.read, value), partial(access.write, value)
                    found.append(_Source(access.name, does, read, write))
        found.append(_Source("Python's `random`", draws, random.getstate, random.setstate))
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            found.append(_Source("numpy.random", draws, numpy.get_state, numpy.set_state))
        self._before = [(source, source.read()) for source in found]

    def restore(self) -> list[str]:
        """Put back what has changed; what the program did, in words."""
        changed = [(source, before) for source, before in self._before if not _same(source.read(), before)]
        for source, before in changed:
            source.write(before)
        return [f"{source.what} {source.name}" for source, _ in changed]


def refuse_drawn(done: list[str]) -> None:
    """Raise if a program did something to a source of random numbers.

    Raises:
        UnsupportedProgramError: it did.
    """
    if done:
        raise UnsupportedProgramError(
            f"the program {done[0]}",
            why="the capture would do so once, and calls of the program not at all",
            hint="seed before the program is called; draw by operators of torch; keep in tensors what is written; or "
            "pass what was drawn as an argument",
        )


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, before)
    if isinstance(now, tuple) and len(now) == 5:  # of NumPy: the second is an array
        return bool(now[2:] == before[2:] and (now[1] == before[1]).all())
    return bool(now == before)
