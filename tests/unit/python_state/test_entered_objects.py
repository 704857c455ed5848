"""State in objects of Python's own classes, behind views and weak references, and beside values."""

from __future__ import annotations

import argparse
import collections
import configparser
import enum
import functools
import queue
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from functionalize import UnsupportedProgramError, capture

Program = Callable[[Tensor], Any]
World = tuple[Program, Callable[[], Any]]  # and what its user does between two calls


class Counted:
    """Something with a number."""

    def __init__(self, k: float) -> None:
        self.k = k

    def scaled(self, x: Tensor) -> Tensor:
        """The tensor, so many times."""
        return x * self.k


def namespace_of_arguments() -> World:
    given = argparse.Namespace(k=1.0, t=torch.ones(2), steps=0)

    def program(x: Tensor) -> Any:
        given.steps += 1
        return x * given.k + given.t * given.steps

    return program, lambda: setattr(given, "t", torch.zeros(2))


def event() -> World:
    ready = threading.Event()
    return lambda x: x * 2 if ready.is_set() else x, ready.set


def waiting() -> World:
    todo: queue.Queue[Any] = queue.Queue()

    def program(x: Tensor) -> Any:
        todo.put(x * 2)
        return todo.get() + todo.qsize()

    return program, lambda: todo.put(torch.ones(2))


def configuration() -> World:
    config = configparser.ConfigParser()
    config.read_dict({"a": {"k": "1"}})
    return lambda x: x * config["a"].getfloat("k"), lambda: config.set("a", "k", "3")


def weak_set() -> World:
    one = Counted(1.0)
    known = weakref.WeakSet([one])
    return lambda x: x * sum(each.k for each in known) + one.k, lambda: setattr(one, "k", 3.0)


def weakly_keyed_by_tensors() -> World:
    one, other = torch.ones(2), torch.ones(2)
    known: Any = WeakTensorKeyDictionary()
    known[one], known[other] = {"t": torch.ones(2), "steps": 0}, 5.0

    def program(x: Tensor) -> Any:
        known[one]["steps"] += 1
        known[one]["t"] = known[one]["t"] + x
        return sum(key * known[key] for key in [other]) + one * known[one]["t"] * known[one]["steps"] + len(known)

    return program, lambda: known.update({other: 3.0})


def weakly_keyed_by_objects() -> World:
    one = Counted(1.0)
    known = weakref.WeakKeyDictionary({one: 2.0})
    kept = [one]
    return lambda x: x * sum(key.k * value for key, value in known.items()), lambda: setattr(kept[0], "k", 3.0)


def weak_values() -> World:
    kept = [Counted(1.0)]
    known = weakref.WeakValueDictionary(a=kept[0])
    return lambda x: x * known["a"].k, lambda: setattr(kept[0], "k", 3.0)


def weak_method() -> World:
    kept = Counted(1.0)
    method = weakref.WeakMethod(kept.scaled)
    return lambda x: method()(x), lambda: setattr(kept, "k", 3.0)  # type: ignore[misc]


def proxy_of_a_dict() -> World:
    held = {"k": 1.0, "t": torch.ones(2)}
    shown = types.MappingProxyType(held)
    return lambda x: x * shown["k"] + shown["t"], lambda: held.update(k=3.0, t=torch.zeros(2))


def values_of_a_dict() -> World:
    held = collections.OrderedDict(a=1.0)
    values = held.values()
    return lambda x: x * sum(values), lambda: held.update(b=2.0)


def view_of_memory() -> World:
    held = bytearray(b"\1\2")
    view = memoryview(held)
    return lambda x: x * view[0], lambda: held.__setitem__(0, 3)


def number_with_an_attribute() -> World:
    class Number(int):
        k = 1.0

    number = Number(2)
    return lambda x: x * number * number.k, lambda: setattr(number, "k", 3.0)


def tuple_with_an_attribute() -> World:
    class Pair(tuple[float, float]):
        k = 1.0

    pair = Pair((1.0, 2.0))
    pair.k = 2.0
    return lambda x: x * pair[1] * pair.k, lambda: setattr(pair, "k", 3.0)


