"""Objects with tensors that a program, or its caller, puts in the place of others: followed, not captured again."""

from __future__ import annotations

import collections
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functionalize import capture
from functionalize.errors import InputMismatchError
from functionalize.runtime.calls.program import CapturedProgram

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
Pair = collections.namedtuple("Pair", "h g")


@dataclasses.dataclass
class Record:
    h: Tensor
    g: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: Tensor
    g: Tensor


class Slotted:
    __slots__ = ("g", "h")

    def __init__(self, h: Tensor, g: Tensor) -> None:
        self.h, self.g = h, g


# What holds two tensors: how it is made, and how they are read.
KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "list": (lambda h, g: [h, g], lambda s: (s[0], s[1])),
    "tuple": (lambda h, g: (h, g), lambda s: s),
    "named tuple": (Pair, lambda s: (s.h, s.g)),
    "dict": (lambda h, g: {"h": h, "g": g}, lambda s: (s["h"], s["g"])),
    "ordered dict": (lambda h, g: collections.OrderedDict(h=h, g=g), lambda s: (s["h"], s["g"])),
    "deque": (lambda h, g: collections.deque([h, g]), lambda s: (s[0], s[1])),
    "dataclass": (Record, lambda s: (s.h, s.g)),
    "frozen": (Frozen, lambda s: (s.h, s.g)),
    "slots": (Slotted, lambda s: (s.h, s.g)),
    "nested": (lambda h, g: {"a": [h], "b": (Record(g, g + 1),)}, lambda s: (s["a"][0], s["b"][0].h + s["b"][0].g)),
    "layers": (lambda h, g: [[h, g], [g * 2, h * 2]], lambda s: (s[0][0] + s[1][0], s[0][1] + s[1][1])),
}


