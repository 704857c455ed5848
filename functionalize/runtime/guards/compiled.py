"""Generates Python functions from lines of source, with expressions that read a program's state.

A call of a small program takes about as long as a few operators, and a loop over a table of guards would double that.
So after one call, the comparisons are written as the source of one function, which Python compiles once.

Invariant: an expression reads what ``entry`` and ``Slot.get`` read. Limits: names in the source are unique within one
writer, or mean the same in all writers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from functionalize.python_state.containers import entry
from functionalize.python_state.slots import NumberSlot, Slot


class FunctionWriter:
    """The lines of a function, and the values of the names in it."""

    def __init__(self, lines: Sequence[str] = (), names: Mapping[str, Any] | None = None) -> None:
        self.lines, self.names = list(lines), dict(names or {})

    def refuse(self, condition: str, **names: Any) -> None:
        """Add a line that returns None if a condition holds."""
        self.names |= names
        self.lines.append(f"if {condition}: return None")

    def attempt(self, lines: Sequence[str], *errors: str) -> None:
        """Add lines, and a return of None if one of them raises such an error."""
        if lines:
            self.lines += ["try:", *(f"    {line}" for line in lines), f"except ({', '.join(errors)}): return None"]

    def name(self, prefix: str, value: Any) -> str:
        """A new name for a value."""
        name = f"{prefix}_{len(self.names)}"
        self.names[name] = value
        return name

    def entry(self, container: Any, key: Any) -> str:
        """The expression that reads an entry of a container."""
        shown = repr(key) if type(key) in (str, int) else self.name("key", key)
        held = self.name("container", container)
        if type(container) is dict or not isinstance(container, dict):
            return f"{held}[{shown}]"
        self.names["entry"] = entry
        return f"entry({held}, {shown})"

    def place(self, slot: Slot) -> str:
        """The expression that reads a slot of the program's state."""
        if isinstance(slot, NumberSlot):
            return f"{self.name('number', slot.get)}()"
        return self.entry(slot.container, slot.key) + "".join(f"[{step}]" for step in slot.steps)

    def function(self, parameters: str, *ends: str) -> Any:
        """The function; ``ends``: its last lines."""
        body = "\n    ".join([*self.lines, *ends])
        names = dict(self.names)
        exec(compile(f"def function({parameters}):\n    {body}", "<functionalize: fast call>", "exec"), names)
        return names["function"]


def items_of(name: str, numbers: Sequence[int], count: int) -> str:
    """Arguments of a call: some items of a list, or ``*name`` if they are all ``count`` items in order."""
    return f"*{name}" if [*numbers] == [*range(count)] else ", ".join(f"{name}[{number}]" for number in numbers)
