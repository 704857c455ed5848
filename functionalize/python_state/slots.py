"""Where a value sits: an entry of a container, and steps into the tuples that the entry holds; numbers among them.

Takes a container and a key. Gives reads and writes of the value there. Guarantees that they do what the program's own
would do. Limits: a tuple in which an item is replaced is made again, without running code of its class; it keeps its
attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from functionalize.python_state.containers import ABSENT, Container, entry, write
from functionalize.python_state.decompose import attributes_of, native_class
from functionalize.python_state.traversal_rules import has_attributes


@dataclass(slots=True, eq=False)
class Slot:
    """Where a value sits: an entry of a container, and the steps into the tuples that it may hold."""

    container: Container
    key: Any
    path: str
    owner: Any = None  # the object whose entry it is
    steps: tuple[int, ...] = ()
    held: bool = False  # whether it is below a module or an optimizer

    def get(self) -> Any:
        value = entry(self.container, self.key)
        for step in self.steps:
            value = value[step]
        return value

    def found(self) -> Any:
        """The same, ``ABSENT`` where there is nothing by now."""
        try:
            return self.get()
        except (LookupError, TypeError):
            return ABSENT

    def set(self, value: Any) -> None:
        write(self.container, self.key, _with(entry(self.container, self.key), self.steps, value))


NUMBERS: dict[type, torch.dtype] = {float: torch.float64, int: torch.int64}  # by kind: what holds one
_LIMIT = 2**63


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor holds unchanged."""
    return type(value) in NUMBERS and (type(value) is not int or -_LIMIT <= value < _LIMIT)


@dataclass(slots=True, eq=False)
class NumberSlot(Slot):
    """Where a number sits that a graph takes as a tensor without dimensions."""

    kind: type = float
    count: int | None = None  # of the list or the tuple that it is in

    def get(self) -> Any:
        value = Slot.get(self)
        if self.count is not None and len(entry(self.container, self.key)) != self.count:
            raise TypeError(f"the container of `{self.path}` has another length")
        if type(value) is not self.kind:
            raise TypeError(f"`{self.path}` is {value!r}, and was of type {self.kind.__name__}")
        if not is_number(value):
            raise TypeError(f"`{self.path}` is {value!r}, which does not fit into 64 bits")
        return torch.tensor(value, dtype=NUMBERS[self.kind], device="cpu")


def _with(whole: Any, steps: tuple[int, ...], value: Any) -> Any:
    """A nest of tuples, or a list of numbers, with one leaf replaced."""
    if not steps:
        return value
    items = list(whole)
    items[steps[0]] = _with(items[steps[0]], steps[1:], value)
    return items if type(whole) is list else _tuple_like(whole, items)


def _tuple_like(whole: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(whole)
    made = native_class(kind).__new__(kind, items)
    if has_attributes(kind):
        object.__setattr__(made, "__dict__", attributes_of(whole))
    return made