def tuple_of_tensors_with_attributes() -> World:
    class Scaled(tuple[float, Tensor]):
        def __new__(cls, k: float, t: Tensor) -> Any:
            return super().__new__(cls, (k, t))

    pair: Any = Scaled(1.0, torch.ones(2))
    pair.k, pair.t, pair.seen = 2.0, torch.ones(2), []
    held = [(pair, torch.ones(2))]

    def program(x: Tensor) -> Any:
        pair.seen.append(pair.k)
        pair.t = pair.t + x
        return x * pair[1] * pair.k * len(pair.seen) + held[0][0].t + held[0][1]

    return program, lambda: setattr(pair, "k", 3.0)


def class_of_named_tuples() -> World:
    class Pair(NamedTuple):
        one: float

    Pair.k = 1.0  # type: ignore[attr-defined]
    pair = Pair(2.0)
    return lambda x: x * pair.one * Pair.k, lambda: setattr(Pair, "k", 3.0)  # type: ignore[attr-defined]


def partial_with_an_attribute() -> World:
    class Scaling(functools.partial[Any]):
        k = 1.0

    scaling = Scaling(torch.mul, 2)
    scaling.k = 2.0
    return lambda x: scaling(x) * scaling.k, lambda: setattr(scaling, "k", 3.0)


def partial_that_is_changed() -> World:
    scaled = functools.partial(lambda x, **given: x * given["n"] + sum(given.values()), n=1, t=torch.ones(2))

    def program(x: Tensor) -> Any:
        found = scaled(x)
        scaled.keywords["n"] += 1
        scaled.keywords["t"] = x + scaled.keywords["t"]
        scaled.keywords["more"] = scaled.keywords.get("more", 0) + 2
        return found

    return program, lambda: scaled.keywords.update(n=5)


def partial_whose_order_counts() -> World:
    scaled = functools.partial(lambda x, **given: x * next(iter(given.values())), n=1, k=2)
    return lambda x: scaled(x), lambda: scaled.keywords.update(n=scaled.keywords.pop("n"))


def keys_of_a_dict() -> World:
    kept = Counted(1.0)
    held = {kept: 2.0}
    return lambda x: x * sum(key.k * value for key, value in held.items()), lambda: setattr(kept, "k", 3.0)


def keys_that_compare_themselves() -> World:
    class Key(Counted):
        def __eq__(self, other: object) -> bool:
            return self.k == other.k  # type: ignore[attr-defined,no-any-return]

        def __hash__(self) -> int:
            return hash(self.k)

    held = {Key(1.0): 2.0, Key(2.0): 3.0}
    return lambda x: x * held[Key(1.0)], lambda: held.update({Key(1.0): 5.0})


def members() -> World:
    class Mode(enum.Enum):
        A = {"k": 1.0}  # noqa: RUF012
        B = 2

    return lambda x: x * Mode.A.value["k"], lambda: Mode.A.value.update(k=3.0)


def class_of_a_class() -> World:
    class Counting(type):
        made, k = 0, 1.0

        def __call__(cls, *args: Any) -> Any:
            Counting.made += 1
            return super().__call__(*args)

        @property
        def twice(cls) -> float:
            """Of what all classes share."""
            return cls.k * 2

    class Made(metaclass=Counting):
        pass

    def program(x: Tensor) -> Any:
        Made()
        return x * Made.twice + Counting.made

    return program, lambda: setattr(Counting, "k", 3.0)


def one_object() -> World:
    class Single(type):
        _made: dict[Any, Any] = {}  # noqa: RUF012

        def __call__(cls, *args: Any) -> Any:
            if cls not in cls._made:
                cls._made[cls] = super().__call__(*args)
            return cls._made[cls]

    class Settings(metaclass=Single):
        def __init__(self) -> None:
            self.k = 1.0

    return lambda x: x * Settings().k, lambda: setattr(Settings(), "k", 3.0)


def module_of_settings() -> World:
    """`self.config = config`, as programs keep a module of their own."""
    config = types.ModuleType("settings_of_a_program")
    config.k, config.more = 1.0, {"k": 2.0}  # type: ignore[attr-defined]
    holder = types.SimpleNamespace(config=config)
    return lambda x: x * holder.config.k * holder.config.more["k"], lambda: vars(config).update(k=3.0)


def attributes_behind_a_property() -> World:
    class Shown(Counted):
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return {}

    held = Shown(1.0)
    return lambda x: held.scaled(x), lambda: setattr(held, "k", 3.0)


