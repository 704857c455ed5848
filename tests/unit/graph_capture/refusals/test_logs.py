"""Lists that a program adds to: which are logs, whose length is no guard, and which the program reads as well."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import operator
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import capture

Made = tuple[Callable[[Tensor], Any], Any]  # a program, and what to compare of it


class Tracker:
    def __init__(self, **more: Any) -> None:
        self.history: list[Any] = []
        self.other: list[Any] = []
        self.logs: dict[str, list[Any]] = {"loss": [], "norm": []}
        self.__dict__.update(more)
        for _ in self.history:
            raise AssertionError

    def note(self, x: Tensor) -> None:
        self.history.append(x)


@dataclasses.dataclass
class Record:
    history: list[Any] = dataclasses.field(default_factory=list)


NAME = "history"
everything: list[Any] = []
table: dict[str, list[Any]] = {"loss": []}


def closed_over() -> Made:
    history: list[Any] = []

    def program(x: Tensor) -> Tensor:
        history.append(x.sum())
        history.extend([x, 1])
        return x * 2

    return program, history


def in_a_helper() -> Made:
    history: list[Any] = []

    def note(loss: Any) -> None:
        history.append(loss)

    def program(x: Tensor) -> Tensor:
        note({"history": x.sum()})
        return x * 2

    return program, history


def a_global() -> Made:
    everything.clear()

    def program(x: Tensor) -> Tensor:
        everything.append(x.sum())
        return x * getattr(x, "scale", 2)

    return program, everything


def an_attribute() -> Made:
    tracker = Tracker()

    def program(x: Tensor) -> Tensor:
        tracker.note(x.sum())
        tracker.history.append(getattr(tracker, "missing", None))
        return x * 2

    return program, tracker.history


def of_a_module() -> Made:
    class Model(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.history: list[Any] = []
            self.logs: dict[str, list[Any]] = {"loss": []}

        def forward(self, x: Tensor) -> Tensor:
            self.history.append(x.sum())
            self.logs["loss"].append(x.sum())
            return super().forward(x)

    torch.manual_seed(0)
    model = Model()
    return model, (model.history, model.logs)


def in_a_dict() -> Made:
    logs: dict[str, list[Any]] = {"loss": [], "norm": []}

    def program(x: Tensor) -> Tensor:
        logs["loss"].append(x.sum())
        logs["norm"].extend([x.norm()])
        return x * 2

    return program, logs


def in_a_global_dict() -> Made:
    table["loss"] = []

    def program(x: Tensor) -> Tensor:
        table["loss"].append(x.sum())
        return x * 2

    return program, table


def in_a_dict_of_an_object() -> Made:
    tracker = Tracker()

    def program(x: Tensor) -> Tensor:
        tracker.logs["loss"].append(x.sum())
        return x * 2

    return program, tracker.logs


def by_a_method_of_its() -> Made:
    history: list[Any] = []
    note = history.append

    def program(x: Tensor) -> Tensor:
        note(x.sum())
        return x * 2

    return program, history


LOGS = [closed_over, in_a_helper, a_global, an_attribute, of_a_module, in_a_dict, in_a_global_dict]
LOGS += [in_a_dict_of_an_object, by_a_method_of_its]


@pytest.mark.parametrize("make", LOGS, ids=lambda make: make.__name__)
def test_lists_that_are_only_added_to_are_logs(make: Callable[[], Made]) -> None:
    (program, left), (eager, theirs) = make(), make()
    before = str(left)
    captured = capture(program, (torch.ones(2),))
    assert str(left) == before
    if make in (a_global, in_a_global_dict):  # of which there is one
        eager, theirs = (lambda x: x * 2), left
    for call in range(1, 5):
        assert torch.equal(captured(torch.ones(2) * call), eager(torch.ones(2) * call))
        assert str(left) == str(theirs) != before
    assert len(captured.variants) == 1


READ = {
    "len": ("a = []", "a.append(1)", "len(a)"),
    "in a dict": ("a = {'e': []}", "a['e'].append(1)", "len(a['e'])"),
    "extended": ("a = {'e': []}", "a['e'].extend([1])", "len(a['e'])"),
    "added in place": ("a = {'e': []}", "a['e'] += [1]", "len(a['e'])"),
    "truth": ("a = {'e': []}", "b = 5 if a['e'] else 1; a['e'].append(1)", "b"),
    "sum": ("a = {'e': []}", "a['e'].append(2)", "sum(a['e'])"),
    "get": ("a = {'e': []}", "a['e'].append(1)", "len(a.get('e'))"),
    "values": ("a = {'e': []}", "a['e'].append(1)", "sum(map(len, a.values()))"),
    "setdefault": ("a = {}", "a.setdefault('e', []).append(1)", "len(a['e'])"),
    "another key": ("a = {'e': [], 'f': []}; a['f'] = a['e']", "a['e'].append(1)", "len(a['f'])"),
    "no constant key": ("a = {'e': []}", "b = 'e'; a[b].append(1)", "len(a[b])"),
    "two names": ("a = {'e': []}; b = a", "a['e'].append(1)", "len(b['e'])"),
    "a method of the dict": ("a = {'e': []}; b = a.get", "a['e'].append(1)", "len(b('e'))"),
    "tensors": ("a = {'e': []}", "a['e'].append(x)", "len(torch.stack(a['e']))"),
    "defaultdict": ("a = collections.defaultdict(list)", "a['e'].append(1)", "len(a['e'])"),
    "nested": ("a = {'e': {'f': []}}", "a['e']['f'].append(1)", "len(a['e']['f'])"),
    "dict of an object": ("a = Tracker()", "a.logs['loss'].append(1)", "len(a.logs['loss'])"),
    "locals": ("a = []", "a.append(1)", "len(locals()['a'])"),
    "eval": ("a = []", "a.append(1)", "len(eval('a', {'a': a}))"),
    "getattr": ("a = Tracker()", "getattr(a, 'history').append(1)", "len(getattr(a, 'history'))"),
    "getattr of a name": ("a = Tracker()", "a.history.append(1)", "len(getattr(a, NAME))"),
    "getattr with a default": ("a = Tracker()", "a.history.append(1)", "len(getattr(a, NAME, 'more'))"),
    "getattr by another name": ("a = Tracker(); b = getattr", "a.history.append(1)", "len(b(a, NAME))"),
    "vars": ("a = Tracker()", "a.history.append(1)", "len(vars(a)[NAME])"),
    "__dict__": ("a = Tracker()", "a.history.append(1)", "len(list(a.__dict__.values())[0])"),
    "attrgetter": ("a = Tracker()", "a.history.append(1)", "len(operator.attrgetter(NAME)(a))"),
    "asdict": ("a = Record()", "a.history.append(1)", "len(list(dataclasses.asdict(a).values())[0])"),
    "equality": ("a = Record()", "a.history.append(1)", "(5 if a == Record([1, 1]) else 1)"),
    "pickle": ("a = Record()", "a.history.append(1)", "len(pickle.dumps(a))"),
    "json": ("a = Record()", "a.history.append(1)", "len(json.dumps(vars(a)))"),
    "namespace": ("a = types.SimpleNamespace(history=[])", "a.history.append(1)", "len(repr(a))"),
    "map of getattr": ("a = Tracker()", "a.history.append(1)", "len(list(map(getattr, [a], [NAME]))[0])"),
    "partial": ("a = functools.partial(list.append, [])", "a(1)", "len(a.args[0])"),
    "methods of a list": ("a = []; b = [a.append, a.__len__]", "b[0](1)", "b[1]()"),
    "len, a method": ("b = []; a = b.__len__", "b.append(1)", "a()"),
    "methods of a dict": ("b = {}; a = b.__setitem__; c = b.__len__", "a(c(), 1)", "c()"),
    "methods of a deque": ("b = collections.deque(); a = b.append", "a(1)", "len(b)"),
    "through a method": ("b = []; a = b.append", "a(1)", "len(a.__self__)"),
    "methods in an object": ("a = Tracker(); a.add = a.history.append", "a.add(1)", "len(a.history)"),
}
KNOWN = {
    "NAME": NAME,
    "torch": torch,
    "Tracker": Tracker,
    "Record": Record,
    "collections": collections,
    "dataclasses": dataclasses,
}
KNOWN |= {"functools": functools, "json": json, "operator": operator, "pickle": pickle, "types": types}


@pytest.mark.every(5)
@pytest.mark.parametrize("case", READ)
def test_lists_that_are_read_are_state(case: str) -> None:
    made, adds, reads = READ[case]

    def make() -> Made:
        found: dict[str, Any] = {**KNOWN, "__name__": __name__}
        exec(f"def make():\n  {made}\n  def f(x):\n    {adds}\n    return x * {reads}\n  return f, a", found)
        result: Made = found["make"]()
        left = result[1]
        return result[0], vars(left)["history"] if isinstance(left, Tracker) else None if callable(left) else str(left)

    (program, left), (eager, theirs) = make(), make()
    captured = capture(program, (torch.ones(2),))
    for call in range(1, 5):
        assert torch.equal(captured(torch.ones(2) * call), eager(torch.ones(2) * call))
        assert left == theirs


def test_what_is_read_is_captured_for_each_length() -> None:
    seen: dict[str, list[int]] = {"e": []}

    def program(x: Tensor) -> Tensor:
        seen["e"].append(1)
        return x * len(seen["e"])

    captured = capture(program, (torch.ones(1),), cache_size=2)
    assert [captured(torch.ones(1)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert len(captured.variants) == 2


def running_average(x: Tensor, log: dict[str, Any]) -> None:
    log["average"] = 0.9 * log.get("average", 0.0) + 0.1 * float(x.mean())


def sums_and_extremes(x: Tensor, log: dict[str, Any]) -> None:
    log["total"] = log.get("total", 0.0) + float(x.sum())
    log["best"] = max(log.get("best", 0.0), float(x.detach().cpu().max()))
    log["worst"] = min(log.get("worst", 1e9), float(x.min()))
    log["positive"] = log.get("positive", 0) + int((x > 0).sum())


def converted_everywhere(x: Tensor, log: dict[str, Any]) -> None:
    loss = x.mean()
    log["float"] = float(loss)
    log["item"] = float(loss.item())
    log["rounded"] = round(float(loss), 2)
    log["whole"] = (int(loss * 10), int(-loss * 10), int(x.argmax()))
    log["each"] = [float(value) for value in x]
    log["mapped"] = list(map(float, x))
    log["nested"] = (lambda value: {"loss": float(value)})(loss)
    log["truth"] = float(math.isnan(float(loss)))


def converted_and_decided(x: Tensor, log: dict[str, Any]) -> None:
    loss = float(x.mean())
    if not math.isfinite(loss):
        raise AssertionError
    log["loss"] = loss


@pytest.mark.parametrize("note", [running_average, sums_and_extremes, converted_everywhere, converted_and_decided])
def test_numbers_that_are_stored_make_no_variants(note: Callable[[Tensor, dict[str, Any]], None]) -> None:
    ours, theirs = dict[str, Any](), dict[str, Any]()

    def program(x: Tensor) -> Tensor:
        note(x, ours)
        return x * 2

    captured = capture(program, (torch.rand(3),))
    for number in range(11):
        x = torch.rand(3, generator=torch.Generator().manual_seed(number)) * number
        assert torch.equal(captured(x), x * 2)
        note(x, theirs)
        assert repr(ours) == repr(theirs)  # and the classes of the numbers
    assert len(captured.variants) <= 5  # numbers become inputs when they first change


def test_a_training_step_logs_its_loss_by_float() -> None:
    def make() -> tuple[Callable[[Tensor], Tensor], list[float]]:
        torch.manual_seed(0)
        model, losses = torch.nn.Linear(3, 1), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            return loss

        return step, losses

    (eager, theirs), (mine, ours) = make(), make()
    captured = capture(mine, (torch.ones(4, 3),))
    for number in range(10):
        x = torch.full((4, 3), number / 10)
        assert torch.equal(captured(x), eager(x))
        assert ours == theirs
    assert len(captured.variants) <= 2  # the first call finds no gradients


def test_the_classes_float_and_int_are_pythons() -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        number, convert = float(x.sum()), float
        classes = (
            isinstance(number, float),
            type(number) is float,
            x.new_zeros(1, dtype=float).dtype,  # type: ignore[call-overload]
            isinstance(int(x[0]), int),
        )
        return classes, number * 2, convert("1.5"), int("11", 2), int(2.5), [float(one) for one in "123"]

    code = program.__code__
    captured = capture(program, (torch.ones(3),))
    for value in (1.0, 2.0, 3.5):
        assert captured(torch.ones(3) * value) == program(torch.ones(3) * value)
    assert len(captured.variants) == 1
    assert program.__code__ is code


def test_what_takes_pythons_numbers_alone_decides() -> None:
    def late(x: Tensor) -> Any:
        number = float(x.sum())
        return json.dumps({"loss": number}) if number > 5 else number

    for program in (lambda x: json.dumps([float(x.sum()), int(x[0])]), lambda x: complex(float(x[0]), 1), late):
        captured = capture(program, (torch.ones(3),))
        for value in (1.0, 2.0, 1.0, 3.0):
            assert captured(torch.ones(3) * value) == program(torch.ones(3) * value)
