"""One tensor in several places of a program's state: calls follow, or refuse, when the places come apart."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import InputMismatchError, capture

World = tuple[Callable[..., Any], Callable[[], list[Any]], Callable[[], None]]


def in_a_list() -> World:
    tensor = torch.arange(3.0)
    items = [tensor, tensor]

    def step(x: Tensor) -> Tensor:
        items[0] = items[0] * 2
        return items[1] + x

    def replace() -> None:
        items[1] = torch.ones(3)

    return step, lambda: [tensor, *items], replace


def in_two_objects() -> World:
    tensor = torch.ones(3)
    one, other = SimpleNamespace(a=tensor), {"a": tensor}

    def step(x: Tensor) -> Tensor:
        one.a.add_(1)
        other["a"] = other["a"] + 1
        return x.mul(one.a)

    def replace() -> None:
        one.a = torch.zeros(3)

    return step, lambda: [tensor, one.a, other["a"]], replace


def in_two_variables() -> World:
    tensor = other = torch.ones(3)

    def step(x: Tensor) -> Tensor:
        nonlocal other
        other = other * 2 + tensor
        return other * x

    def replace() -> None:
        nonlocal other
        other = torch.zeros(3)

    return step, lambda: [tensor, other], replace


def tied_and_read() -> World:
    module = torch.nn.Module()
    module.one = module.other = torch.nn.Parameter(torch.ones(3))

    def step(x: Tensor) -> Tensor:
        one, other = module.get_parameter("one"), module.get_parameter("other")
        return x * one + other

    def replace() -> None:
        module.other = torch.nn.Parameter(torch.zeros(3))

    return step, lambda: [module.one, module.other], replace


def identities(tensors: list[Tensor]) -> list[int]:
    return [next(n for n, other in enumerate(tensors) if other is tensor) for tensor in tensors]


def assert_alike(mine: list[Tensor], its: list[Tensor]) -> None:
    torch.testing.assert_close(mine, its)
    assert identities(mine) == identities(its)


@pytest.mark.parametrize("make", [in_a_list, in_two_objects, in_two_variables])
def test_calls_follow_places_that_the_program_takes_apart(make: Callable[[], World]) -> None:
    (mine, state, _), (eager, its, _) = make(), make()
    program = capture(mine, (torch.ones(3),))
    for number in range(4):
        x = torch.full((3,), float(number))
        assert_alike([program(x), *state()], [eager(x), *its()])


def test_places_that_the_caller_takes_apart_are_refused() -> None:
    mine, _, replace = tied_and_read()
    program = capture(mine, (torch.ones(3),))
    for _ in range(2):  # the second call takes the short way
        program(torch.ones(3))
    replace()
    with pytest.raises(InputMismatchError, match=r"`module\.other` is no longer the state `module\.one`"):
        program(torch.ones(3))


@pytest.mark.parametrize("make", [in_a_list, in_two_objects, in_two_variables, tied_and_read])
def test_places_that_the_caller_takes_apart_are_captured(make: Callable[[], World]) -> None:
    (mine, state, replace), (eager, its, replaces) = make(), make()
    program = capture(mine, (torch.ones(3),), on_guard_failure="recapture")
    for number in range(4):
        if number == 2:
            replace(), replaces()
        x = torch.full((3,), float(number))
        assert_alike([program(x), *state()], [eager(x), *its()])
