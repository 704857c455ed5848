"""``functionalize ops``: what the tables say of operators.

Invariant: torch is not imported. Limits: operators of native_functions.yaml, as installed.
"""

from __future__ import annotations

import difflib
import enum
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from functionalize.codegen.columns import Kind, OpRow, ViewKind, as_literal


def _choice(kinds: type[enum.Enum]) -> click.Choice[str]:
    return click.Choice([kind.value for kind in kinds])


@click.command(name="ops")
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option("--kind", type=_choice(Kind), help="List operators that write in this way.")
@click.option("--view", type=_choice(ViewKind), help="List operators that view in this way.")
@click.option("--random", is_flag=True, help="List operators that draw random numbers.")
@click.option("--match", metavar="TEXT", help="List operators with this in their names.")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
def operators(
    names: Sequence[str], kind: str | None, view: str | None, random: bool, match: str | None, as_json: bool
) -> None:
    """Say what the tables know of operators, or list those of a kind.

    \b
    Examples:
      functionalize ops add_.Tensor split
      functionalize ops --kind mutable
      functionalize ops --view multi --match split --json
    """
    from functionalize.codegen import exceptions, sources, tables

    if not (names or kind or view or random or match):
        raise click.UsageError("name an operator, such as add_.Tensor, or say which to list: --kind, --view, --match")
    known = tables.build(sources.installed_source(), exceptions.load())
    if names:
        rows = [row for name in names for row in _named(known.rows, name)]
    else:
        rows = [row for row in known.rows.values() if kind in (None, row.kind.value) and view in (None, row.view.value)]
        rows = [row for row in rows if (row.random or not random) and (match or "") in row.name]
    if as_json:
        columns = [{name: as_literal(value) for name, value in asdict(row).items()} for row in rows]
        click.echo(json.dumps({"ops": columns}, indent=2))
        return
    for line in _explained(known, rows) if names else (row.name for row in rows):
        click.echo(line)


def _named(rows: dict[str, OpRow], name: str) -> list[OpRow]:
    """The operators of a name: one, or without an overload all that there are."""
    full = f"aten::{name.removeprefix('aten.').removeprefix('aten::').removesuffix('.default')}"
    every = not name.endswith(".default")
    found = [row for known, row in rows.items() if known == full or (every and known.startswith(f"{full}."))]
    if not found:
        near = difflib.get_close_matches(full, rows, n=5)
        raise click.ClickException(f"there is no op {full}; near it are {', '.join(near) or 'none'}")
    return found


def _explained(tables: Any, rows: Sequence[OpRow]) -> Iterator[str]:
    from functionalize.codegen import explain, rules

    for place, row in enumerate(rows):
        if place:
            yield ""
        for label, text in explain.lines(tables, row.name, rules.read_rules()):
            yield f"{label:11} {text}"
