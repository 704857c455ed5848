"""What users read is in the field's words: pages, docstrings of what is exported, and the texts of the package.

`DIALECT` is the one table: a phrase that no reader outside this project knows, and what to say instead. Limits: a
phrase, not its sense; a text that a program puts together from parts is read part by part.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
MODULES = sorted((ROOT / "functionalize").rglob("*.py"))
# What users import from; functionalize.backends has more modules, which these bring together.
PUBLIC = (
    "functionalize",
    "functionalize.backends",
    "functionalize.backends.jax",
    "functionalize.backends.onnx",
    "functionalize.torchdistx",
    "functionalize.verify",
)

DIALECT = {
    r"the data (tell|tells|say|says|give|gives)|told by (the )?data": "data-dependent, depends on tensor values",
    r"the data (would )?decides?|decided? by (its |the )?(data|values?)|decides by": "branches on tensor values",
    r"decides? otherwise": "takes another branch",
    r"truths?": "bools",
    r"no number": "NaN",
    r"numbers? with a point": "floats",
    r"spel(t|l|ls|led) (it |them )?out|spelling out": "decompose, write explicitly",
    r"tak(e|es|en|ing) (it |them )?apart": "decompose",
    r"stand-?ins?": "substitute",
    r"lends?|lent": "install",
    r"is heard|heard of": "is intercepted",
    r"anew": "again, new",
    r"anatom(y|ies)": "decomposition",
    r"(is|are|was|were) none of": "is not one of",
    r", of which": "a second sentence",
    r"(lie|lies|lay) otherwise": "has other strides",
    r"otherwise than": "differently from",
    r"nested otherwise": "nested differently",
    r"comput(e|es|ed) (it )?otherwise": "computes something else, use other operators",
    r"asked of": "read from",
    r"inside of what|outside of what": "inside the captured program",
    r"goes another way": "takes another branch",
    r"made real": "materialized",
}
_PATTERNS = {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): say for phrase, say in DIALECT.items()}
_ANY = re.compile("|".join(pattern.pattern for pattern in _PATTERNS), re.IGNORECASE)


def dialect_in(text: str) -> list[str]:
    """The phrases of the table in a text, each with what to say."""
    plain = " ".join(text.split())
    if not _ANY.search(plain):
        return []
    return [
        f"{plain[max(0, found.start() - 30) : found.end() + 30]!r}: say {say}"
        for pattern, say in _PATTERNS.items()
        for found in pattern.finditer(plain)
    ]


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings of a module, with their lines: no docstrings, and of texts with values what stands between these."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.lineno, node.value


def docstrings(module: str) -> Iterator[tuple[str, str]]:
    """The docstrings of what a module exports, and of the public methods of its classes."""
    found = importlib.import_module(module)
    for name in getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")]:
        value = getattr(found, name)
        if not str(getattr(value, "__module__", "")).startswith("functionalize"):
            continue
        yield name, inspect.getdoc(value) or ""
        for kind in value.__mro__ if isinstance(value, type) else ():
            for method, member in vars(kind).items() if kind.__module__.startswith("functionalize") else ():
                if not method.startswith("_"):
                    yield f"{name}.{method}", _doc(member)


def _doc(member: Any) -> str:
    return (inspect.getdoc(member) or "") if callable(member) or isinstance(member, property) else ""


def check(found: Iterable[str]) -> None:
    phrases = list(found)
    if phrases:
        pytest.fail("\n".join(phrases), pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    check(dialect_in(page.read_text()))


@pytest.mark.parametrize("module", PUBLIC)
def test_exported_docstrings(module: str) -> None:
    check(f"{name}: {line}" for name, doc in docstrings(module) for line in dialect_in(doc))


def test_help_of_commands() -> None:
    tree = ast.parse((ROOT / "functionalize" / "cli" / "app.py").read_text())
    commands = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert len(commands) > 5
    check(f"{one.name}: {line}" for one in commands for line in dialect_in(ast.get_docstring(one) or ""))


def test_texts_of_the_package() -> None:
    """Errors, warnings, hints, help: whatever is no docstring."""
    check(
        f"{module.relative_to(ROOT)}:{line}: {phrase}"
        for module in MODULES
        for line, text in texts_of(ast.parse(module.read_text()))
        for phrase in dialect_in(text)
    )


def test_the_table_finds_its_phrases() -> None:
    assert dialect_in("a size that only the data tell") and dialect_in("It is spelt\nout, and then taken apart.")
    assert dialect_in("`x` is none of these") and not dialect_in("a data-dependent size; the metadata tell nothing")
    names = [text for _, text in texts_of(ast.parse('"""Doc."""\nraise E(f"{x} is {y!r}: spelt out", "a" "b")'))]
    assert sorted(names) == [" is ", ": spelt out", "ab"]
