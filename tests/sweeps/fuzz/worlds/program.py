"""A random world as data: what is declared, what the program does at each call, what the caller does between calls.

Prints as Python source that makes the world: `world()` gives the program, what reads the world, and the changes.

Invariant: equal worlds print and run alike, on any machine; each time the source is run the world is another one.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = re.compile(r"\b[a-z]\d\d\b")  # what is declared: a letter for its kind, and two digits
_TARGETS = re.compile(r"^\s*([a-z]\d\d(?:, [a-z]\d\d)*) [-+*]?= ", re.MULTILINE)
_REBINDS = re.compile(r"\{rebinds ([a-z]\d\d)\}")  # a line of a function that gives another value to a variable
CLOSURE, GLOBAL, MODULE = FORMS = ("closure", "global", "module")
HEADER = """\
import argparse, collections, dataclasses, enum, functools, types, weakref
import torch
from torch import nn


@dataclasses.dataclass
class Data:
    a: object
    n: int = 0


class Slots:
    __slots__ = ("a", "n", "more", "__weakref__")

    def __init__(self, a, n=0):
        self.a, self.n = a, n


class Plain:
    def __init__(self, a, n=0):
        self.a, self.n = a, n


class Counting(type):
    made = 0

    def __call__(cls, *args):
        Counting.made += 1
        return super().__call__(*args)


class Counted(Plain, metaclass=Counting):
    pass


class Number(int):
    n = 0


class Mode(enum.Enum):
    LOW, HIGH = {"n": 1}, {"n": 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0) - 1)
        self.register_buffer("seen", torch.zeros(3))
        self.plain = torch.ones(3)
        self.count, self.last, self.cache = 0, None, None

    def forward(self, x):
        return x * self.weight + self.plain
"""


@dataclass(frozen=True)
class Line:
    """Statements; the feature that they stand for."""

    source: str
    feature: str = ""

    @property
    def names(self) -> set[str]:
        return set(NAMES.findall(self.source))

    @property
    def rebinds(self) -> set[str]:
        """The variables that a function with this line gives another value to."""
        return {name for targets in _TARGETS.findall(self.source) for name in targets.split(", ")}


@dataclass(frozen=True)
class World:
    """``steps`` are what each call does with ``y``, which begins as its argument; ``changes``: before later calls."""

    form: str
    declared: tuple[Line, ...]
    steps: tuple[Line, ...]
    result: str
    changes: tuple[tuple[Line, ...], ...]  # the n-th stands between the n-th call and the next
    after: str = ""  # what the caller does with each result
    requires_grad: bool = False  # of the argument
    again: str = "raise"  # what is to be done where guards refuse

    @property
    def features(self) -> set[str]:
        lines = (*self.declared, *self.steps, *(line for change in self.changes for line in change))
        named = {line.feature for line in lines} | {f"returns {self.result}" if self.result != "y" else "returns y"}
        return {NAMES.sub(lambda match: match[0][0], name) for name in named}

    @property
    def calls(self) -> int:
        return len(self.changes) + 1

    def body(self) -> str:
        """What is particular to this world."""
        return _in_module(self) if self.form == MODULE else _in_function(self)

    def __str__(self) -> str:
        after = f"; the caller then runs {self.after!r}" if self.after else ""
        what = f"# {self.calls} calls with x of size (2, 3), requires_grad {self.requires_grad}, {self.again}{after}"
        return f"{HEADER}\n\n{self.body()}\n{what}\n"

    def made(self) -> tuple[Callable[..., Any], Callable[[], dict[str, Any]], Sequence[Callable[[], None]]]:
        """A new world: its program, what reads its variables, and the caller's changes."""
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(f"{HEADER}\n{self.body()}", "<world>", "exec"), scope)
        program, read, changes = scope["world"]()
        return program, read, changes


def _in_function(world: World) -> str:
    word = "nonlocal" if world.form == CLOSURE else "global"
    names = sorted({name for line in world.declared for name in line.rebinds})
    above = [f"global {', '.join(names)}"] if world.form == GLOBAL and names else []
    declared = [_REBINDS.sub(rf"{word} \1", line.source) for line in world.declared]
    functions = [_function("step(x)", ["y = x", *_sources(world.steps), f"return {world.result}"], world.steps, word)]
    for number, change in enumerate(world.changes):
        functions.append(_function(f"change{number}()", _sources(change) or ["pass"], change, word))
    read = f"lambda: {{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    changes = ", ".join(f"change{number}" for number in range(len(world.changes)))
    return _block("def world():", [*above, *declared, *functions, f"return step, {read}, [{changes}]"])


def _function(head: str, body: list[str], lines: tuple[Line, ...], word: str) -> str:
    rebound = sorted({name for line in lines for name in line.rebinds})
    return _block(f"def {head}:", [*([f"{word} {', '.join(rebound)}"] if rebound else []), *body])


def _in_module(world: World) -> str:
    def own(sources: list[str]) -> list[str]:
        return [NAMES.sub(r"self.\g<0>", _REBINDS.sub("pass", source)) for source in sources]

    forward = own(["y = x", *_sources(world.steps), f"return {world.result}"])
    methods = [
        _block("def __init__(self):", ["super().__init__()", *own(_sources(world.declared))]),
        _block("def forward(self, x):", forward),
    ]
    for number, change in enumerate(world.changes):
        methods.append(_block(f"def change{number}(self):", own(_sources(change)) or ["pass"]))
    changes = ", ".join(f"whole.change{number}" for number in range(len(world.changes)))
    made = ["whole = Whole()", f"return whole, lambda: {{'whole': whole}}, [{changes}]"]
    return f"{_block('class Whole(nn.Module):', methods)}\n\n\n{_block('def world():', made)}"


def _sources(lines: tuple[Line, ...]) -> list[str]:
    return [line.source for line in lines]


def _block(head: str, body: list[str]) -> str:
    return "\n".join([head, *(textwrap.indent(line, "    ") for line in body)])
