"""Python functions that are made of lines of source, and the expressions that read a program's state in them.

A call of a small program takes about as long as a few operators, and so would a loop over a table of what to compare:
what is known after one call is written down as the source of one function, which Python compiles once.

Invariant: an expression reads what ``entry`` and ``Slot.get`` read. Limits: names in the source are unique to one
writer, or mean the same in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from functionalize.python_state.containers import entry
from functionalize.python_state.slots import NumberSlot, Slot


class FunctionWriter:
    """The lines of a function, and what the names in it stand for."""

    def __init__(self, lines: Sequence[str] = (), names: Mapping[str, Any] | None = None) -> None:
        self.lines, self.names = list(lines), dict(names or {})

    def refuse(self, condition: str, **names: Any) -> None:
        """Return None where a condition holds."""
        self.names |= names
        self.lines.append(f"if {condition}: return None")

    def attempt(self, lines: Sequence[str], *errors: str) -> None:
        """Run some lines, and return None where one raises such an error."""
        if lines:
            self.lines += ["try:", *(f"    {line}" for line in lines), f"except ({', '.join(errors)}): return None"]

    def name(self, kind: str, value: Any) -> str:
        """A name for a value."""
        name = f"{kind}_{len(self.names)}"
        self.names[name] = value
        return name

    def entry(self, container: Any, key: Any) -> str:
        """What reads an entry of a container."""
        shown = repr(key) if type(key) in (str, int) else self.name("key", key)
        held = self.name("container", container)
        if type(container) is dict or not isinstance(container, dict):
            return f"{held}[{shown}]"
        self.names["entry"] = entry
        return f"entry({held}, {shown})"

    def place(self, slot: Slot) -> str:
        """What reads a place of the program's state."""
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
    """Arguments of a call: some items of a list; the list at once where these are all ``count`` of it, in order."""
    return f"*{name}" if [*numbers] == [*range(count)] else ", ".join(f"{name}[{number}]" for number in numbers)
