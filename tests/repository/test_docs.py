"""The documentation is true: its Python blocks run, they print what it says, and docstring examples hold.

A page's Python blocks run in order, in one namespace, as a reader would type them. A `text` block that
directly follows a Python block is that block's exact output.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import functionalize

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)[^)]*\)")


# How many words of prose pages may have, together where there are several.
BUDGETS = {
    "README.md": 800,
    "CHANGELOG.md": 900,
    "CONTRIBUTING.md": 1500,
    "GLOSSARY.md": 600,
    "tests/README.md": 800,
    "docs/limits.md": 1200,
    "docs/reference/capture.md docs/reference/guards.md docs/how-to/dynamic-sizes.md docs/how-to/branches.md "
    "docs/how-to/python-state.md docs/how-to/hooks-and-optimizers.md": 2000,
    "docs/how-to/export-*.md docs/how-to/torch-compile.md docs/how-to/choose-a-route.md docs/reference/state.md": 2500,
    "docs/reference/export-details.md": 1200,
}


@dataclass(frozen=True)
class Example:
    """A Python block, the line it starts on, and what it must print."""

    line: int
    code: str
    output: str | None


def examples(text: str) -> list[Example]:
    found = []
    blocks = list(FENCE.finditer(text))
    for block, following in pairwise([*blocks, None]):
        if block is None or block["language"] != "python":
            continue
        adjacent = following and following["language"] == "text" and not text[block.end() : following.start()].strip()
        line = text.count("\n", 0, block.start("body"))
        found.append(Example(line, block["body"], following["body"] if following and adjacent else None))
    return found


def modules() -> list[str]:
    walked = pkgutil.walk_packages(functionalize.__path__, "functionalize.")
    return ["functionalize", *(m.name for m in walked if not m.name.endswith("__main__"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for example in examples(page.read_text()):
        printed = io.StringIO()
        code = compile("\n" * example.line + example.code, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if example.output is not None:
            assert printed.getvalue().strip() == example.output.strip(), f"output of {page}:{example.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = {match["target"] for match in LINK.finditer(FENCE.sub("", page.read_text()))}
    dead = [t for t in sorted(targets) if "://" not in t and not (page.parent / t).exists()]
    assert not dead


@pytest.mark.parametrize("pages", BUDGETS, ids=lambda pages: pages.split()[0])
def test_pages_are_short(pages: str) -> None:
    """Words outside of fenced blocks; the marks of tables and lists are no words."""
    files = [file for page in pages.split() for file in ROOT.glob(page)]
    words = [word for file in files for word in FENCE.sub("", file.read_text()).split() if re.search(r"\w", word)]
    assert files and len(words) <= BUDGETS[pages]


def test_the_api_page_has_all_that_is_exported() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    shown = set(re.findall(r"^::: [\w.]*?(\w+)$", page, re.MULTILINE))
    assert not set(functionalize.__all__) - shown


def test_contributing_names_what_exists() -> None:
    """Paths, classes, methods, functions and constants that CONTRIBUTING.md names are there under these names."""
    spans = set(CODE.findall(FENCE.sub("", (ROOT / "CONTRIBUTING.md").read_text())))
    paths = {span for span in spans if re.fullmatch(r"[\w/.]*/[\w/.]*|[\w.]+\.py", span)}
    lost = [path for path in paths if not any((folder / path).exists() for folder in (ROOT, ROOT / "functionalize"))]
    names = {
        match[1] for span in spans - paths if (match := re.fullmatch(r"@?([A-Za-z]\w*(\.\w+)?)(\(\.\.\.\))?", span))
    }
    names |= {span[1:-5] for span in spans if re.fullmatch(r"_\w+\(\.\.\.\)", span)}
    ours = {name for name in names if re.search(r"[A-Z._]", name.rstrip("_"))}
    unknown = ours - defined_names() - {"make_fx", "torch.export"}
    assert len(ours) > 40 and not lost and not unknown


def defined_names() -> set[str]:
    """What our modules and tests define: `Class`, `Class.method`, `function`, `CONSTANT`, `parameter`."""
    found: set[str] = set()
    for file in [*(file for folder in ("functionalize", "codegen", "tests") for file in (ROOT / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
                found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def test_the_map_of_tests_names_files_that_exist() -> None:
    """Files and folders that tests/README.md names, from its own folder or from the repository's root."""
    folder = ROOT / "tests"
    named = set(re.findall(r"[\w/]+(?:\.py|/)(?=`)", (folder / "README.md").read_text()))
    lost = [name for name in named if not any((place / name).exists() for place in (folder, ROOT))]
    assert len(named) > 40 and not lost


