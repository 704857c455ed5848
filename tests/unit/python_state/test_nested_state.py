"""Containers and objects in tuples, and tuples in these, which a program or its caller replaces: calls equal eager."""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import InputMismatchError

X = torch.ones(3)
MODES = ("raise", "recapture")
Pair = collections.namedtuple("Pair", "a b")

# What holds two values: how it is made, and how they are read.
KINDS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "list": (lambda a, b: [a, b], lambda s: (s[0], s[1])),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda s: (s["a"], s["b"])),
    "tuple": (lambda a, b: (a, b), lambda s: (s[0], s[1])),
    "named": (Pair, lambda s: (s.a, s.b)),
    "object": (lambda a, b: SimpleNamespace(a=a, b=b), lambda s: (s.a, s.b)),
}
LEAVES: dict[str, Callable[[int], bool]] = {  # which leaves are tensors; others are numbers
    "tensors": lambda place: True,
    "numbers": lambda place: False,
    "both": lambda place: place % 2 == 0,
}


def made(kinds: Sequence[str], leaves: Iterator[Any]) -> Any:
    """A nest of such containers, the outermost first."""
    if not kinds:
        return next(leaves)
    return KINDS[kinds[0]][0](made(kinds[1:], leaves), made(kinds[1:], leaves))


def leaves_of(kinds: Sequence[str], value: Any) -> list[Any]:
    if not kinds:
        return [value]
    return [leaf for item in KINDS[kinds[0]][1](value) for leaf in leaves_of(kinds[1:], item)]


def begun(kinds: Sequence[str], leaves: str, at: int = 0) -> Any:
    tensors = LEAVES[leaves]
    values = range(at, at + 2 ** len(kinds))
    return made(kinds, (torch.full((3,), float(one)) if tensors(one - at) else one for one in values))


def step(world: Any, kinds: Sequence[str], x: Tensor) -> Any:
    leaves = leaves_of(kinds, world.h)
    total = x * 0 + sum(leaf * (place + 1) for place, leaf in enumerate(leaves))
    world.h = made(kinds, iter([leaf + x if isinstance(leaf, Tensor) else leaf + 1 for leaf in leaves]))
    return total


def replace_inside(world: Any, kinds: Sequence[str], leaves: str) -> None:
    """Replace the first value in the outermost container, where that is no tuple."""
    inner = leaves_of(kinds[:1], begun(kinds, leaves, 70))[0]
    if isinstance(world.h, SimpleNamespace):
        world.h.a = inner
    elif not isinstance(world.h, tuple):
        world.h["a" if isinstance(world.h, dict) else 0] = inner


def check_nest(kinds: Sequence[str], leaves: str, mode: str) -> None:
    """The program replaces all in each call; so does the caller before two calls, and a part before another one."""
    ours, theirs = SimpleNamespace(h=begun(kinds, leaves)), SimpleNamespace(h=begun(kinds, leaves))
    program = capture(lambda x: step(ours, kinds, x), (X,), on_guard_failure=mode)
    for number in range(7):
        for world in (ours, theirs):
            if number in (2, 5):
                world.h = begun(kinds, leaves, 10 * number)
            elif number == 4:
                replace_inside(world, kinds, leaves)
        assert torch.equal(program(X + number), step(theirs, kinds, X + number))
        assert_alike(ours.h, theirs.h)
    assert len(program._specializations.kept) <= 2  # numbers are inputs once they have changed


def assert_alike(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, SimpleNamespace):
        assert_alike(vars(ours), vars(theirs))
    elif isinstance(ours, (list, tuple, dict, collections.deque)):
        assert list(ours) == list(theirs) if isinstance(ours, dict) else len(ours) == len(theirs)
        items = (ours.values(), theirs.values()) if isinstance(ours, dict) else (ours, theirs)
        for one, other in zip(*items, strict=True):
            assert_alike(one, other)
    else:
        assert ours == theirs


@pytest.mark.every(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("leaves", [pytest.param("tensors", marks=pytest.mark.full), "numbers", "both"])
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids="-".join)
def test_two_levels_are_what_they_are_in_eager(kinds: Sequence[str], leaves: str, mode: str) -> None:
    check_nest(kinds, leaves, mode)