class Recurrent(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.read = KINDS[kind]
        self.cell = torch.nn.Linear(3, 3)
        self.hidden = self.make(torch.zeros(2, 3), torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        h, g = self.read(self.hidden)
        h = torch.tanh(self.cell(x) + h)
        self.hidden = self.make(h, g * 0.5 + h)
        return h * 2


def captures_of(program: CapturedProgram) -> list[int]:
    """A list that gets an entry for each further capture."""
    again, made = program._specializations.recapture, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(len(made))
        return again(*args, **kwargs)

    program._specializations.recapture = counted
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [False, True])
def test_what_a_program_replaces(kind: str, train: bool) -> None:
    ours, theirs = Recurrent(kind), Recurrent(kind)
    with torch.set_grad_enabled(train):
        program = capture(ours, (X,), on_guard_failure="recapture")
        made = captures_of(program)
        for step in range(6):
            got, expected = program(X + step), theirs(X + step)
            assert torch.equal(got, expected)
            assert type(ours.hidden) is type(theirs.hidden)
            for one, other in zip(ours.read(ours.hidden), theirs.read(theirs.hidden), strict=True):
                assert torch.equal(one, other)
                assert one.requires_grad == other.requires_grad
        if train:
            for one in (got, expected):
                one.sum().backward()
            torch.testing.assert_close(ours.cell.weight.grad, theirs.cell.weight.grad, rtol=0, atol=0)
    # The first call wants gradients; it finds tensors that need none, and leaves such that do: another kind of state.
    assert len(made) <= 2 * train


class Step(NamedTuple):
    h: Tensor
    steps: int
    scale: tuple[float, Tensor]


def test_numbers_in_tuples() -> None:
    """A state as a named tuple, with numbers that each call changes."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = Step(torch.zeros(3), 0, (1.0, torch.ones(3)))
            self.place = (1, 2)

        def forward(self, x: Tensor) -> Tensor:
            h, count, (scale, g) = self.state
            h = torch.tanh(h + x * scale) + self.place[0] * g
            self.state = Step(h, count + 1, (scale * 0.5, g - 1))
            self.place = (self.place[1], self.place[0] + count)
            return h + count

    ours, theirs = Counts(), Counts()
    program = capture(ours, (X[0],), on_guard_failure="recapture")
    made = captures_of(program)
    for step in range(7):
        if step == 5:
            ours.state, theirs.state = (Step(torch.ones(3), 9, (4.0, torch.ones(3))) for _ in range(2))
        assert torch.equal(program(X[0] + step), theirs(X[0] + step))
        held = [torch.utils._pytree.tree_leaves((one.state, one.place)) for one in (ours, theirs)]
        for one, other in zip(*held, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert type(ours.state) is Step
    assert len(made) <= 2
    ours.state = theirs.state = Step(torch.ones(3), 2.5, (4.0, torch.ones(3)))  # type: ignore[arg-type]
    assert torch.equal(program(X[0]), theirs(X[0]))


def test_a_number_in_a_tuple_may_decide() -> None:
    def run(world: World, x: Tensor) -> Tensor:
        h, count = tensors(world.state)
        world.state = (h + x, count + 1)
        return h * 2 if count % 3 == 0 else h - count

    ours, theirs = World(), World()
    ours.state = theirs.state = (torch.ones(3), 0)
    program = capture(lambda x: run(ours, x), (X[0],), on_guard_failure="recapture")
    for step in range(9):
        assert torch.equal(program(X[0] + step), run(theirs, X[0] + step))
        assert ours.state[1] == theirs.state[1] and torch.equal(ours.state[0], theirs.state[0])


class World:
    """What a program reads, and changes by the caller's hand."""

    def __init__(self) -> None:
        self.state: Any = [torch.ones(3), torch.zeros(3)]
        self.other: Any = None


def tensors(items: Any) -> list[Tensor]:
    return list(items)


def run(world: World, x: Tensor) -> Tensor:
    first, second, *_ = tensors(world.state)
    return first.add_(x) + second * 2


def replaced(world: World) -> None:
    world.state = [torch.full((3,), 5.0), torch.ones(3)]


def swapped(world: World) -> None:
    world.state = world.state[::-1]


def shared(world: World) -> None:
    one = torch.full((3,), 7.0)
    world.state = [one, one]


def overlapping(world: World) -> None:
    both = torch.arange(4.0)
    world.state = [both[:3], both[1:]]


def longer(world: World) -> None:
    world.state = [torch.ones(3), torch.ones(3) * 4, torch.ones(3)]


def of_another_type(world: World) -> None:
    world.state = collections.UserList([torch.ones(3) * 3, torch.ones(3) * 4])


def of_another_size(world: World) -> None:
    world.state = [torch.ones(2, 3), torch.ones(3) * 4]


def transposed(world: World) -> None:
    world.state = [torch.arange(6.0)[::2], torch.ones(3) * 4]


CHANGES = [replaced, swapped, shared, overlapping, longer, of_another_type, of_another_size, transposed]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
@pytest.mark.parametrize("again", [False, True])
def test_what_the_caller_replaces(change: Callable[[World], None], again: bool) -> None:
    ours, theirs = World(), World()
    program = capture(lambda x: run(ours, x), (torch.ones(3),), on_guard_failure="recapture")
    first = ours.state
    for step in range(7):
        for world in (ours, theirs):
            if step in (2, 4):
                change(world)
        if step == 5 and again:  # what was there first
            ours.state, theirs.state = first, [torch.ones(3) * 3, torch.zeros(3)]
            for one, other in zip(ours.state, theirs.state, strict=True):
                one.copy_(other)
        x = torch.full((3,), float(step))
        assert torch.equal(program(x), run(theirs, x))
        for one, other in zip(ours.state, theirs.state, strict=True):
            assert torch.equal(one, other)


def test_a_list_that_is_reached_in_two_ways() -> None:
    def both(world: World, x: Tensor) -> Tensor:
        return tensors(world.state)[0] * x + tensors(world.other)[0]

    ours, theirs = World(), World()
    for world in (ours, theirs):
        world.other = world.state
    program = capture(lambda x: both(ours, x), (torch.ones(3),), on_guard_failure="recapture")
    for step in range(6):
        for world in (ours, theirs):
            items = [torch.full((3,), float(step)), torch.zeros(3)]
            if step == 1:
                world.state = world.other = items
            elif step == 2:
                world.state = items
            elif step == 3:
                world.other = world.state
            elif step == 4:
                world.state, world.other = items, [items[0]]
        x = torch.full((3,), step + 1.0)
        assert torch.equal(program(x), both(theirs, x))


def test_what_it_replaced_may_be_elsewhere() -> None:
    """The list of before is kept by the caller in another place, where the program reads it."""

    def both(world: World, x: Tensor) -> Tensor:
        return tensors(world.state)[0] * x + (0 if world.other is None else world.other[0] * 100)

    ours, theirs = World(), World()
    program = capture(lambda x: both(ours, x), (torch.ones(3),), on_guard_failure="recapture")
    for step in range(5):
        for world in (ours, theirs):
            world.other = world.state if step > 1 else None
            world.state = [torch.full((3,), float(step)), torch.zeros(3)]
        x = torch.full((3,), step + 1.0)
        assert torch.equal(program(x), both(theirs, x))


def test_writes_go_to_the_new_one() -> None:
    def appends(world: World, x: Tensor) -> Tensor:
        world.state["n"] = world.state["h"] + x
        world.state["h"] = x * 2
        return x + 1

    ours, theirs = World(), World()
    ours.state, theirs.state = ({"h": torch.ones(3), "n": torch.ones(3)} for _ in range(2))
    program = capture(lambda x: appends(ours, x), (torch.ones(3),), on_guard_failure="recapture")
    made, old = captures_of(program), ours.state
    for step in range(5):
        if step in (1, 3):
            ours.state, theirs.state = ({"h": torch.full((3,), 4.0), "n": torch.ones(3)} for _ in range(2))
            left = {key: value.clone() for key, value in old.items()}
        x = torch.full((3,), float(step))
        assert torch.equal(program(x), appends(theirs, x))
        assert all(torch.equal(ours.state[key], theirs.state[key]) for key in ("h", "n"))
        if step:
            assert all(torch.equal(old[key], left[key]) for key in left)
    assert made == []


def test_the_identity_of_an_object_may_decide() -> None:
    def asks(world: World, x: Tensor) -> Tensor:
        return x * 2 if world.state is world.other else x * 3

    ours, theirs = World(), World()
    program = capture(lambda x: asks(ours, x), (torch.ones(3),), on_guard_failure="recapture")
    for step in range(6):
        for world in (ours, theirs):
            world.state = [torch.full((3,), float(step))]
            world.other = world.state if step % 2 else [torch.zeros(3)]
        assert torch.equal(program(X[0]), asks(theirs, X[0]))


def test_a_module_in_it_is_another_one() -> None:
    def calls(world: World, x: Tensor) -> Tensor:
        module: torch.nn.Module = world.state[0]
        return tensors([module(x)])[0]

    world = World()
    world.state = [torch.nn.Linear(3, 3)]
    program = capture(lambda x: calls(world, x), (X,), on_guard_failure="recapture")
    for training in (True, False, True):
        world.state = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).train(training)]
        running = world.state[0][1].running_mean.clone()
        program(X)
        assert torch.equal(world.state[0][1].running_mean, running) is not training


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: (one, 1), lambda one: (torch.ones(2), {"a": one})])
def test_a_frozenset_of_tensors_is_another_one(wrap: Callable[[Any], Any]) -> None:
    def reads(world: World, x: Tensor) -> Tensor:
        state = world.state
        while not isinstance(state, frozenset):
            state = state[1]["a"] if isinstance(state[1], dict) else state[0]
        return x + tensors(state)[0]

    world = World()
    world.state = wrap(frozenset([torch.zeros(3)]))
    program = capture(lambda x: reads(world, x), (torch.ones(3),), on_guard_failure="recapture")
    for step in range(4):
        if step:
            world.state = wrap(frozenset([torch.full((3,), float(step))]))
        assert torch.equal(program(torch.ones(3)), torch.full((3,), 1.0 + step))