@pytest.mark.every(2)
@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=options, verbose=False)
    assert failed == 0, f"see the output above: {failed} examples of {name} fail"


def test_public_api_has_examples() -> None:
    """What `functionalize` exports, but for exceptions, is documented by an example that runs."""
    exported = {name: getattr(functionalize, name) for name in functionalize.__all__}
    bare = [name for name, value in exported.items() if not is_exception(value) and ">>>" not in value.__doc__]
    assert not bare


def test_python_lists_the_public_names() -> None:
    """``dir`` gives them alone, and the text of the package, which ``help`` begins with, says what each is."""
    assert sorted(dir(functionalize)) == sorted(functionalize.__all__)
    said = re.findall(r"^    (\w+) {2,}\S.*$", functionalize.__doc__ or "", re.MULTILINE)
    assert sorted(said) == sorted(functionalize.__all__)


def is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


@pytest.mark.slow
def test_readme_shows_the_table_of_differences() -> None:
    """Each claim beside the incumbent is what a script prints, on the torch that the tests run with."""
    printed = run_script("examples/differences.py")
    between = (ROOT / "README.md").read_text().split("<!-- differences -->")[1].split("<!-- /differences -->")[0]
    assert between.strip() == printed.strip()


def table_of_exporters() -> dict[tuple[str, str], str]:
    """What docs/how-to/choose-a-route.md says becomes of a program by a route."""
    page = ROOT / "docs" / "how-to" / "choose-a-route.md"
    lines = page.read_text().split("<!-- backends -->")[1].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    routes = cells[0][1:]
    return {(row[0], route): cell for row in cells[2:] for route, cell in zip(routes, row[1:], strict=True)}


EXPORTED = table_of_exporters()
OURS = ("ExportedProgram", "ONNX", "JAX")


def test_readme_shows_rows_of_the_table_of_exporters() -> None:
    between = (ROOT / "README.md").read_text().split("<!-- exporters -->")[1].split("<!-- /exporters -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in between.strip().splitlines()[2:]]
    for title, *shown in rows:
        program = title.split("`")[1]
        ours = {EXPORTED[program, route] for route in OURS}
        assert shown == [EXPORTED[program, "`torch.export`"], EXPORTED[program, "`torch.onnx`"], *ours]


@pytest.mark.slow
def test_the_table_of_exporters_has_all_programs_and_routes() -> None:
    backends = pytest.importorskip("benchmarks.backends")
    assert list(EXPORTED) == [(program, route) for program in backends.PROGRAMS for route in backends.ROUTES]


def check_exporter(program: str, route: str) -> None:
    """The cell is what the script prints."""
    backends = pytest.importorskip("benchmarks.backends")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert backends.outcome(program, backends.ROUTES[route]) == EXPORTED[program, route]


@pytest.mark.slow(seconds=3)
@pytest.mark.every(12)
@pytest.mark.parametrize(("program", "route"), [cell for cell in EXPORTED if cell[1] in OURS])
def test_what_becomes_of_a_program_by_our_exporters(program: str, route: str) -> None:
    check_exporter(program, route)


@pytest.mark.full
@pytest.mark.parametrize(("program", "route"), [cell for cell in EXPORTED if "torch." in cell[1]])
def test_what_becomes_of_a_program_by_exporters_of_torch(program: str, route: str) -> None:
    check_exporter(program, route)


@pytest.mark.slow
def test_demo_ends_well() -> None:
    assert "Both graphs are pure and equal to eager." in run_script("examples/demo.py")


# A thread of gloo that still holds a tensor when the interpreter ends aborts the process, in eager programs too
# (pytorch issue 190489). A barrier makes it rare, and only processes without DTensors can join these threads.
ABORTED_AT_EXIT = "terminate called without an active exception"


@pytest.mark.slow(seconds=10)
def test_the_page_on_many_ranks_shows_its_example_and_what_two_ranks_print() -> None:
    blocks = [
        (block["language"], block["body"]) for block in FENCE.finditer((ROOT / "docs" / "distributed.md").read_text())
    ]
    code = [body for language, body in blocks if language == "py"]
    shown = "".join(body for language, body in blocks if language == "text")
    example = "examples/many_ranks.py"
    assert len(code) == 4 and all(part in (ROOT / example).read_text() for part in code)
    two_ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example)
    try:
        printed = run_script(*two_ranks)
    except AssertionError as error:
        if ABORTED_AT_EXIT not in str(error):
            raise
        printed = run_script(*two_ranks)
    assert shown == printed


@pytest.mark.full(seconds=10)
def test_deferred_example_ends_well() -> None:
    assert "from the last layer to the first, equal to eager: True" in run_script("examples/deferred.py")


def run_script(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
