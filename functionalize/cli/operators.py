"""``functionalize ops``: what the tables say of operators.

Invariant: torch is not imported. Limits: operators of native_functions.yaml, as installed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

_KINDS = ("functional", "inplace", "out", "mutable")
_VIEWS = ("none", "single", "multi", "inplace_view", "maybe_alias")


@click.command(name="ops")
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option("--kind", type=click.Choice(_KINDS), help="List operators that write in this way.")
@click.option("--view", type=click.Choice(_VIEWS), help="List operators that view in this way.")
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
    tables = _tables()
    if not names:
        if not (kind or view or random or match):
            raise click.UsageError(
                "name an operator, such as add_.Tensor, or say which to list: --kind, --view, --match"
            )
        rows = [row for row in tables.rows.values() if _fits(row, kind, view, random, match)]
        if as_json:
            click.echo(json.dumps({"ops": [_columns(row) for row in rows]}, indent=2))
        else:
            for row in rows:
                click.echo(row.name)
        return
    found = [full for name in names for full in _named(tables, name)]
    if as_json:
        click.echo(json.dumps({"ops": [_columns(tables.rows[name]) for name in found]}, indent=2))
        return
    for line in _explained(tables, found):
        click.echo(line)


def _tables() -> Any:
    from functionalize.codegen import exceptions, sources, tables

    return tables.build(sources.installed_source(), exceptions.load())


def _columns(row: Any) -> dict[str, Any]:
    from functionalize.codegen.columns import as_literal

    return {name: as_literal(value) for name, value in asdict(row).items()}


def _fits(row: Any, kind: str | None, view: str | None, random: bool, match: str | None) -> bool:
    return (
        kind in (None, row.kind.value)
        and view in (None, row.view.value)
        and (row.random or not random)
        and (match is None or match in row.name)
    )


def _named(tables: Any, name: str) -> list[str]:
    """The operators of a name: one, or without an overload all that there are."""
    bare = name.removeprefix("aten.").removeprefix("aten::").removesuffix(".default")
    full = f"aten::{bare}"
    found = [full] if full in tables.rows else []
    if not name.endswith(".default"):
        found += [known for known in tables.rows if known.startswith(f"{full}.")]
    if not found:
        near = difflib.get_close_matches(full, tables.rows, n=5)
        raise click.ClickException(f"there is no op {full}; near it are {', '.join(near) or 'none'}")
    return found


def _explained(tables: Any, names: Sequence[str]) -> Iterator[str]:
    from functionalize.codegen import explain, rules

    for place, name in enumerate(names):
        if place:
            yield ""
        for label, text in explain.lines(tables, name, rules.read_rules()):
            yield f"{label:11} {text}"