def slots_behind_a_property() -> World:
    class Shown:
        __slots__ = ("k",)

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            raise RuntimeError("of the program")

    held: Any = Shown()
    held.k = 1.0
    return lambda x: x * held.k, lambda: setattr(held, "k", 3.0)


def attributes_of_a_thread() -> World:
    class Local(threading.local):
        k = 1.0

    held = Local()
    held.k = 2.0
    return lambda x: x * held.k, lambda: setattr(held, "k", 3.0)


def class_of_no_module() -> World:
    class Scaled(torch.nn.Module):
        __module__ = None  # type: ignore[assignment]
        k = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.k

    held, model = type("Held", (), {"__module__": [5], "k": 2.0})(), Scaled()

    def change() -> None:
        held.k = model.k = 3.0

    return lambda x: model(x) * held.k, change


WORLDS: list[Callable[[], World]] = [
    *(namespace_of_arguments, event, waiting, configuration, weak_set, weak_values, weak_method),
    *(weakly_keyed_by_tensors, weakly_keyed_by_objects),
    *(proxy_of_a_dict, values_of_a_dict, view_of_memory, number_with_an_attribute, tuple_with_an_attribute),
    tuple_of_tensors_with_attributes,
    *(
        class_of_named_tuples,
        partial_with_an_attribute,
        partial_that_is_changed,
        partial_whose_order_counts,
        keys_of_a_dict,
        keys_that_compare_themselves,
    ),
    *(members, class_of_a_class, one_object, module_of_settings),
    *(attributes_behind_a_property, slots_behind_a_property, attributes_of_a_thread, class_of_no_module),
]


@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_what_objects_hold_is_state(make: Callable[[], World]) -> None:
    """As in eager before and after a change, which a capture for the first call knows nothing of."""
    x, found = torch.ones(2), list[list[Any]]()
    for captured in (False, True):
        program, change = make()
        call = capture(program, (x,), on_guard_failure="recapture") if captured else program
        found.append([call(x).tolist(), call(x).tolist()])
        change()
        found[-1] += [call(x).tolist(), call(x).tolist()]
    assert found[0] == found[1]


def test_each_thread_has_other_attributes() -> None:
    class Local(threading.local):
        def __init__(self) -> None:
            self.k, self.total = 2.0, torch.zeros(2)

    def program(x: Tensor) -> Tensor:
        held.total = held.total + x
        return held.total * held.k

    held, x = Local(), torch.ones(2)
    captured = capture(program, (x,), on_guard_failure="recapture")
    assert captured(x).tolist() == [2.0, 2.0]

    def elsewhere() -> list[Any]:
        first = captured(x).tolist()
        held.k = 5.0
        return [first, captured(x).tolist()]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == [[2.0, 2.0], [10.0, 10.0]]
    assert captured(x).tolist() == [4.0, 4.0]


def test_a_refused_capture_leaves_them_as_they_were() -> None:
    given, todo = argparse.Namespace(n=0), queue.Queue[Any]()

    def program(x: Tensor) -> Any:
        given.n += 1
        given.last = x * 2
        todo.put(1)
        raise RuntimeError("of the program")

    with pytest.raises(RuntimeError, match="of the program"):
        capture(program, (torch.ones(2),))
    assert vars(given) == {"n": 0}
    assert todo.empty()


def test_what_partial_binds_by_name_is_left_by_calls_alone() -> None:
    scaled = functools.partial(lambda x, n: x * n, n=1)

    def program(x: Tensor) -> Any:
        scaled.keywords["n"] += 1
        return scaled(x)

    captured = capture(program, (torch.ones(2),))
    assert scaled.keywords == {"n": 1}
    assert [captured(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0], [3.0, 3.0]]
    assert scaled.keywords == {"n": 3}


def test_entries_that_go_with_tensors_are_not_changed() -> None:
    """A call could not know when those go that it leaves."""
    one = torch.ones(2)
    known: Any = WeakTensorKeyDictionary({one: 1})

    def sets(x: Tensor) -> Any:
        known[one] += 1
        return x * known[one]

    def adds(x: Tensor) -> Any:
        known[result := x * 2] = 1
        return result

    for program in (sets, adds, lambda x: x * known.pop(one)):
        with pytest.raises(
            UnsupportedProgramError, match=r"changes `known.data`, a dict whose keys are weak references"
        ):
            capture(program, (torch.ones(2),))
        assert [*known.items()] == [(one, 1)]


