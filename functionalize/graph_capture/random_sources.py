"""What a program does to sources of random numbers otherwise than by operators, and to arrays that are no tensors.

Operators that draw are nodes of the graph. A seed that is set, a number that Python or NumPy draws, or an element of an
array that is written, would be done once, by the capture.

Nothing is drawn while a program runs on fake tensors, so a state that is read and set again would not be noticed. Hence
each node that draws has its generator go on as in eager: who finds another state than that has been interfered with.

Invariant: after a capture the sources are as they were. Limits: torch's generators that the program's state and
arguments hold, or that are a device's; generators and arrays among these, `random`, and NumPy where it is loaded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from functionalize._torch.dispatch import HigherOrderOperator, identity_of, kernels_alone
from functionalize.errors import UnsupportedProgramError
from functionalize.runtime.opaque_values import ARRAYS, GENERATORS, access_to
from functionalize.runtime.random_state import generator_of, is_random, source_of

_WHY = "the capture would do so once, and calls of the program not at all"
_SETS = "sets the state of a generator of torch's"
_HINT = (
    "seed before the program is called; draw by operators of torch; keep in tensors what is written; or pass what was "
    "drawn as an argument"
)


@dataclass(eq=False)
class _Generator:
    """A generator of torch's: its state before the program, and the one that it is to have by now."""

    generator: torch.Generator
    before: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def of(cls, generator: torch.Generator) -> _Generator:
        state = generator.get_state()
        return cls(generator, state, state)

    @property
    def is_changed(self) -> bool:
        """Whether somebody else set it to another state, or drew from it."""
        with kernels_alone():
            return not torch.equal(self.generator.get_state(), self.expected)

    def go_on(self) -> None:
        """Draw, as an operator of the program does when a call runs it."""
        with kernels_alone():
            torch.rand(1, generator=self.generator, device=self.generator.device)
            self.expected = self.generator.get_state()


class TorchGenerators:
    """Generators of torch's, watched while a program runs that may only draw from them by operators."""

    def __init__(self, values: Iterable[Any], example: Callable[[Node], Any]) -> None:
        """``values``: what a program reaches. ``example``: what a placeholder of its graph stands for."""
        self._own = [value for value in values if isinstance(value, torch.Generator)]
        self._example, self._root = example, torch.nn.Module()
        self._watched = dict[int, _Generator]()

    def begin(self, root: torch.nn.Module) -> None:
        """From here on they have other states than a seed that the program sets again would give them.

        ``root``: what the graph's attributes are found on.
        """
        self._root = root
        for generator in (torch.default_generator, *self._own):
            self._watch(generator).go_on()

    def _watch(self, generator: torch.Generator) -> _Generator:
        return self._watched.setdefault(identity_of(generator), _Generator.of(generator))

    def before(self, generator: torch.Generator) -> torch.Tensor:
        """The state before the program."""
        return self._watch(generator).before

    def note(self, node: Node) -> None:
        """A node was added to the graph just now.

        Raises:
            UnsupportedProgramError: it draws from a generator that the program made, or has set to another state.
        """
        if not (isinstance(node.target, HigherOrderOperator) or is_random(node)):
            return
        source = source_of(node, self._root)
        if source is None:
            return
        generator = generator_of(self._example(source) if isinstance(source, Node) else source, {})
        if isinstance(source, torch.Generator) and identity_of(generator) not in self._watched:
            raise UnsupportedProgramError(
                "the program draws random numbers from a generator that it makes, or reaches by no name of its code",
                why="each call would have to make another one, and would go on with this one instead",
                hint="make the generator outside, and pass it as an argument",
            )
        watched = self._watch(generator)
        if watched.is_changed:
            refuse_drawn([_SETS])
        watched.go_on()

    def restore(self) -> list[str]:
        """Put all back; what the program did, in words."""
        changed = [one for one in self._watched.values() if one.is_changed]
        for one in self._watched.values():
            one.generator.set_state(one.before)
        return [_SETS for _ in changed]


@dataclass(frozen=True, eq=False)
class _Source:
    """One source of random numbers besides torch's, or an array."""

    name: str
    what: str  # a program does to it that changes its state
    read: Callable[[], Any]
    write: Callable[[Any], object]


class RandomSources:
    """The sources, as they are when this is made."""

    def __init__(self, values: Iterable[Any]) -> None:
        """``values``: what a program reaches, generators among it."""
        draws, found = "draws numbers from", list[_Source]()
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
            why=_WHY,
            hint=_HINT,
        )


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and len(now) == 5:  # of NumPy: the second is an array
        return bool(now[2:] == before[2:] and (now[1] == before[1]).all())
    return bool(now == before)
