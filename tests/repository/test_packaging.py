"""What a user installs: the wheel holds the whole package, and works where the repository is not.

The wheel is built through an sdist, so that both are known to be complete. Nothing is fetched: the build uses
the setuptools of this environment, and the new environment sees the torch of this one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "functionalize": "functionalize",
    "codegen": "functionalize/codegen",
    "generated": "functionalize/generated",
}
EXAMPLE = """
import pathlib, sys, torch
from torch.fx.experimental.proxy_tensor import make_fx
import functionalize, functionalize.codegen, functionalize.ops.tables
for module in (functionalize, functionalize.codegen, functionalize.ops.tables):
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__

def program(x):
    x[0].add_(1)
    return x.sum()

graph = make_fx(functionalize.functionalize(program, remove="mutations_and_views"))(torch.zeros(3))
x = torch.zeros(3)
assert graph(x) == 1 and x.tolist() == [1, 0, 0]
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build in a copy: setuptools leaves its working folders beside the sources."""
    work = tmp_path_factory.mktemp("build")
    copy = work / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_sdist('../dist'))"
    sdist = run(sys.executable, "-c", build, cwd=copy).split()[-1]
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", work, work / "dist" / sdist, cwd=work)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A new environment's interpreter, and an empty folder to run it in."""
    home = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel, cwd=home)
    # A path in a .pth file is searched last, and its own .pth files (our editable install) are not read.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    empty = home / "empty"
    empty.mkdir()
    return python, empty


def test_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_transform_runs_without_the_repository(installed: tuple[Path, Path]) -> None:
    python, empty = installed
    run(python, "-I", "-W", "error", "-c", EXAMPLE, cwd=empty)


def test_codegen_runs_without_the_repository(installed: tuple[Path, Path]) -> None:
    python, empty = installed
    printed = run(python, "-I", "-m", "functionalize.codegen", "explain", "add_.Tensor", cwd=empty)
    assert "aten::add.Tensor" in printed
