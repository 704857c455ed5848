"""Where the installed torch is another than the one of the shipped tables, tables for it are made, once."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from functionalize.codegen.native_functions import sources
from functionalize.codegen.tables import Tables
from functionalize.generated import rows
from functionalize.ops import tables

NOVEL = "\n- func: novel(Tensor self) -> Tensor\n  dispatch:\n    CPU: novel\n"


@pytest.fixture
def other_torch(installed: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sources.Source:
    """Another torch seems to be installed: its YAML has one op more."""
    folder = tmp_path / "yaml"
    folder.mkdir()
    text = installed.source.functions.read_text(encoding="utf-8")
    (folder / "native_functions.yaml").write_text(text + NOVEL, encoding="utf-8")
    shutil.copy(installed.source.tags, folder)
    source = sources.source_at(folder / "native_functions.yaml")
    monkeypatch.setattr(sources, "installed_source", lambda: source)
    return source


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    return tmp_path / "cache" / "functionalize"


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_shipped_tables_serve_their_own_torch(caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    if sources.installed_source().sha256 != rows.SOURCES_SHA256:
        pytest.skip("another torch than that of the shipped tables is installed")
    assert tables._installed_rows() is rows.ROWS
    assert notices(caplog) == []
    assert not cache.exists()


def test_tables_are_made_once_with_one_notice(
    other_torch: sources.Source, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tables._installed_rows()
    assert "aten::novel ('functional',)" in made.splitlines()
    (folder,) = cache.iterdir()
    assert notices(caplog) == [
        f"torch unknown is installed, but functionalize's tables are for torch {rows.TORCH_VERSION}: "
        f"new tables are generated in {folder}"
    ]
    caplog.clear()
    assert tables._installed_rows() == made
    assert notices(caplog) == []


@pytest.mark.slow
def test_a_cache_of_other_sources_is_not_used(other_torch: sources.Source, cache: Path) -> None:
    tables._installed_rows()
    (folder,) = cache.iterdir()
    file = folder / "rows.py"
    file.write_text(file.read_text().replace(other_torch.sha256, "0" * 64).replace("aten::novel", "aten::stale"))
    assert "aten::novel ('functional',)" in tables._installed_rows().splitlines()


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "text", ["", "ROWS = ", "ROWS = open('/')", "import sys\nsys.exit('a cached table was run')\n"], ids=range(4)
)
def test_a_damaged_cache_is_made_anew(other_torch: sources.Source, cache: Path, text: str) -> None:
    made = tables._installed_rows()
    (folder,) = cache.iterdir()
    (folder / "rows.py").write_text(text)
    assert tables._installed_rows() == made
    assert (folder / "rows.py").read_text() != text


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_done_without(
    other_torch: sources.Source,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "file"))
    assert "aten::novel ('functional',)" in tables._installed_rows().splitlines()
    (notice,) = notices(caplog)
    assert "for this process only" in notice
    assert notice.endswith("set XDG_CACHE_HOME to keep them)")


def test_a_yaml_that_cannot_be_read_leaves_the_shipped_tables(
    other_torch: sources.Source, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_torch.functions.write_text("- func: f(Tensor(A) self) -> Tensor\n")
    assert tables._installed_rows() is rows.ROWS
    (notice,) = notices(caplog)
    assert "cannot be generated, so these are used" in notice
    assert "an alias annotation is" in notice


def test_a_torch_without_its_yaml_leaves_the_shipped_tables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> sources.Source:
        raise FileNotFoundError("torchgen is not installed")

    monkeypatch.setattr(sources, "installed_source", missing)
    assert tables._installed_rows() is rows.ROWS
    (notice,) = notices(caplog)
    assert notice.endswith("the installed version: torchgen is not installed")


@pytest.mark.full(seconds=7)
def test_processes_that_start_at_once_do_not_disturb_each_other(other_torch: sources.Source, cache: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from functionalize.ops import tables\n"
        "from functionalize.codegen.native_functions import sources\n"
        f"source = sources.source_at(Path({str(other_torch.functions)!r}))\n"
        "sources.installed_source = lambda: source\n"
        "rows = tables._installed_rows().splitlines()\n"
        "print(len(rows), \"aten::novel ('functional',)\" in rows)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert outputs == {f"{len(list(tables.known_ops())) + 1} True\n"}
    assert [process.returncode for process in processes] == [0] * 4
    (folder,) = cache.iterdir()
    assert sorted(file.name for file in folder.iterdir() if file.suffix == ".py") == ["reasons.py", "rows.py"]
