"""What people read is in the field's words: pages, messages, and in the core docstrings, comments and names too.

`DIALECT` is the table of phrases that no reader outside this project knows, and what to say instead; `NAMES` is the
same for identifiers, `LOCALS` for what a function calls its values. Limits: a phrase, not its sense; a text that a
program puts together from parts is read part by part.

`python -m tests.repository.test_words functionalize/runtime` lists what a folder still says.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
MODULES = sorted((ROOT / "functionalize").rglob("*.py"))
CORE = [module for module in MODULES if module.relative_to(ROOT).parts[1] not in ("backends", "report", "cli")]
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
# Of code alone: phrases that pages may use in another sense.
CODE_DIALECT = {
    r"(is|are|was|were) (not )?told": "knows, gets, is given; intercepted",
    r"tells? (of|whether|apart)": "says, records",
    r"(is|are|was|were|has|have|be) none": "is not one, has no, is None",
    r"and none where": "and not where",
    r"lies? (at|in) its (own )?(place|memory)": "is at",
    r"look at anew|a look": "analyze",
    r"what is (heard|lent|entered)": "intercepted, installed, traversed",
    r"further ones?|other ones": "name them",
}
# Parts of identifiers: `told_by` and `_ToldBy` have the part `told`.
NAMES = {
    "told": "with_autograd, recorded, ...",
    "untold": "hidden_from_autograd",
    "heard": "intercepted",
    "lend": "install",
    "lent": "installed",
    "anew": "fresh, again",
    "apart": "decomposed, suspended",
    "anatomy": "decomposition",
    "recipe": "reconstruction",
    "truths": "bools",
    "truth": "bool",
    "laid": "with_layout",
    "lie": "layout",
    "ahead": "precheck",
    "ending": "finalizer",
    "standin": "substitute",
    "otherwise": "default, else_value",
    "settings": "python_guards",
}
# What a function calls its values: the name says what it holds.
LOCALS = frozenset({"one", "ones", "found", "known", "given", "kind", "thing", "things", "told", "here", "there"})


def _patterns(phrases: Mapping[str, str]) -> dict[re.Pattern[str], str]:
    return {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): say for phrase, say in phrases.items()}


_PATTERNS = _patterns(DIALECT)
_CODE_PATTERNS = _patterns(DIALECT | CODE_DIALECT)


def dialect_in(text: str, patterns: Mapping[re.Pattern[str], str] = _PATTERNS) -> list[str]:
    """The phrases of the table in a text, each with what to say."""
    plain = " ".join(text.split())
    return [
        f"{plain[max(0, match.start() - 30) : match.end() + 30]!r}: say {say}"
        for pattern, say in patterns.items()
        for match in pattern.finditer(plain)
    ]


def comments_of(module: Path) -> Iterator[tuple[int, str]]:
    with tokenize.open(module) as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def docstrings_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def names_of(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """The names that a module defines, with their lines, and whether a function calls its value so."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, id(node) not in _class_fields(tree)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.lineno, node.attr, False


def _is_self(owner: ast.expr) -> bool:
    """Whether an attribute is of this class: those of torch's objects have torch's names."""
    return isinstance(owner, ast.Name) and owner.id == "self"


@cache
def _class_fields(tree: ast.AST) -> frozenset[int]:
    """The names that stand in the body of a class: its fields."""
    fields = [statement for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body]
    return frozenset(id(field.target) for field in fields if isinstance(field, ast.AnnAssign))


def parts_of(name: str) -> list[str]:
    """The words of an identifier: of ``_ToldBy`` and of ``told_by``, ``told`` and ``by``."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def dialect_of_code(module: Path) -> Iterator[str]:
    """What a module of the core says in docstrings, comments and names."""
    tree, place = ast.parse(module.read_text()), module.relative_to(ROOT)
    for line, text in sorted([*docstrings_of(tree), *comments_of(module)]):
        yield from (f"{place}:{line}: {phrase}" for phrase in dialect_in(text, _CODE_PATTERNS))
    for line, name, is_local in sorted(set(names_of(tree))):
        if is_local and name.strip("_") in LOCALS:
            yield f"{place}:{line}: local {name}: say what it holds"
        yield from (f"{place}:{line}: {name}: say {NAMES[part]}" for part in parts_of(name) if part in NAMES)


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


@pytest.mark.parametrize("module", CORE, ids=lambda module: str(module.relative_to(ROOT)))
def test_code_of_the_core(module: Path) -> None:
    check(dialect_of_code(module))


def test_the_table_finds_its_phrases() -> None:
    assert dialect_in("a size that only the data tell") and dialect_in("It is spelt\nout, and then taken apart.")
    assert dialect_in("`x` is none of these") and not dialect_in("a data-dependent size; the metadata tell nothing")
    names = [text for _, text in texts_of(ast.parse('"""Doc."""\nraise E(f"{x} is {y!r}: spelt out", "a" "b")'))]
    assert sorted(names) == [" is ", ": spelt out", "ab"]
    assert parts_of("_ToldBy") == ["told", "by"] == parts_of("told_by")
    fields = "class C:\n    kind: int\ndef f(one):\n    found = 1\n    self.known = 2"
    assert [name for _, name, is_local in names_of(ast.parse(fields)) if is_local] == ["one", "found"]


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    print("\n".join(line for module in CORE if module.is_relative_to(folder) for line in dialect_of_code(module)))
