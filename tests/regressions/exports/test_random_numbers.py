"""Random numbers of exported programs: each call draws its own, and generators of the program are refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import (
    UnsupportedExportError,
    capture,
)
from tests.support.routes import ONNX, SAVED, STABLEHLO


def test_generators_of_a_program_are_refused() -> None:
    """An ExportedProgram has no place for them; torch's verifier raised."""
    own = torch.Generator()

    def reached(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=own)

    def made(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=torch.Generator().manual_seed(3))

    for program in (reached, made):
        with pytest.raises(UnsupportedExportError, match=r"(?s)its own generator.*test_random_numbers.*try  draw"):
            capture(program, (torch.ones(3),)).to_exported_program()


def test_random_numbers_are_saved_and_loaded() -> None:
    """Torch loads `uniform` only with its argument `from`, which a keyword names."""

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.zeros(3))

        def forward(self) -> Any:
            return self.noise.uniform_(), self.noise.new_empty(2).uniform_(2, 3)  # type: ignore[operator]

    eager, file = Noise(), io.BytesIO()
    torch.export.save(capture(Noise(), ()).to_exported_program(), file)
    file.seek(0)
    module = torch.export.load(file).module()
    for _ in range(2):
        torch.manual_seed(0)
        expected = [one.tolist() for one in eager()]
        torch.manual_seed(0)
        assert [one.tolist() for one in module()] == expected


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(5, generator=None).to(x),
    "randn": lambda x: torch.randn(5, generator=None).to(x),
    "rand_like": lambda x: torch.rand_like(x, generator=None),
    "randint": lambda x: torch.randint(3, 8, (5,), generator=None),
    "randperm": lambda x: torch.randperm(5, generator=None),
    "normal": lambda x: torch.normal(x, 1.0, generator=None),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_without_a_generator_that_may_have_one(name: str, tmp_path: Path) -> None:
    expected = DRAWS[name](torch.zeros(5))
    program = capture(DRAWS[name], (torch.zeros(5),))
    for run in (SAVED(program, tmp_path), ONNX(program, tmp_path), STABLEHLO(program, tmp_path)):
        first, second = (torch.as_tensor(run(torch.zeros(5))) for _ in range(2))
        assert first.shape == expected.shape and first.dtype.is_floating_point == expected.dtype.is_floating_point
        assert name == "randperm" or not torch.equal(first, second)
        assert name != "randperm" or sorted(first.tolist()) == [0, 1, 2, 3, 4]
