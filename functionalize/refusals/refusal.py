"""A refusal as a row: what a program does, why that is refused, what to do instead, and a program that shows it.

Invariant: each row is raised somewhere, by its name, and `tests/unit/refusals` runs its example.
Limits: a text has the placeholders of `str.format`, and the code that raises has a value for each.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from functionalize.errors import ExplainedError, explanation

E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Refusal(Generic[E]):
    """One row.

    ``raises``: the class of the error. ``example``: a program that is refused so, or ``no_example``: why a few lines
    cannot show it.
    """

    raises: type[E]
    what: str
    why: str
    hint: str
    example: str = ""
    no_example: str = ""

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """The names of the values that the texts need."""
        fields = string.Formatter().parse("".join((self.what, self.why, self.hint)))
        return frozenset(name for _, name, _, _ in fields if name is not None)

    def error(self, at: object = None, **values: object) -> E:
        """The error. ``at``: the line, where that is not the one that runs; ``values``: for the placeholders.

        Raises:
            TypeError: a value is missing, or has no placeholder.
        """
        if values.keys() != self.placeholders:
            raise TypeError(f"{self.what!r} needs values for {sorted(self.placeholders)}, and got {sorted(values)}")
        what, why, hint = (text.format(**values) for text in (self.what, self.why, self.hint))
        if issubclass(self.raises, ExplainedError):
            return self.raises(what, why=why, hint=hint, at=at)
        return self.raises(explanation(what, why, hint, at))
