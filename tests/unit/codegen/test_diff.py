"""`codegen diff` between the installed YAML and hand-edited copies says exactly what was edited."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from functionalize.codegen import __main__ as commands
from functionalize.codegen import diff, exceptions, rules
from functionalize.codegen.native_functions.sources import source_at
from functionalize.codegen.tables import Tables, build

Edit = Callable[[str], str]


def entry(text: str, func: str) -> str:
    """The whole entry of an op, from its `- func:` line up to the next entry."""
    begin = text.index(f"- func: {func}(")
    return text[begin : text.index("- func: ", begin + 1)]


def without(func: str) -> Edit:
    return lambda text: text.replace(entry(text, func), "")


def replaced(old: str, new: str) -> Edit:
    def edit(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    return edit


def appended(entry: str) -> Edit:
    return lambda text: text + entry


@pytest.fixture
def edited(installed: Tables, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the installed YAML with these edits, its tags beside it."""

    def make(*edits: Edit) -> Path:
        text = installed.source.functions.read_text(encoding="utf-8")
        for edit in edits:
            text = edit(text)
        file = tmp_path / "native_functions.yaml"
        file.write_text(text, encoding="utf-8")
        shutil.copy(installed.source.tags, tmp_path)
        return file

    return make


@pytest.fixture
def report(installed: Tables, edited: Callable[..., Path]) -> Callable[..., str]:
    """The report on the installed YAML against a copy with these edits, without its head."""

    def make(*edits: Edit) -> str:
        new = build(source_at(edited(*edits)), exceptions.load())
        text = diff.markdown(installed, new, diff.diff(installed, new, rules.read_rules()))
        return text.partition(" after.\n")[2]

    return make


ADDED = "\n- func: novel(Tensor self) -> Tensor\n  dispatch:\n    CPU: novel\n"
VIEW = (
    "\n- func: novel_view(Tensor(a) self, int dim) -> Tensor(a)\n  dispatch:\n    CPU: novel_view\n"
    "\n- func: novel_view_copy(Tensor self, int dim) -> Tensor\n  dispatch:\n    CPU: novel_view_copy\n"
    "  tags: view_copy\n"
)


@pytest.mark.slow
def test_nothing_changed(edited: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["diff", "installed", str(edited())]) == 0
    title, count, last = capsys.readouterr().out.split("\n\n")
    assert title.startswith("# native_functions.yaml: torch ")
    assert count.endswith(" after.")
    assert last == "Nothing changes.\n"


def test_an_op_added_one_removed_one_renamed_one_new_view(report: Callable[..., str]) -> None:
    edits = (
        appended(ADDED),
        without("trapezoid.dx"),
        replaced("- func: cumulative_trapezoid.x(", "- func: cumulative_trapezoid_x.x("),
        appended(VIEW),
    )
    assert report(*edits) == (
        "\n## New views without a rule (1)\n\n"
        "Needs a human: write a view rule, or give the reason in UNSUPPORTED_VIEWS.\n\n"
        "- `aten::novel_view`: single\n"
        "\n## New views (1)\n\n- `aten::novel_view`: single\n"
        "\n## Ops renamed (1)\n\n- `aten::cumulative_trapezoid.x` is now `aten::cumulative_trapezoid_x.x`\n"
        "\n## Ops added (3)\n\n"
        "- `aten::novel`: functional\n"
        "- `aten::novel_view`: functional, single view\n"
        "- `aten::novel_view_copy`: functional\n"
        "\n## Ops removed (1)\n\n- `aten::trapezoid.dx`: functional, composite\n"
    )


@pytest.mark.slow
def test_a_kind_that_changes(report: Callable[..., str]) -> None:
    op = "_has_compatible_shallow_copy_type"
    found = report(replaced(f"- func: {op}(Tensor self,", f"- func: {op}(Tensor(a!) self,"))
    assert "## Kinds changed (1)" in found
    assert f"- `aten::{op}`: functional, composite -> mutable (writes self), composite\n" in found


@pytest.mark.slow
def test_a_pair_that_changes(report: Callable[..., str]) -> None:
    variant = (
        "\n- func: _cummax_helper_functional(Tensor self, Tensor values, Tensor indices, int dim)"
        " -> (Tensor, Tensor)\n  dispatch:\n    CPU: _cummax_helper_functional\n"
    )
    found = report(appended(variant))
    assert "## Exceptions that no longer apply (1)" in found
    assert "`op: _cummax_helper`: a pair is given to a mutating op whose signature finds no partner" in found
    assert "- `aten::_cummax_helper`: aten::cummax(self, dim) -> aten::_cummax_helper_functional\n" in found


@pytest.mark.slow
def test_a_mutating_op_without_a_partner(report: Callable[..., str]) -> None:
    lonely = "\n- func: novel_(Tensor(a!) self) -> Tensor(a!)\n  dispatch:\n    CPU: novel_\n"
    found = report(appended(lonely))
    assert "## Mutating ops without a partner (1)" in found
    assert "- `func: novel_(Tensor(a!) self) -> Tensor(a!)`: a mutating op has a functional variant" in found


@pytest.mark.slow
def test_an_exception_whose_op_is_gone(report: Callable[..., str]) -> None:
    found = report(without("_unsafe_view"))
    assert "- `op: _unsafe_view`: an exception is about an op that exists" in found
