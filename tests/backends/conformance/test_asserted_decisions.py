"""Exports of programs that decide by data: they say so, and each route compares the decisions as a call does."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from functionalize import (
    DataDependentError,
    DecisionsAssertedWarning,
    UnsupportedExportError,
    UnsupportedProgramError,
    capture,
    from_exported_program,
)
from tests.support.routes import JAX, JAX_UNJITTED, MODULE, ONNX, Route

X, N = torch.tensor([1.0, 2.0]), torch.tensor(3)


def flip(x: Tensor) -> Tensor:
    for _ in range(3):
        if x.sum() > 0:
            x = x + 1
    return x if not x.isnan().any() else -x


def said(export: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export()
    return [each for each in caught if each.category is DecisionsAssertedWarning]


METHODS = ["to_exported_program", "to_core_aten", pytest.param("to_onnx", marks=pytest.mark.slow)]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_asserted_is_said_at_the_line_that_exports(method: str) -> None:
    (warning,) = said(lambda: getattr(capture(flip, (X,)), method)())
    lines = str(warning.message).splitlines()
    assert warning.filename == __file__
    assert len(lines) == 4 and "if x.sum() > 0: -> True" in lines[1] and lines[2].endswith("else -x -> False")
    assert "torch.where or torch.cond" in lines[-1] and "is_exporting" not in lines[-1]


def test_nothing_is_said_of_programs_that_decide_by_no_data() -> None:
    for program in (lambda x: torch.where(x > 0, x, -x), lambda x: x * x.sum().item()):
        assert not said(capture(program, (X,)).to_exported_program)


def test_nothing_is_said_where_nothing_is_asserted() -> None:
    assert not said(lambda: capture(flip, (X,)).to_jax())  # which compares, as a call of the program does
    assert not said(lambda: capture(Sums(), (X,)).to_jax())
    with pytest.raises(UnsupportedProgramError, match="JAX traces the call"):
        capture(flip, (X,)).to_stablehlo("nowhere")


LIBRARY = """
import torch

def mask(x):
    if not torch.compiler.is_exporting() and (x > 0).all():
        return x
    return torch.where(x > 0, x, 0)

def stubborn(x):
    return x if (x > 0).all() else -x
