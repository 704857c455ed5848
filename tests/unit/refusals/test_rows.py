"""Each row of the table of refusals is raised by its example, with its texts; the code and the page use all of them."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from functionalize.errors import UnsupportedProgramError
from functionalize.refusals.refusal import Refusal
from tests.repository.refusals_page import PAGE, PREAMBLE, page, subjects

PACKAGE = Path(__file__).parents[3] / "functionalize"
ROWS = {name: row for rows in subjects().values() for name, row in rows.items()}
SHOWN = [name for name, row in ROWS.items() if row.example]


def pattern(row: Refusal[Any]) -> str:
    """What the message of a row's error looks like."""
    what, why, hint = (
        "".join(
            re.escape(literal) + ("" if name is None else r"[\s\S]*")
            for literal, name, _, _ in string.Formatter().parse(text)
        )
        for text in (row.what, row.why, row.hint)
    )
    return rf"{what}\n(    at   .*\n)?    why  {why}\n    try  {hint}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHOWN)
def test_the_example_raises_the_error(name: str) -> None:
    row = ROWS[name]
    namespace: dict[str, Any] = {"__name__": "__example__"}
    exec(PREAMBLE, namespace)
    default = torch.get_default_dtype()
    try:
        with pytest.raises(Exception) as raised:
            exec(compile(row.example.strip(), f"<{name}>", "exec"), namespace)
    finally:
        torch.set_default_dtype(default)
    texts = [str(error) for error in chain(raised.value) if type(error) is row.raises]
    assert any(re.fullmatch(pattern(row), text) for text in texts), raised.value


def test_rows_have_an_example_or_say_why_not() -> None:
    assert [name for name, row in ROWS.items() if bool(row.example) == bool(row.no_example)] == []
    assert len(ROWS) == sum(map(len, subjects().values())) > 100


def test_each_row_is_raised_somewhere_with_its_values() -> None:
    """Where a row is raised by its name, its placeholders have values; where it is chosen, the call checks that."""
    used, wrong = set[str](), []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "refusals" and path.parent.parent == PACKAGE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                used.add(node.id)
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "error"):
                continue
            owner = node.func.value
            given = {keyword.arg for keyword in node.keywords} - {"at"}
            row = ROWS.get(owner.id) if isinstance(owner, ast.Name) else None
            if row is not None and None not in given and given != row.placeholders:
                wrong.append(f"{path}:{node.lineno}")
    assert not wrong and not set(ROWS) - used


def test_values_are_checked() -> None:
    row = Refusal(UnsupportedProgramError, what="{op} writes", why="it is {kind}", hint="do not")
    assert (
        str(row.error("here", op="add_", kind="odd"))
        == "add_ writes\n    at   here\n    why  it is odd\n    try  do not"
    )
    with pytest.raises(TypeError, match="needs values for"):
        row.error(op="add_")
    with pytest.raises(TypeError, match="needs values for"):
        row.error(op="add_", kind="odd", size=3)


def test_the_page_is_made_of_the_rows() -> None:
    assert PAGE.read_text() == page(), "scripts/refusals writes it"
