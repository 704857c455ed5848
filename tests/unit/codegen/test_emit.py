"""The generated files: literals alone, written only when they change, checked for drift. The commands too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from functionalize.codegen import __main__ as commands
from functionalize.codegen import emit, explain, rules
from functionalize.codegen.tables import Tables


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)


def test_the_files_in_the_repository_are_those_that_emit_writes(installed: Tables) -> None:
    if installed.source.torch_version != "2.13.0":
        pytest.skip("the tables in the repository are those of torch 2.13.0")
    assert list(emit.drift(installed, emit.GENERATED)) == []


def test_the_files_hold_sorted_literals_alone(installed: Tables) -> None:
    for text in emit.render(installed).values():
        for node in ast.parse(text).body[1:]:  # the docstring stands first
            assert isinstance(node, ast.Assign)
            ast.literal_eval(node.value)
    rows = [row.name for row in installed.rows.values()]
    assert rows == sorted(rows)


def test_files_are_written_only_when_they_change(installed: Tables, tmp_path: Path) -> None:
    assert {file.name for file in emit.emit(installed, tmp_path)} == {"rows.py", "reasons.py"}
    before = (tmp_path / "rows.py").stat().st_mtime_ns
    (tmp_path / "reasons.py").write_text("drifted")
    assert [file.name for file in emit.emit(installed, tmp_path)] == ["reasons.py"]
    assert (tmp_path / "rows.py").stat().st_mtime_ns == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["reasons.py", "rows.py"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.py"
    file.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        emit.write_atomically(file, "new")
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.py"]


@pytest.mark.slow
def test_check_shows_the_drift_and_the_command_that_mends_it(
    installed: Tables, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emit.emit(installed, tmp_path)
    assert commands.main(["check", "--out", str(tmp_path)]) == 0
    rows = tmp_path / "rows.py"
    rows.write_text(rows.read_text().replace("aten::add.Tensor ('functional',)", "aten::add.Tensor ('mutable',)"))
    assert commands.main(["check", "--out", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "-aten::add.Tensor ('mutable',)\n+aten::add.Tensor ('functional',)\n" in output.out
    assert output.err.endswith("run `python -m functionalize.codegen emit`\n")
    assert commands.main(["emit", "--out", str(tmp_path)]) == 0
    assert commands.main(["check", "--out", str(tmp_path)]) == 0


def test_a_malformed_source_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "native_functions.yaml"
    source.write_text("- func: f(Tensor(A) self) -> Tensor\n")
    (tmp_path / "tags.yaml").write_text("- tag: core\n")
    assert commands.main(["emit", "--yaml", str(source), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}:1: an alias annotation is")
    assert error.count("\n") == 2
    assert not (tmp_path / "rows.py").exists()


def test_explain_tells_the_row_and_where_it_comes_from(installed: Tables) -> None:
    told = {label.strip(): text for label, text in explain.lines(installed, "aten::select.int", rules.read_rules())}
    assert told["op"] == "aten::select.int"
    assert told[""] == "select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"
    assert told["copy"] == "aten::select_copy.int"
    assert told["rule"].startswith("view_rules.py:")


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["polygamma_", "aten::polygamma_", "aten.polygamma_"])
def test_explain_names_the_exception(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["explain", spelling]) == 0
    output = capsys.readouterr().out
    assert "functional_args ('n', 'self')" in output
    assert "pair: the functional op takes the order before `self`" in output


@pytest.mark.slow
def test_explain_of_an_unknown_op_names_those_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["explain", "ad_.Tensor"]) == 1
    assert "there is no operator aten::ad_.Tensor; similar names: aten::add_.Tensor" in capsys.readouterr().err


def test_emit_never_imports_torch(tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['codegen', 'emit', '--out', {str(tmp_path)!r}]\n"
        "try:\n    runpy.run_module('functionalize.codegen', run_name='__main__')\n"
        "except SystemExit as done:\n    assert not done.code, done.code\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'torch'])\n"
    )
    output = run(sys.executable, "-c", program).stdout
    assert output.splitlines()[-1] == "[]"