"""


def test_the_option_is_named_where_a_library_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "library_that_decides.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    import library_that_decides as library  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "library_that_decides")
    (warning,) = said(lambda: capture(lambda x: library.mask(x), (X,)).to_exported_program())
    assert "try  use capture(..., is_exporting=True)" in str(warning.message)
    assert not said(lambda: capture(lambda x: library.mask(x), (X,), is_exporting=True).to_exported_program())
    (warning,) = said(capture(lambda x: library.stubborn(x), (X,), is_exporting=True).to_exported_program)
    assert "is_exporting" not in str(warning.message)


# State that the first call makes


class Made(nn.Module):
    """Makes ``h`` at its first call."""

    h: Any = None

    def forward(self, *inputs: Tensor) -> Any:
        if self.h is None:
            self.h = torch.zeros(2)
        return self.run(*inputs)

    def run(self, *inputs: Any) -> Any:
        """What a subclass computes, with ``h`` there."""


class Sums(Made):
    def run(self, x: Tensor) -> Any:
        self.h = self.h + x
        return self.h * 2 if x.sum() > 0 else self.h * 3


class SumsNegated(Made):
    def run(self, x: Tensor) -> Any:
        self.h.add_(x)
        if x.sum() < 0:
            return self.h * 3
        return self.h + 1 if not (x > 50).any() else self.h


class DecidesByState(Made):
    def run(self, x: Tensor) -> Any:
        self.h = self.h + x
        return x if self.h.sum() > 0 else -x


class Stays(Made):
    def run(self, x: Tensor) -> Any:
        return self.h + x if (x > 0).all() else x


class StaysAsMade(nn.Module):
    """The first call alone decides what it makes."""

    h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.h is None:
            self.h = x * 2 if x.sum() > 0 else x * 3
        return self.h + x


class Repeats(Made):
    def run(self, x: Tensor, n: Tensor) -> Any:
        for _ in range(int(n)):
            self.h = self.h + x
        return self.h


class Scales(Made):
    def run(self, x: Tensor, n: Tensor) -> Any:
        self.h = self.h + x * int(n)
        return self.h


class Compares(Made):
    def run(self, x: Tensor, n: Tensor) -> Any:
        self.h = self.h + x
        return self.h * n.tolist() if int(n) > 2 else x


class Counts(Made):
    def run(self, x: Tensor, n: Tensor) -> Any:
        count = 0
        while count < int(n):
            self.h, count = self.h + x, count + 1
        return self.h


class CountsStays(Made):
    def run(self, x: Tensor, n: Tensor) -> Any:
        return self.h + x * 2 if n.item() * 2 > 5 else x


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "h" not in self.kept:
            self.kept["h"] = torch.zeros(2)
        self.kept["h"].add_(x)
        return self.kept["h"] if x.max() > 0 else x


OF_ONE = [Sums, SumsNegated, DecidesByState, Stays, InDict]
OF_TWO = [Repeats, Scales, Compares, Counts, CountsStays]
PROGRAMS = [(kind, (X,)) for kind in OF_ONE] + [(kind, (X, N)) for kind in OF_TWO]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("kind", "inputs", "route"),
    [(*program, route) for program in PROGRAMS for route in (MODULE, JAX_UNJITTED)]
    + [(*program, ONNX) for program in PROGRAMS[::2]]
    + [(*program, JAX) for program in PROGRAMS[1::2]],
)
def test_state_of_a_first_call_beside_decisions(kind: Any, inputs: Any, route: Route, tmp_path: Path) -> None:
    eager, run = kind(), route(capture(kind(), inputs), tmp_path)
    for factor in (1, 4, 0.5):
        call = (inputs[0] * factor, *inputs[1:])
        torch.testing.assert_close(run(*call), eager(*call), check_dtype=False)


@pytest.mark.parametrize(("kind", "route"), [(Sums, MODULE), (Sums, JAX_UNJITTED), (Stays, JAX), (InDict, ONNX)])
def test_another_way_is_refused_and_leaves_the_state(kind: Any, route: Route, tmp_path: Path) -> None:
    eager, run = kind(), route(capture(kind(), (X,)), tmp_path)
    for _ in range(2):
        with pytest.raises((DataDependentError, RuntimeError), match="test_asserted_decisions"):
            run(-X)
        torch.testing.assert_close(run(X), eager(X))


@pytest.mark.parametrize("kind", [Sums, Stays])
def test_stablehlo_says_why_it_compares_nothing(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedProgramError, match=r"branches on tensor values\n.*test_asserted(?s:.*)JAX traces the call"
    ):
        capture(kind(), (X,)).to_stablehlo(tmp_path / "program.stablehlo")
    assert not list(tmp_path.iterdir())


class MadeByData(nn.Module):
    h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.h is None:
            self.h = torch.zeros(2) if x.sum() > 0 else torch.ones(2)
        self.h = self.h + x
        return self.h


@pytest.mark.parametrize("route", [MODULE, JAX_UNJITTED])
def test_what_the_first_call_alone_decides_is_asserted_by_nobody(route: Route) -> None:
    with pytest.raises(
        (UnsupportedExportError, UnsupportedProgramError), match=r"first call branches on tensor values where"
    ):
        route(capture(MadeByData(), (X,)))
    model, eager = MadeByData(), MadeByData()
    program = capture(model, (X,))
    torch.testing.assert_close(program(-X), eager(-X))
    run = route(program)  # as its hint says
    for _ in range(2):
        torch.testing.assert_close(run(X), eager(X))


def test_jax_compares_what_the_first_call_alone_decides() -> None:
    run, eager = JAX_UNJITTED(capture(StaysAsMade(), (X,))), StaysAsMade()
    with pytest.raises(DataDependentError, match=r"x\.sum"):
        run(-X)
    for factor in (1, -1):
        torch.testing.assert_close(run(X * factor), eager(X * factor))


def test_symbols_of_an_exported_program_are_no_state() -> None:
    def program(x: Tensor, n: Tensor) -> Tensor:
        number = n.item()
        return x * 2 if number > 2 else x

    again = from_exported_program(capture(program, (X, N)).to_exported_program())
    torch.testing.assert_close(again(X, N), X * 2)


def test_jax_compares_whole_tensors() -> None:
    """`torch.equal`, which `istft` asks of its window, is a branch as well."""
    window = torch.hann_window(16)

    def resynthesized(x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
        return torch.istft(spectrum * 0.5, 16, 4, window=window)

    x, y = torch.randn(2, 64), torch.randn(2, 64)
    step = capture(resynthesized, (x,)).to_jax()
    _, result = step(step.initial_state, y.numpy())
    np.testing.assert_allclose(result, resynthesized(y).numpy(), rtol=1e-4, atol=1e-5)

    branch = capture(lambda x, y: x * 2 if torch.equal(x, y) else y, (x, x.clone())).to_jax()
    np.testing.assert_allclose(branch(branch.initial_state, y.numpy(), y.numpy())[1], 2 * y.numpy())
    with pytest.raises(DataDependentError):
        branch(branch.initial_state, x.numpy(), y.numpy())
