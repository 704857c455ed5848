"""Numbers and tensors of a program, handed to what knows nothing of symbols: NumPy, json, `id`, `match`."""

import functools
import json
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from functionalize import UnsupportedProgramError, capture
from functionalize.errors import InputMismatchError


def _calls(f: Any, inputs: list[torch.Tensor]) -> list[Any]:
    program = capture(f, (inputs[0],), on_guard_failure="recapture")
    return [program(x) for x in inputs]


_INPUTS = [torch.tensor([0.5, 2.0]), torch.tensor([4.0, 8.0]), torch.tensor([-1.0, 0.0])]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: np.array([x.sum().item(), x.mean().item()]),
        lambda x: np.array(x.tolist()),
        lambda x: np.ones((2, 3)) * x.sum().item(),
        lambda x: {"counts": np.array([[(x > 0).sum().item()], [3]])},
    ],
    ids=["array", "tolist", "multiplied", "counts"],
)
def test_arrays_of_data_dependent_numbers_have_eagers_dtype(f: Any) -> None:
    for ours, eager in zip(_calls(f, _INPUTS), map(f, _INPUTS), strict=True):
        one, other = (found["counts"] if isinstance(found, dict) else found for found in (ours, eager))
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["mean", "fmean", "median", "pstdev", "stdev", "variance"])
@pytest.mark.parametrize("kind", [float, int])
def test_statistics_of_data_dependent_numbers(name: str, kind: type) -> None:
    function, dtype = getattr(statistics, name), torch.tensor(kind()).dtype

    def f(x: torch.Tensor) -> Any:
        return function([one.item() for one in x.to(dtype)])

    assert [*map(repr, _calls(f, _INPUTS))] == [*map(repr, map(f, _INPUTS))]


def test_a_number_of_numpys_is_given_as_it_is() -> None:
    def f(x: torch.Tensor) -> Any:
        return x * 2, np.float64(x.mean().item()) * 2

    for (_, ours), (_, eager) in zip(_calls(f, _INPUTS), map(f, _INPUTS), strict=True):
        assert type(ours) is type(eager)
        assert ours == eager


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.arange(2) * np.floor(x.sum().item()),
        lambda x: torch.arange(2) * np.clip(x.sum().item(), 3, 5),
        lambda x: torch.arange(2) * np.round(x.sum().item(), decimals=1),
        lambda x: x * float(np.exp(x.sum().item())),
        lambda x: x * np.sqrt(x.nonzero().shape[0]),
        lambda x: x.new_zeros(int(np.ceil(x.nonzero().shape[0] / 2))),
        lambda x: x * (np.float64(2) / x.sum().item()),
        lambda x: x * float((np.ones(2) * x.sum().item()).sum()),
    ],
    ids=["floor", "clip", "round", "exp", "sqrt", "a size", "divided", "array"],
)
def test_functions_of_numpys_of_data_dependent_numbers(f: Any) -> None:
    program = capture(f, (_INPUTS[0],))
    for x in _INPUTS:
        assert torch.equal(program(x), f(x))
        assert program(x).dtype == f(x).dtype
    assert len(program.variants) == 1 or f(_INPUTS[0]).numel() != f(_INPUTS[2]).numel()


def test_a_number_may_be_none_to_numpy() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            bad = np.isnan(x.sum().item()) or not np.isfinite(x.max().item())
        except TypeError:
            bad = True
        return x * 0 if bad else x * 2

    program = capture(f, (_INPUTS[0],))
    for x in (*_INPUTS, torch.tensor([torch.nan, 1.0]), torch.tensor([torch.inf, 1.0])):
        assert torch.equal(program(x).isnan(), f(x).isnan())
        assert torch.equal(program(x).nan_to_num(), f(x).nan_to_num())


def test_a_number_that_a_library_does_not_take_is_told_of() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"takes only plain Python numbers(.|\n)*float\(\)"):
        capture(lambda x: json.dumps({"loss": x.mean().item()}), (torch.ones(3),))
    with pytest.raises(UnsupportedProgramError, match=r"a NumPy array of data-dependent numbers(.|\n)*torch.tensor"):
        capture(lambda x: torch.from_numpy(np.ones(3) * x.mean().item()), (torch.ones(3),))
    assert _calls(lambda x: json.dumps({"loss": float(x.mean().item())}), _INPUTS)[1] == '{"loss": 6.0}'


def test_identities_are_those_of_the_tensors_themselves() -> None:
    """Groups of parameters are told by `id(p)`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    head = {id(p): 1.0 for p in model[1].parameters()}

    def step(x: torch.Tensor) -> int:
        model.zero_grad()
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(p.grad * head.get(id(p), 0.0))
        return sum(id(p) in head for p in model.parameters())

    before = [p.detach().clone() for p in model.parameters()]
    program = capture(step, (torch.ones(1, 2),))
    assert program(torch.ones(1, 2)) == 2
    assert [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    model[1].bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(InputMismatchError, match="identity"):
        program(torch.ones(1, 2))


class _Counter:
    count: Any = 0


@functools.singledispatch
def _scale(number: Any) -> int:
    return 100


@_scale.register
def _(number: int) -> int:
    return 2


def test_classes_of_numbers_that_change_are_pythons() -> None:
    counter = _Counter()

    def matched(x: torch.Tensor) -> torch.Tensor:
        counter.count += 1
        match counter.count:
            case int():
                return x * 2
            case _:
                return x * 3

    def dispatched(x: torch.Tensor) -> torch.Tensor:
        counter.count += 1
        return x * _scale(counter.count)

    for f in (matched, dispatched):
        counter.count = 0
        assert [found[0].item() for found in _calls(f, [torch.ones(1)] * 4)] == [2, 2, 2, 2]


def test_the_class_of_classes_is_pythons() -> None:
    kept: Any = SimpleNamespace(kind=None, of=None)
    made = type("Made", (), {})

    def f(x: torch.Tensor) -> Any:
        kept.kind, kept.of = type, type(made)
        return x * len(type(made).__name__), [type]

    program = capture(f, (torch.ones(1),))
    assert kept.kind is None
    result, kinds = program(torch.ones(1))
    assert result.item() == len("type")
    assert [kept.kind, kept.of, *kinds] == [type] * 3