@pytest.mark.full
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=3)), ids="-".join)
def test_three_levels_are_what_they_are_in_eager(kinds: Sequence[str]) -> None:
    for leaves, mode in itertools.product(("tensors", "both"), MODES):
        check_nest(kinds, leaves, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_caller_is_followed_after_the_program_has_replaced_a_list_of_tuples(mode: str) -> None:
    world = SimpleNamespace(h=[(torch.zeros(3),)])

    def run(x: Tensor) -> Any:
        world.h = [(world.h[0][0] + x,)]
        return world.h[0][0] * 1

    program = capture(run, (X,), on_guard_failure=mode)
    assert [program(X)[0].item() for _ in range(3)] == [1, 2, 3]
    world.h = [(torch.full((3,), 7.0),)]
    assert program(X)[0].item() == 8


class StackedCells(torch.nn.Module):
    """A recurrent model that keeps a pair of tensors for each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = torch.nn.ModuleList(torch.nn.LSTMCell(3, 3) for _ in range(2))
        self.state = [(torch.zeros(2, 3), torch.zeros(2, 3)) for _ in self.cells]

    def forward(self, x: Tensor) -> Tensor:
        state = []
        for cell, pair in zip(self.cells, self.state, strict=True):
            x, memory = cell(x, pair)
            state.append((x, memory))
        self.state = state
        return x * 2


@pytest.mark.parametrize("mode", MODES)
def test_states_of_stacked_cells_go_from_call_to_call(mode: str) -> None:
    ours, theirs, x = StackedCells(), StackedCells(), torch.ones(2, 3)
    with torch.no_grad():
        program = capture(ours, (x,), on_guard_failure=mode)
        for number in range(5):
            assert torch.equal(program(x + number), theirs(x + number))
            assert_alike(ours.state, theirs.state)
    assert len(program._specializations.kept) == 1


def test_a_variable_that_holds_a_cache_of_pairs_may_grow() -> None:
    def made() -> Callable[[Tensor], Tensor]:
        cache = [(torch.zeros(1, 3), torch.zeros(1, 3)) for _ in range(2)]

        def decode(x: Tensor) -> Tensor:
            nonlocal cache
            cache = [(torch.cat([k, x]), torch.cat([v, x * 2])) for k, v in cache]
            return sum((k.T @ v for k, v in cache), torch.zeros(3, 3))

        return decode

    ours, theirs, x = made(), made(), torch.ones(1, 3)
    program = capture(ours, (x,), on_guard_failure="recapture")
    for number in range(5):
        assert torch.equal(program(x + number), theirs(x + number))


def test_numbers_in_a_dict_in_a_tuple_become_inputs() -> None:
    world = SimpleNamespace(n=(0, {"a": 1}))

    def count(x: Tensor) -> Tensor:
        world.n = (0, {"a": world.n[1]["a"] + 1})
        return x * 1

    program = capture(count, (X,), on_guard_failure="recapture")
    for number in range(4):
        program(X)
        assert world.n == (0, {"a": number + 2})


def test_numbers_that_the_program_changes_are_followed_beside_names() -> None:
    world = SimpleNamespace(log=[("loss", 0)], weights={"w": (torch.zeros(3), 0)})

    def count(x: Tensor) -> Any:
        (name, number), (mean, steps) = world.log[0], world.weights["w"]
        world.log, world.weights = [(name, number + 1)], {"w": (mean + x, steps + 1)}
        return mean * number + steps

    program = capture(count, (X,))
    for number in range(4):
        assert torch.equal(program(X), X * number * number + number)
        assert world.log == [("loss", number + 1)] and world.weights["w"][1] == number + 1
    world.log = [("other", 1)]
    program(X)
    assert world.log == [("other", 2)]


def test_what_the_program_does_not_replace_is_refused_where_it_changes() -> None:
    world = SimpleNamespace(how=({"name": "add"},), h=[(torch.zeros(3), 1)])

    def run(x: Tensor) -> Any:
        world.h = [(world.h[0][0] + x, 1)]
        return x + world.h[0][0] if world.how[0]["name"] == "add" else x * world.h[0][0]

    program = capture(run, (X,))
    assert [program(X)[0].item() for _ in range(2)] == [2, 3]
    world.how = ({"name": "mul"},)
    with pytest.raises(InputMismatchError):
        program(X)
    assert torch.equal(world.h[0][0], X * 2)


class Adding:
    """An object that can be called."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def __call__(self, x: Tensor) -> Tensor:
        return self.h + x


def test_an_object_in_a_tuple_may_be_one_that_can_be_called() -> None:
    world = SimpleNamespace(h=(Adding(torch.zeros(3)), "name"))

    def run(x: Tensor) -> Any:
        found = world.h[0](x)
        world.h = (Adding(found), "name")
        return found * 1

    program = capture(run, (X,))
    assert [program(X)[0].item() for _ in range(4)] == [1, 2, 3, 4]
    assert len(program._specializations.kept) == 1


def test_a_list_that_leaves_with_its_tuple_is_not_changed_any_more() -> None:
    def run(world: Any, x: Tensor) -> Tensor:
        world.h[0].append(x * 1)
        world.h = ([world.h[0][-1] + world.h[0][0]],)
        return x * 2

    ours, theirs = (SimpleNamespace(h=([torch.ones(3)],)) for _ in range(2))
    program = capture(lambda x: run(ours, x), (X,))
    for number in range(5):
        assert torch.equal(program(X + number), run(theirs, X + number))
        assert_alike(ours, theirs)
    assert len(program._specializations.kept) == 1


def gives_back(world: Any, x: Tensor) -> Any:
    old = world.h
    world.h = ([old[0][0] + x],)
    return old


def gives(world: Any, x: Tensor) -> Any:
    return world.h


def keeps_twice(world: Any, x: Tensor) -> Tensor:
    world.other = [(x * 2, world.h)]
    world.n = (world.h, 1)
    return x * 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", [gives_back, gives, keeps_twice])
def test_tuples_that_are_given_hold_the_lists_that_are_there(run: types.FunctionType, mode: str) -> None:
    ours, theirs = (SimpleNamespace(h=([torch.ones(3)],), n=0, other=None) for _ in range(2))
    program = capture(lambda x: run(ours, x), (X,), on_guard_failure=mode)
    for number in range(6):
        if number in (2, 4):
            ours.h, theirs.h = (([torch.full((3,), 5.0 + number)],) for _ in range(2))
        got, expected = program(X + number), run(theirs, X + number)
        assert_alike(got, expected)
        assert_alike(ours, theirs)
        if run is gives:
            assert got[0] is ours.h[0]


def test_tuples_in_tuples_may_be_deep() -> None:
    def run(world: Any, x: Tensor) -> Any:
        world.h = (((((([world.h[0][0][0][0][0][0][0] + x],),),),),), 1)
        return x + world.h[1]

    ours, theirs = (SimpleNamespace(h=(((((([torch.ones(3)],),),),),), 1)) for _ in range(2))
    program = capture(lambda x: run(ours, x), (X,))
    for number in range(4):
        assert torch.equal(program(X + number), run(theirs, X + number))
        assert_alike(ours, theirs)
    assert len(program._specializations.kept) == 1


def appends(world: Any, x: Tensor) -> Tensor:
    world.h = [*world.h, (x * 1,)]
    return x + len(world.h)


def reads(world: Any, x: Tensor) -> Any:
    total = x + sum(item[0] for item in world.h)
    world.h = [*world.h[-2:], (x * 1,)]
    return total


def ranks(world: Any, x: Tensor) -> Tensor:
    world.n += 1
    world.h = sorted([*world.h, (world.n % 3, x * 1)], key=lambda item: int(item[0]))[:2]
    return x * 2


def names(world: Any, x: Tensor) -> Tensor:
    world.h = [*world.h[-2:], Pair(x * 1, (x * 2, len(world.h)))]
    return x * 1


def keeps_elsewhere(world: Any, x: Tensor) -> Tensor:
    world.other = world.h[0] if world.h else None
    world.h = [*world.h[-1:], (x * 1, {"a": x * 2})]
    return x * 1


def in_a_tuple(world: Any, x: Tensor) -> Any:
    world.h = (*world.h[-2:], (x * 1,))
    return world.h


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", [appends, reads, ranks, names, keeps_elsewhere, in_a_tuple])
def test_tuples_that_stay_hold_the_tensors_of_the_call(run: types.FunctionType, mode: str) -> None:
    ours, theirs = (SimpleNamespace(h=[], n=0, other=None) for _ in range(2))
    program = capture(lambda x: run(ours, x), (X,), on_guard_failure=mode)
    for number in range(6):
        assert_alike(program(X + number), run(theirs, X + number))
        assert_alike(ours, theirs)


def test_tuples_that_stay_are_taken_from_a_full_window() -> None:
    world = SimpleNamespace(h=[(X * number,) for number in range(3)])
    program = capture(lambda x: reads(world, x), (X,))
    assert [program(X)[0].item() for _ in range(3)] == [4, 5, 5]
    assert_alike(world.h, [(X,)] * 3)
