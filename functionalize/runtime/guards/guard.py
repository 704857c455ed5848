"""The interface of guards: one definition is checked with a message, written as fast code, and listed.

A :class:`GuardKind` holds the guards of one kind and what they expect. ``failure`` compares a call with that and says
what differs. ``write`` adds lines to the function that compares calls fast: a faster comparison by torch or Python if
there is one, and by default a call of ``failure``. ``listed`` gives the guards as data.

Invariant: a call that the written lines let pass has no failure. Limits: the lines are written from a call that passed,
and may refuse another call that would pass too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from functionalize.errors import InputMismatchError
from functionalize.python_state.containers import ABSENT, place_of
from functionalize.python_state.slots import Slot
from functionalize.runtime.arguments import CallArguments
from functionalize.runtime.guards.compiled import FunctionWriter

Passes = Callable[[CallArguments], list[Any] | None]  # the inputs for a call; None: the guards must check it
WHEN = "when the program was captured"
HINT = "pass inputs like those of the capture, capture again, or capture with on_guard_failure='recapture'"


class Guard(NamedTuple):
    """One assumption of a program: a property of a mode, an input, an argument or a Python value.

    Example:
        >>> import torch
        >>> from functionalize import capture
        >>> guards = capture(lambda x: x + 1, (torch.zeros(3),)).guards
        >>> [str(guard) for guard in guards if guard.property == "size"]
        ['the input `x`: size (3,)']
    """

    subject: str
    property: str
    expected: Any

    def __str__(self) -> str:
        return f"{self.subject}: {self.property} {words(self.expected)}"


@dataclass(eq=False)
class CallInputs:
    """The data of a call that guards compare: its arguments, and the program's inputs."""

    arguments: CallArguments
    values: Sequence[Any] = ()  # the inputs, in order, once the arguments and the Python values have passed
    examples: Set[int] = frozenset()  # inputs that are examples of what calls may pass: no guard compares them


class GuardKind(ABC):
    """The guards of one kind."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compare."""
        return False

    @abstractmethod
    def failure(self, call: CallInputs) -> InputMismatchError | None:
        """The error for the first guard that a call fails; None if it satisfies all of these guards."""

    def write(self, code: FastCode) -> None:
        """Add lines to the fast function that refuse each call with a failure."""
        code.refuse_failing(self)

    def listed(self) -> Iterator[Guard]:
        """The guards as data."""
        return iter(())


class FastCode:
    """The lines of the fast function, as guards add to them.

    ``head`` comes before ``leaves`` is read from ``arguments``; ``body`` goes from ``leaves``, the tensors and plain
    values among the arguments, to ``inputs``, the program's.
    """

    def __init__(self, call: CallInputs) -> None:
        """``call``: one that passed, with which later calls are compared."""
        self.call, self.head, self.body = call, FunctionWriter(), FunctionWriter()
        self.needs_arguments = False  # whether the body reads `arguments` too

    @property
    def is_flat(self) -> bool:
        """Whether all arguments are tensors and plain values, without containers."""
        return self.call.arguments.flat

    def refuse_failing(self, guards: GuardKind) -> None:
        """Refuse calls that fail some guards."""
        if not self.needs_arguments:
            self.needs_arguments = True
            self.body.names["CallInputs"] = CallInputs
            self.body.lines.append("call = CallInputs(arguments, inputs)")
        self.body.refuse(f"{self.body.name('failure', guards.failure)}(call) is not None")

    def function(self) -> Passes:
        """The comparison as a function."""
        leaves = f"leaves = arguments.{'values' if self.is_flat else 'leaves'}"
        whole = FunctionWriter([*self.head.lines, leaves, *self.body.lines], self.head.names | self.body.names)
        passes: Passes = whole.function("arguments", "return inputs")
        return passes


def containers_of(*slots: Slot | None) -> list[Any]:
    """The containers of the slots of inputs; inputs that are not state have no slot."""
    return [place_of(slot.container, slot.key)[0] for slot in slots if slot is not None]


def mismatch(
    what: str,
    now: Any,
    before: Any,
    error: Callable[..., InputMismatchError] = InputMismatchError,
    verbs: tuple[str, str] = ("is", "was"),
    containers: Sequence[Any] = (),
) -> InputMismatchError:
    """The error for a value that differs from that at the capture."""
    said = f"{what} {verbs[0]} {words(now)}, and {verbs[1]} {words(before)} {WHEN}"
    return error(said, hint=HINT, containers=containers)


def words(value: Any) -> str:
    """A value as messages show it."""
    return "not there" if value is ABSENT else repr(value)[:80]
