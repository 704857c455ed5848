"""Whose code a frame is: by the folder of its file, not by how the folder's name begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import functionalize
from functionalize import UnsupportedProgramError, capture
from functionalize.call_stack import decisive_line, user_location

OURS, TORCHS = Path(functionalize.__file__).parent, Path(torch.__file__).parent
SOURCE = """
def here():
    return user_location()

def fails():
    raise ValueError
"""


def code_in(file: Path) -> dict[str, Any]:
    """Functions as if they stood in a file."""
    names: dict[str, Any] = {"user_location": user_location}
    exec(compile(SOURCE, str(file), "exec"), names)
    return names


def line_of_error(file: Path) -> str:
    with pytest.raises(ValueError) as raised:
        code_in(file)["fails"]()
    return decisive_line(raised.value)


@pytest.mark.parametrize(
    "file",
    [
        OURS.parent / "functionalize_models.py",
        OURS.parent / "functionalize_models" / "bert.py",
        TORCHS.parent / "torchvision" / "ops" / "boxes.py",
        TORCHS.parent / "torchtune" / "modules.py",
        TORCHS.parent / "torch_user.py",
    ],
    ids=lambda file: file.name,
)
def test_names_that_only_begin_alike_are_the_users(file: Path) -> None:
    assert code_in(file)["here"]().file == str(file)
    assert line_of_error(file).startswith(f"{file}:6 in fails")


@pytest.mark.parametrize("file", [OURS / "transform" / "new.py", TORCHS / "nn" / "new.py", TORCHS / "new.py"])
def test_our_code_and_torchs_is_passed_over(file: Path) -> None:
    assert code_in(file)["here"]().file == __file__


@pytest.mark.parametrize(
    ("file", "counts"),
    [(TORCHS / "nn" / "new.py", True), (TORCHS / "optim" / "new.py", True), (TORCHS / "nn_of_another.py", False)],
)
def test_programs_are_written_with_parts_of_torch(file: Path, counts: bool) -> None:
    assert line_of_error(file).startswith(str(file if counts else __file__))


def test_code_of_a_notebook_is_the_users() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def run(x):\n    return x.numpy()\n", "<ipython-input-3-0f>", "exec"), scope)
    with pytest.raises(UnsupportedProgramError, match="<ipython-input-3-0f>:2 in run"):
        capture(scope["run"], (torch.ones(2),))
