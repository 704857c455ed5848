"""The page of refusals, made of the rows of `functionalize/refusals`: `scripts/refusals` writes it.

Rows with the same first line stand under one heading. Invariant: `tests/unit/refusals` compares the page with the rows.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import string
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from functionalize import refusals
from functionalize.refusals.refusal import Refusal

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "refusals.md"
# What the examples use; `tests/unit/refusals` runs it before each of them.
PREAMBLE = """\
import torch
from functionalize import *
from torch.fx.experimental.proxy_tensor import make_fx
"""
HEAD = f"""\
# Refusals

<!-- scripts/refusals makes this page of the rows in functionalize/refusals: edit those. -->

Search for the first line of an error. An ellipsis is a part that depends on your program. Each program below raises
the error above it, after these lines:

```py
{PREAMBLE}```

[Find out why a program is refused](../how-to/debug-a-refusal.md) explains how to read an error,
[limits](../limits.md) lists what you meet most often.
"""


def subjects() -> dict[str, dict[str, Refusal[Any]]]:
    """The rows by name, of each module, whose docstring's first sentence is the title."""
    found = {}
    for module in pkgutil.iter_modules(refusals.__path__, "functionalize.refusals."):
        loaded = importlib.import_module(module.name)
        rows = {name: value for name, value in vars(loaded).items() if isinstance(value, Refusal)}
        if rows:
            found[module.name.rpartition(".")[2]] = rows
    return found


def plain(text: str) -> str:
    """A text of a row as Markdown: an ellipsis for each placeholder, and no emphasis by stars and underscores."""
    shown = "".join(literal + ("" if name is None else "…") for literal, name, _, _ in string.Formatter().parse(text))
    parts = re.split(r"(`[^`]*`)", shown)
    return "".join(part if part.startswith("`") else re.sub(r"([_*<\[\]])", r"\\\1", part) for part in parts)


def entry(row: Refusal[Any]) -> str:
    shown = f"```py\n{row.example.strip()}\n```" if row.example else f"No program is shown: {row.no_example}."
    return f"`{row.raises.__name__}`\n\n- why: {plain(row.why)}\n- try: {plain(row.hint)}\n\n{shown}\n"


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for subject, rows in subjects().items():
        parts.append(f"## {subject.replace('_', ' ').capitalize()}\n")
        for what, alike in groupby(rows.values(), key=lambda row: row.what):
            parts += [f"### {plain(what)}\n", *map(entry, alike)]
    return "\n".join(parts)


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