def test_threads_of_a_program_are_refused() -> None:
    def alone(x: Tensor) -> Any:
        out: list[Any] = [None]
        thread = threading.Thread(target=lambda: out.__setitem__(0, x * 2))
        thread.start()
        thread.join()
        return out[0]

    def pooled(x: Tensor) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: x * 2).result()

    for program in (alone, pooled):
        with pytest.raises(UnsupportedProgramError, match=r"starts a thread\n *at .*\.py"):
            capture(program, (torch.ones(2),))
    thread = threading.Thread(target=lambda: None)  # of others, or when no program runs
    thread.start()
    thread.join()


# Weak references


class Trainer:
    """What a model refers to, weakly, in order not to keep it."""

    def __init__(self) -> None:
        self.steps, self.scale, self.seen = 0, torch.tensor(2.0), list[float]()

    def note(self, x: Tensor) -> None:
        """Count, write, add to a log, and give a tensor another one's place."""
        self.steps += 1
        self.scale.add_(1)
        self.seen.append(x.sum().item())
        self.last = x * 2


class Trained(torch.nn.Module):
    """A module that finds its trainer by ``found``, in what ``held`` made of it."""

    def __init__(self, held: Callable[[Trainer], Any], found: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(self.linear.weight)
        self.keeper = [Trainer()]
        self.held, self.found = held(self.keeper[0]), found

    def forward(self, x: Tensor) -> Tensor:
        trainer = self.found(self.held)
        trainer.note(x)
        y: Tensor = x @ self.linear.weight * trainer.scale * trainer.steps + trainer.last
        return y


WEAK: dict[str, tuple[Callable[[Trainer], Any], Callable[[Any], Any]]] = {
    "a proxy": (weakref.proxy, lambda held: held),
    "a proxy in containers": (lambda trainer: {"a": [weakref.proxy(trainer)]}, lambda held: held["a"][0]),
    "a reference": (weakref.ref, lambda held: held()),
    "a dict of weak values": (lambda trainer: weakref.WeakValueDictionary({"t": trainer}), lambda held: held["t"]),
    "a dict of weak keys": (lambda trainer: weakref.WeakKeyDictionary({trainer: 1}), lambda held: next(iter(held))),
    "a weak set": (lambda trainer: weakref.WeakSet([trainer]), lambda held: next(iter(held))),
}


@pytest.mark.parametrize("name", WEAK)
def test_what_is_referred_to_weakly_is_followed(name: str) -> None:
    eager, mine = Trained(*WEAK[name]), Trained(*WEAK[name])
    mine.load_state_dict(eager.state_dict())
    program = capture(mine, (torch.ones(2),))
    for number in range(3):
        x = torch.full((2,), number + 1.0)
        assert torch.equal(program(x), eager(x))
        (ours,), (theirs,) = mine.keeper, eager.keeper
        assert (ours.steps, ours.seen) == (theirs.steps, theirs.seen)
        assert torch.equal(ours.scale, theirs.scale) and torch.equal(ours.last, theirs.last)


def test_proxies_of_tensors_modules_and_of_what_is_gone() -> None:
    weight, linear, gone = torch.ones(2), torch.nn.Linear(2, 2), weakref.proxy(Trainer())
    of_weight, of_linear = weakref.proxy(weight), weakref.proxy(linear)

    def program(x: Tensor) -> Tensor:
        of_weight.add_(1)
        try:
            x = x * gone.steps
        except ReferenceError:
            x = x * of_weight.sum()
        y: Tensor = of_linear(x) * of_linear.weight.sum()
        return y

    captured = capture(program, (torch.ones(2),))
    for number in range(3):
        weight.fill_(number)
        expected = program(torch.ones(2))
        weight.fill_(number)
        assert torch.equal(captured(torch.ones(2)), expected) and torch.equal(weight, torch.full((2,), number + 1.0))


class Posing:
    """Adds up what it is called with, and says that it is a module."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch.nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        self.total = self.total + x
        return self.total * 2


def test_an_object_that_only_says_that_it_is_a_module() -> None:
    mine, eager, x = Posing(), Posing(), torch.ones(2)
    program = capture(lambda x: mine(x) + 1, (x,))
    for _ in range(3):
        assert torch.equal(program(x), eager(x) + 1)
        assert torch.equal(mine.total, eager.total)