def test_without_capturing_again() -> None:
    world = World()
    program = capture(lambda x: run(world, x), (torch.ones(3),))
    world.state = [torch.full((3,), 2.0), torch.full((3,), 3.0)]
    assert torch.equal(program(torch.ones(3)), torch.full((3,), 9.0))
    world.state = [torch.full((2, 3), 2.0), torch.full((3,), 3.0)]
    with pytest.raises(InputMismatchError):
        program(torch.ones(3))
    assert torch.equal(world.state[0], torch.full((2, 3), 2.0))


def test_threads_find_one_list_or_the_other() -> None:
    """Eight threads call; another one replaces the list: a call finds what belongs together."""

    def reads(world: World, x: Tensor) -> Tensor:
        first, second = tensors(world.state)
        return x * 0 + first - second

    world, wrong, stop = World(), list[Any](), threading.Event()
    world.state = [torch.ones(3), torch.ones(3)]
    program = capture(lambda x: reads(world, x), (torch.ones(3),), on_guard_failure="recapture")

    def calls() -> None:
        while not stop.is_set():
            try:
                found = program(torch.ones(3))
            except InputMismatchError:  # replaced between two looks
                continue
            except Exception as error:
                wrong.append(error)
                return
            if found.any():
                wrong.append(found)
                return

    threads = [threading.Thread(target=calls) for _ in range(8)]
    for thread in threads:
        thread.start()
    for step in range(100):
        world.state = [torch.full((3,), float(step)), torch.full((3,), float(step))]
        stop.wait(0.005)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_exported_with_what_is_replaced() -> None:
    ours, theirs = Recurrent("list"), Recurrent("list")
    with torch.no_grad():
        module = capture(ours, (X,)).to_exported_program().module()
        for step in range(4):
            torch.testing.assert_close(module(X + step), theirs(X + step))


