"""A random program as data: inputs, steps (one statement each), outputs. Prints as one Python function.

Invariant: equal programs print and run alike, on any machine.
Limits: straight-line code over a few small tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NAME = re.compile(r"\b[xv]\d+\b")  # x0, x1, ... are inputs, v0, v1, ... intermediates


@dataclass(frozen=True)
class Storage:
    """Memory of inputs: so many elements of a dtype, with small numbers of either sign in it."""

    name: str
    dtype: str
    numel: int
    shift: int = 0  # other numbers for each
    computed: bool = False  # whether it is multiplied by a leaf: its views are not leaves

    def source(self) -> str:
        shifted = f"(torch.arange({self.numel}) + {self.shift})" if self.shift else f"torch.arange({self.numel})"
        numbers = f"({shifted} * 7 % 11 - 5)"
        if self.dtype == "bool":
            return f"{self.name} = {numbers} > 0"
        if self.dtype == "complex64":
            return f"{self.name} = torch.complex({numbers}.float(), {numbers}.flip(0).float())"
        source = f"{self.name} = {numbers}.to(torch.{self.dtype})"
        return f"{source}; {_multiplied(self.name)}" if self.computed else source


@dataclass(frozen=True)
class Input:
    """An input: a strided place in a storage, which it may share with other inputs, read as a dtype."""

    name: str
    storage: str
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    same_as: str = ""  # the input that this one is, not a tensor of its own
    gradient: str = ""  # "leaf", "computed" from a leaf, or "view" of a storage that is
    sliced: bool = False  # whether autograd knows it for a view of its storage, without gradients

    def source(self) -> str:
        if self.same_as:
            return f"{self.name} = {self.same_as}"
        if self.gradient == "view" or (self.sliced and not self.gradient):
            return f"{self.name} = {self.storage}.as_strided({self.size}, {self.stride}, {self.offset})"
        source = (
            f"{self.name} = torch.empty(0, dtype=torch.{self.dtype})"
            f".set_({self.storage}.untyped_storage(), {self.offset}, {self.size}, {self.stride})"
        )
        ends = {"": "", "leaf": ".requires_grad_()", "computed": f"; {_multiplied(self.name)}"}
        return source + ends[self.gradient]

    @property
    def extent(self) -> int:
        """Bytes from the start of the storage to the end of the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        item: int = getattr(torch, self.dtype).itemsize
        return (self.offset + last + 1) * item


@dataclass(frozen=True)
class Step:
    """One statement; the names that it assigns."""

    source: str
    defines: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(NAME.findall(self.source)))

    @property
    def uses(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.defines)

    def renamed(self, names: dict[str, str]) -> Step:
        return Step(renamed(self.source, names), self.defines)


@dataclass(frozen=True)
class Program:
    """``steps`` over ``inputs``; ``outputs`` is the expression that is returned."""

    storages: tuple[Storage, ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: str
    seed: int = 0  # what else is drawn for the program

    def body(self) -> str:
        header = f"def f({', '.join(entry.name for entry in self.inputs)}):"
        lines = [step.source for step in self.steps] + [f"return {self.outputs}"]
        return "\n".join([header, *(f"    {line}" for line in lines)])

    def arguments_source(self) -> str:
        lines = [entry.source() for entry in self.storages] + [entry.source() for entry in self.inputs]
        names = ", ".join(entry.name for entry in self.inputs)
        return "\n".join(["def arguments():", *(f"    {line}" for line in lines), f"    return [{names}]"])

    def with_leaves(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The arguments, and the leaves that some of them were computed from."""
        lines = [entry.source() for entry in self.storages] + [entry.source() for entry in self.inputs]
        scope: dict[str, Any] = {"torch": torch}
        exec("\n".join(lines), scope)
        return [scope[entry.name] for entry in self.inputs], [scope[name] for name in scope if name.startswith("leaf_")]

    def within_bounds(self) -> bool:
        """Whether each input lies within its storage, and is no input that is not there."""
        names = [entry.name for entry in self.inputs]
        if any(entry.same_as and entry.same_as not in names[:place] for place, entry in enumerate(self.inputs)):
            return False
        room = {entry.name: entry.numel * getattr(torch, entry.dtype).itemsize for entry in self.storages}
        return all(entry.extent <= room[entry.storage] for entry in self.inputs)

    def __str__(self) -> str:
        return f"import torch\n\n{self.body()}\n\n{self.arguments_source()}\n"

    def function(self) -> Callable[..., Any]:
        return _defined(self.body(), "f")

    def arguments(self) -> list[torch.Tensor]:
        made: list[torch.Tensor] = _defined(self.arguments_source(), "arguments")()
        return made


def _multiplied(name: str) -> str:
    """A statement by which a tensor is computed from a leaf, without a change to its values or layout."""
    return f"leaf_{name} = torch.ones_like({name}).requires_grad_(); {name}.mul_(leaf_{name})"


def renamed(source: str, names: dict[str, str]) -> str:
    """Source text with variables renamed."""
    return NAME.sub(lambda match: names.get(match[0], match[0]), source)


def _defined(source: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(source, f"<{name}>", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function
