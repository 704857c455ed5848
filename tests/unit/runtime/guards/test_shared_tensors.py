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
    with pytest.raises(InputMismatchError, match=r"`module\.other` and the state `module\.one` were the same tensor"):
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


def an_attribute_that_is_no_input() -> World:
    owner = SimpleNamespace(snap=None)

    def step(x: Tensor) -> Tensor:
        if owner.snap is None:
            owner.snap = x.clone()
        return x * 2

    return step, lambda: [owner.snap], lambda: setattr(owner, "snap", None)


def an_item_that_is_no_input() -> World:
    items: list[Any] = [torch.ones(3)]

    def step(x: Tensor) -> Tensor:
        return x * (2 if isinstance(items[0], Tensor) else 3)

    return step, list, lambda: items.__setitem__(0, 5)


def a_variable_that_is_no_input() -> World:
    mask: Any = torch.ones(3)

    def step(x: Tensor) -> Tensor:
        return x * (2 if mask is None else 3)

    def replace() -> None:
        nonlocal mask
        mask = None

    return step, list, replace


def a_class_of_what_is_no_input() -> World:
    owner = SimpleNamespace(t=torch.ones(3))

    def step(x: Tensor) -> Tensor:
        return x * (2 if isinstance(owner.t, torch.nn.Parameter) else 3)

    return step, list, lambda: setattr(owner, "t", torch.nn.Parameter(torch.ones(3)))


def a_class_of_an_input() -> World:
    owner = SimpleNamespace(t=torch.ones(3))

    def step(x: Tensor) -> Tensor:
        y: Tensor = x * owner.t.detach() * (2 if isinstance(owner.t, torch.nn.Parameter) else 3)
        return y

    made = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    return step, list, lambda: setattr(owner, "t", made)


def one_that_is_another() -> World:
    owner = SimpleNamespace(a=torch.ones(3), b=[torch.zeros(3), torch.ones(3)])

    def step(x: Tensor) -> Tensor:
        return x * (2 if owner.a is owner.b[0] else 3) * len({id(owner.a), *map(id, owner.b)})

    return step, list, lambda: setattr(owner, "a", owner.b[0])


def one_that_is_a_parameter() -> World:
    module, frozen = torch.nn.Linear(3, 3), [torch.ones(3)]

    def step(x: Tensor) -> Tensor:
        return x * sum(2 for one in module.parameters() if any(one is other for other in frozen))

    return step, list, lambda: frozen.__setitem__(0, module.bias)


def one_that_is_a_key() -> World:
    key, owner = torch.zeros(3), SimpleNamespace(t=torch.zeros(3))
    known = {key: 1}

    def step(x: Tensor) -> Tensor:
        return x * (2 if owner.t in known else 3)

    return step, list, lambda: setattr(owner, "t", key)


def one_that_is_in_a_set() -> World:
    item, owner = torch.zeros(3), SimpleNamespace(t=torch.zeros(3))
    known = {item}

    def step(x: Tensor) -> Tensor:
        return x * (2 if owner.t in known else 3)

    return step, list, lambda: setattr(owner, "t", item)


def hooks_of_what_is_no_input() -> World:
    owner = SimpleNamespace(t=torch.zeros(3))

    def step(x: Tensor) -> Tensor:
        return x * (2 if owner.t._backward_hooks else 3)

    def replace() -> None:
        owner.t = torch.zeros(3, requires_grad=True)
        owner.t.register_hook(lambda gradient: gradient)

    return step, list, replace


ASKED_FOR = [
    *(an_attribute_that_is_no_input, an_item_that_is_no_input, a_variable_that_is_no_input),
    *(a_class_of_what_is_no_input, a_class_of_an_input, one_that_is_another, one_that_is_a_parameter),
    *(one_that_is_a_key, one_that_is_in_a_set, hooks_of_what_is_no_input),
]


@pytest.mark.parametrize("make", ASKED_FOR)
def test_tensors_that_the_graph_does_not_use_are_asked_for(make: Callable[[], World]) -> None:
    (mine, state, replace), (eager, its, replaces) = make(), make()
    program = capture(mine, (torch.ones(3),), on_guard_failure="recapture")
    for number in range(5):
        if number == 3:
            replace(), replaces()
        x = torch.full((3,), float(number))
        torch.testing.assert_close([program(x), *state()], [eager(x), *its()])


def test_a_tensor_that_is_not_asked_for_may_go() -> None:
    owner = SimpleNamespace(t=torch.ones(3))
    program = capture(lambda x: x + (0 if owner is None else 1), (torch.ones(3),))
    for value in (torch.ones(3), None, torch.nn.Parameter(torch.ones(3)), torch.ones(2)):
        owner.t = value
        torch.testing.assert_close(program(torch.ones(3)), torch.full((3,), 2.0))


def test_what_the_program_itself_takes_away_is_followed() -> None:
    mine, eager = SimpleNamespace(t=None), SimpleNamespace(t=None)

    def step(owner: Any, x: Tensor) -> Tensor:
        owner.t = None if owner.t is not None else x.clone()
        return x * (2 if owner.t is None else 3)

    program = capture(lambda x: step(mine, x), (torch.ones(1),))
    for number in range(5):
        x = torch.full((1,), float(number))
        torch.testing.assert_close(program(x), step(eager, x))
        torch.testing.assert_close(mine.t, eager.t)


def test_a_log_of_tensors_may_be_emptied() -> None:
    log: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        log.append(x.sum())
        return x * 2

    program = capture(step, (torch.ones(3),))
    for _ in range(3):
        program(torch.ones(3))
        program(torch.ones(3))
        log.clear()
    program(torch.ones(3))
    assert len(log) == 1