class Named(tuple[int, ...]):
    """A tuple that has attributes besides."""

    h: Tensor


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: (one, 1)])
def test_a_tuple_with_attributes(wrap: Callable[[Any], Any]) -> None:
    def reads(world: World, x: Tensor) -> Tensor:
        state = world.state if isinstance(world.state, Named) else world.state[0]
        return x * state[0] + state.h

    world = World()

    def replace(value: float) -> None:
        named = Named((1, 2))
        named.h = torch.full((3,), value)
        world.state = wrap(named)

    replace(0.0)
    program = capture(lambda x: reads(world, x), (torch.ones(3),), on_guard_failure="recapture")
    for step in range(4):
        replace(float(step))
        assert torch.equal(program(torch.ones(3)), torch.full((3,), 1.0 + step))


def test_another_list_of_the_same_modules() -> None:
    world, layer = World(), torch.nn.Linear(3, 3)
    world.state = [layer]
    program = capture(lambda x: world.state[0](x), (X,), on_guard_failure="recapture")
    made = captures_of(program)
    for _ in range(3):
        world.state = [layer]
        assert torch.equal(program(X), layer(X))
    assert made == [0]  # the first call wants gradients


def test_a_list_made_of_the_tensors_of_the_one_that_it_replaces() -> None:
    inner: list[Any] = [torch.ones(3), torch.zeros(3), 2]
    outer: list[Any] = [inner, torch.ones(3)]

    def doubles(x: Tensor) -> None:
        outer[0] = outer[0] * 2

    capture(doubles, (X,))(X)
    assert list(map(id, outer[0])) == [*map(id, inner), *map(id, inner)]


def test_a_call_keeps_no_object_among_its_arguments() -> None:
    program = capture(lambda record: record.h + record.g, (Record(X.clone(), X.clone()),))
    gc.collect()
    gc.disable()
    try:
        record = Record(X.clone(), X.clone())
        kept = weakref.ref(record), weakref.ref(record.h)
        program(record)
        del record
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


class Rectified(torch.nn.ReLU):
    pass


class Listed(list[int]):
    pass


@pytest.mark.parametrize(
    ("value", "name", "use"),
    [
        (Rectified(), "forward", lambda value, x: value(x)),
        (Listed([1, 2]), "index", lambda value, x: x * value.index(2)),
    ],
    ids=["module", "list"],
)
def test_a_class_may_get_a_method_in_the_place_of_its_bases(
    value: Any, name: str, use: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, again = (
        capture(lambda x: use(value, x), (X,), on_guard_failure=policy) for policy in ("raise", "recapture")
    )
    program(X), again(X)
    monkeypatch.setattr(type(value), name, lambda self, x: x * 9, raising=False)
    with pytest.raises(InputMismatchError, match=name):
        program(X)
    assert torch.equal(again(X), X * 9 if name == "forward" else X * 18)
