"""Comparisons of data-dependent numbers, as numbers: equal to eager's in value and in type."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import UnsupportedProgramError, capture

ONES = torch.ones(3)

ONE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": complex,
    "an index of a list": lambda truth: [10, 20][truth],
    "a slice of a list": lambda truth: [1, 2, 3][truth:],
    "the larger": lambda truth: max(truth, False),
    "negative": operator.neg,
    "inverted": operator.invert,
    "absolute": abs,
    "an exponent": lambda truth: 2**truth,
    "an exponent of a negative": lambda truth: (-2) ** truth,
    "rounded": round,
    "differs": lambda truth: truth ^ True,
    "bits of numbers": lambda truth: (truth & 3, 3 & truth, truth | 2),
    "compared": lambda truth: (truth > 0, truth > 0.5, truth <= 1),
    "sorted": lambda truth: sorted([truth, False]),
    "a tensor": torch.tensor,
    "a tensor of numbers": lambda truth: torch.tensor([truth, 2]),
    "a tensor of truths": lambda truth: torch.tensor([truth, True]),
    "a mask": lambda truth: torch.arange(3)[truth],
    "a slice of a tensor": lambda truth: torch.arange(3)[truth:],
    "parts": lambda truth: (truth.real, truth.imag, truth.numerator, truth.denominator, truth.bit_length()),
    "with complex numbers": lambda truth: truth * 1j,
    "many times": lambda truth: "a" * truth,
    "modulo": lambda truth: pow(truth, 2, 5),
    "a sum": lambda truth: sum([truth, truth, 2.5]),
}
OPERATIONS = ("add", "sub", "mul", "pow", "and_", "or_", "xor", "lt", "ge", "eq", "ne")
_WHERE: dict[str, Callable[[Tensor], Any]] = {
    "of numbers": lambda x: x.sum().item() > 1,
    "of tensors": lambda x: (x.sum() > 1).item(),
}


def looks(value: Any) -> Any:
    """What two results are compared by."""
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else repr(value)


def follows(run: Callable[[Tensor], Any]) -> int:
    """Compare a function with eager in calls whose data differ; how many variants it has."""
    program = capture(run, (torch.ones(3),))
    for x in (ONES, -ONES, torch.tensor([-1.0, 5.0, 1.0])):
        assert looks(program(x)) == looks(run(x))
    return len(program.variants)


@pytest.mark.parametrize("of", _WHERE)
@pytest.mark.parametrize("name", ONE)
def test_a_truth_is_a_number(name: str, of: str) -> None:
    run, truth_of = ONE[name], _WHERE[of]
    assert follows(lambda x: run(truth_of(x))) < 3


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("other", [True, 3, 2.5])
def test_a_truth_beside_a_number(name: str, other: Any) -> None:
    operation = getattr(operator, name)
    if isinstance(other, float) and name in ("and_", "or_", "xor"):
        return
    follows(lambda x: operation(x.sum().item() > 1, other))
    follows(lambda x: operation(other, x.sum().item() > 1))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("of", _WHERE)
def test_two_truths(name: str, of: str) -> None:
    operation, truth_of = getattr(operator, name), _WHERE[of]
    follows(lambda x: operation(truth_of(x), x[0].item() > 0))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("and_", "or_", "xor", "pow")])
def test_numbers_of_data_beside_a_truth(name: str) -> None:
    operation = getattr(operator, name)
    follows(lambda x: operation(x.sum().item(), x[0].item() > 0))
    follows(lambda x: operation(x[0].item() > 0, x.long().sum().item()))


def test_counting_truths_decides_nothing() -> None:
    assert follows(lambda x: sum(one.item() > 0 for one in x) / 3) == 1


@pytest.mark.parametrize("choose", [min, max])
def test_the_least_of_one_number(choose: Callable[..., Any]) -> None:
    assert follows(lambda x: choose([x.sum().item()]) + 1) == 1
    assert follows(lambda x: choose((x.sum().item(),))) == 1
    with pytest.raises(UnsupportedProgramError, match="takes only plain Python numbers"):
        capture(lambda x: choose(x.sum().item()), (ONES,))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum(0, keepdim=x.any().item()),
        lambda x: x.sum(0, keepdim=0 < x.sum().item() < 5),
        lambda x: x.sum(0, keepdim=(x.sum().item() != 1) & (x.max().item() == 1)),
        lambda x: x.sum(0, keepdim=x.mean().item().is_integer() and math.isfinite(x.sum().item())),
        lambda x: x.sort(descending=x.sum().item() > 1)[0],
        lambda x: torch.nn.functional.dropout(x, 0.5, x.sum().item() > 100),
    ],
)
def test_options_of_operators(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Options must be plain bools: a comparison that becomes one is a branch."""
    inputs = [torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0]), torch.tensor([4.0, 3.0])]
    program = capture(run, (inputs[0],))
    for x in inputs:
        assert torch.equal(program(x), run(x))
        assert program(x).shape == run(x).shape


def _catching(x: torch.Tensor) -> torch.Tensor:
    is_large = x.sum().item() > 1
    try:
        return x.sum(0, keepdim=is_large)
    except TypeError:
        return x * 100


def _suppressing(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        return torch.zeros(2).sum(0, keepdim=math.isnan(x.sum().item()))
    return x * 100


@pytest.mark.parametrize("run", [_catching, _suppressing])
def test_errors_of_options_that_a_program_catches(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = capture(run, (ONES,))
    for x in (ONES, ONES * 0, ONES * torch.nan):
        torch.testing.assert_close(program(x), run(x), equal_nan=True)


def test_what_is_printed_beside_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        total = float(x.sum())
        print(total, int(x.max()), f"{total:.1f}")
        return x.sum(0, keepdim=total > 1)

    inputs = [torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.5])]
    program = capture(run, (inputs[0],))
    assert capsys.readouterr().out == ""
    for x in inputs * 2:
        program(x)
        ours = capsys.readouterr().out
        run(x)
        assert ours == capsys.readouterr().out


def test_a_comparison_of_sizes_beside_an_option() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return x.sum(0, keepdim=x.sum().item() > 1), x.shape[0] > 5

    program = capture(run, (torch.ones(3, 2),), dynamic_shapes={"x": {0: "batch"}})
    for size in (3, 4, 8):
        x = torch.ones(size, 2)
        (ours, is_large), (eager, expected) = program(x), run(x)
        assert torch.equal(ours, eager) and is_large is expected
