"""State that names of code lead to in unusual ways: classes, modules, methods in C, `partial`, code of arguments."""

from __future__ import annotations

import cmath
import collections
import contextvars
import csv
import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import InputMismatchError, UnsupportedProgramError, capture

X = -torch.ones(2)
kind: Any = torch.nn.ReLU
library: Any = math
scale = 2
total = 0.0
beside = types.ModuleType("beside")  # a module of a program's own


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    global kind, library, scale
    kind, library, scale = torch.nn.ReLU, math, 2
    vars(beside).update(kind=torch.nn.ReLU, library=math, times=lambda: 2)
    yield
    kind, library, scale = torch.nn.ReLU, math, 2


def rebinds_globals(x: Tensor) -> Tensor:
    global kind, library
    y: Tensor = kind()(x) * (2 if library is math else 3)
    kind, library = torch.nn.Tanh, cmath
    return y


def rebinds_attributes_of_a_module(x: Tensor) -> Tensor:
    y: Tensor = beside.kind()(x) * (2 if beside.library is math else 3) * beside.times()
    beside.kind, beside.library, beside.times = torch.nn.Tanh, cmath, lambda: 3  # type: ignore[attr-defined]
    return y


def rebinds_what_it_closes_over() -> Callable[[Tensor], Tensor]:
    mine: Any = torch.nn.ReLU

    def program(x: Tensor) -> Tensor:
        nonlocal mine
        y: Tensor = x if mine is None else mine()(x)
        mine = torch.nn.Tanh if mine is torch.nn.ReLU else None
        return y

    return program


def test_a_global_variable_that_holds_a_class_is_left_as_it_was_by_a_capture_and_rebound_by_calls() -> None:
    global kind, library
    captured = capture(rebinds_globals, (X,), on_guard_failure="recapture")
    assert (kind, library) == (torch.nn.ReLU, math)
    found = [captured(X) for _ in range(3)]
    assert (kind, library) == (torch.nn.Tanh, cmath)
    kind, library = torch.nn.ReLU, math
    torch.testing.assert_close(found, [rebinds_globals(X) for _ in range(3)])


def test_a_global_variable_that_a_program_names_by_a_text_likewise() -> None:
    global total

    def program(x: Tensor) -> Tensor:
        globals()["total"] = globals()["total"] + x.sum().item()
        return x * total

    captured, start = capture(program, (X,)), total
    found = [captured(X), captured(X), total]
    total = start
    torch.testing.assert_close(found, [program(X), program(X), total])
    total = start


def test_attributes_of_modules_of_python_that_hold_classes_and_functions_likewise() -> None:
    before = dict(vars(beside))
    captured = capture(rebinds_attributes_of_a_module, (X,), on_guard_failure="recapture")
    assert vars(beside) == before
    found = [captured(X) for _ in range(3)]
    assert beside.kind is torch.nn.Tanh
    vars(beside).update(before)
    torch.testing.assert_close(found, [rebinds_attributes_of_a_module(X) for _ in range(3)])


def test_attributes_of_modules_of_python_whose_names_are_computed_are_state() -> None:
    def program(x: Tensor, end: str = "mes") -> Any:
        return x * getattr(beside, "ti" + end)()

    captured = capture(program, (X,), on_guard_failure="recapture")
    assert torch.equal(captured(X), program(X))
    vars(beside)["times"] = lambda: 5
    assert torch.equal(captured(X), program(X))


def test_variables_that_a_function_closes_over_likewise() -> None:
    program, eager = rebinds_what_it_closes_over(), rebinds_what_it_closes_over()
    captured = capture(program, (X,))
    for _ in range(4):
        assert torch.equal(captured(X), eager(X))


def test_a_class_or_a_module_that_the_caller_puts_into_a_variable_is_noticed() -> None:
    global kind, library

    def program(x: Tensor) -> Tensor:
        return kind()(x) * (2 if library is math else 3)  # type: ignore[no-any-return]

    captured = capture(program, (X,), on_guard_failure="recapture")
    strict = capture(program, (X,))
    assert torch.equal(captured(X), program(X)) and torch.equal(strict(X), program(X))
    kind = torch.nn.Sigmoid
    assert torch.equal(captured(X), program(X))
    with pytest.raises(InputMismatchError, match="`kind` is <class"):
        strict(X)
    library = cmath
    assert torch.equal(captured(X), program(X))


def test_what_a_method_in_c_is_bound_to_is_state() -> None:
    table: dict[str, Any] = {}
    queue, marks = collections.deque([1.0, 2.0, 3.0]), set[int]()
    context: contextvars.ContextVar[int] = contextvars.ContextVar("count", default=0)
    put, find, take, mark, count = table.__setitem__, table.get, queue.popleft, marks.add, marks.__len__
    set_count, get_count = context.set, functools.partial(context.get)

    def program(x: Tensor) -> Tensor:
        mark(count())
        known: Any = find("sum")
        put("sum", x.sum() if known is None else known + x.sum())
        set_count(get_count() + 1)
        total: Tensor = x * take() * count() * get_count() + table["sum"]
        return total

    def state() -> str:
        return str((table, queue, marks, context.get()))

    before = state()
    captured = capture(program, (X,))
    assert state() == before
    found = [(captured(X), state()) for _ in range(3)]
    table.clear(), marks.clear(), queue.extend([1.0, 2.0, 3.0]), context.set(0)  # type: ignore[func-returns-value]
    for call in range(3):
        assert torch.equal(found[call][0], program(X)) and found[call][1] == state()


def test_a_method_that_an_iterator_is_bound_to_is_refused() -> None:
    after = iter([1, 2, 3]).__next__
    with pytest.raises(UnsupportedProgramError, match="`after` of the program is bound to is a list_iterator"):
        capture(lambda x: x * after(), (X,))


def test_a_method_that_a_tensor_is_bound_to_writes_to_that_tensor() -> None:
    total = torch.zeros(2)
    add, times = total.add_, total.mul

    def program(x: Tensor) -> Tensor:
        add(x)
        return times(x)

    captured = capture(program, (X,))
    assert torch.equal(captured(X), torch.ones(2)) and torch.equal(captured(X), torch.ones(2) * 2)
    assert torch.equal(total, X * 2)


class Encoder(torch.nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return x * scale * self.factor()

    def factor(self) -> int:
        return scale + 1


@pytest.mark.parametrize("bound", [False, True])
def test_methods_of_modules_other_than_forward_are_followed(bound: bool) -> None:
    global scale
    encoder = Encoder(2, 2)
    program: Any = encoder.encode if bound else lambda x: encoder.encode(x)
    captured = capture(program, (X,), on_guard_failure="recapture")
    assert torch.equal(captured(X), X * 6)
    scale = 3
    assert torch.equal(captured(X), X * 12)


def test_a_function_that_partial_binds_is_followed() -> None:
    marks: list[int] = []

    def count(by: int) -> int:
        marks.append(by)
        return len(marks)

    counted = functools.partial(count, 1)
    captured = capture(lambda x: x * counted(), (X,))
    assert [captured(X)[0].item() for _ in range(3)] == [-1, -2, -3] and len(marks) == 3


class Scale:
    def __init__(self, call: Callable[[], int] | None = None) -> None:
        self.call = call

    def of(self) -> int:
        return scale if self.call is None else self.call()


class Scaled(torch.nn.Linear):
    def of(self) -> int:
        return self.forward(X)

    def forward(self, x: Tensor) -> int:  # type: ignore[override]
        return scale


@pytest.mark.parametrize("make", [lambda: Scale(), lambda: Scale(lambda: scale), lambda: Scaled(2, 2)])
def test_what_the_code_of_arguments_reaches_is_state(make: Callable[[], Any]) -> None:
    global scale
    argument = make()
    captured = capture(lambda x, one: x * one.of(), (X, argument), on_guard_failure="recapture")
    assert torch.equal(captured(X, argument), X * 2)
    scale = 3
    assert torch.equal(captured(X, argument), X * 3)


def test_a_list_that_an_argument_holds_as_well_is_added_to_once() -> None:
    history: list[int] = []

    def program(x: Tensor, given: list[int]) -> Tensor:
        history.append(1)
        return x * len(given)

    captured = capture(program, (X, history), on_guard_failure="recapture")
    for call in range(1, 4):
        assert torch.equal(captured(X, history), X * call) and history == [1] * call


def test_a_list_that_a_function_among_the_arguments_reads_is_no_log() -> None:
    history: list[int] = []

    def program(x: Tensor, count: Callable[[], int]) -> Tensor:
        history.append(1)
        return x * count()

    def count() -> int:
        return len(history)

    captured = capture(program, (X, count), on_guard_failure="recapture")
    for call in range(1, 4):
        assert torch.equal(captured(X, count), X * call)


def marked() -> None:
    """A function that a program gives attributes."""


def test_attributes_that_inner_functions_give_to_functions_are_effects() -> None:
    """The code of an inner function is the program's as much as the code around it."""

    def program(x: torch.Tensor) -> torch.Tensor:
        def mark() -> None:
            marked.size, marked.twice = x.shape[0], x * 2  # type: ignore[attr-defined]

        mark()
        return x + 1

    captured = capture(program, (torch.zeros(3),))
    assert not vars(marked)
    captured(torch.ones(3))
    found = dict(vars(marked))
    vars(marked).clear()
    assert found["size"] == 3
    assert found["twice"].tolist() == [2, 2, 2]


class Counts:
    """Counts its calls, by which it multiplies."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        return self.count(x)

    def count(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class CountsAsModule(Counts, torch.nn.Module):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.count(x)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "autocast": torch.autocast("cpu", enabled=False),
    "disable": torch.compiler.disable,
    "compile": functools.partial(torch.compile, backend="eager"),
    "lru_cache": functools.lru_cache,
    "partial": functools.partial,
    "two": lambda func: torch.no_grad()(functools.partial(torch.inference_mode()(func))),
}
BOUND: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a method": (Counts, lambda one: one.count),
    "an object": (Counts, lambda one: one),
    "a module": (CountsAsModule, lambda one: one),
    "a closure": (Counts, lambda one: lambda x: one.count(x)),
}


# Dynamo makes a module of its own of a module, and warns where hooks of all modules are set, as a capture does.
_OF_DYNAMO = {("compile", "a module"), ("disable", "a module")}


@pytest.mark.every(5)
@pytest.mark.parametrize(("wrap", "what"), sorted(set(itertools.product(WRAPPERS, BOUND)) - _OF_DYNAMO))
@pytest.mark.parametrize("named", [False, True])
def test_what_wrappers_of_libraries_call_is_followed(wrap: str, what: str, named: bool) -> None:
    """Whether the wrapper is what is captured, or a variable of that."""
    make, bound = BOUND[what]
    one = make()
    wrapper = WRAPPERS[wrap](bound(one))
    captured = capture((lambda x: wrapper(x)) if named else wrapper, (X,), on_guard_failure="recapture")
    assert one.calls == 0
    for call in range(1, 4):
        torch.testing.assert_close(captured(X.clone()), X * call)
        assert one.calls == call


class Batches:
    """What a training loop keeps: data to come."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.scale = batches, 2.0
        self.other: Any = None


def a_generator() -> Any:
    yield from (1.0, 2.0, 3.0)


_LOADED = torch.utils.data.TensorDataset(torch.ones(3, 2))
ITERATORS: dict[str, Callable[[], Any]] = {
    "list": lambda: iter([1.0, 2.0, 3.0]),
    "map": lambda: map(float, [1, 2, 3]),
    "generator": a_generator,
    "count": lambda: itertools.count(1.0),
    "deque": lambda: iter(collections.deque([1.0, 2.0])),
    "rows": lambda: (float(row["n"]) for row in csv.DictReader(["n", "1", "2"])),
    "loader": lambda: (float(rows[0].sum()) for rows in torch.utils.data.DataLoader(_LOADED)),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
def test_iterators_that_objects_hold_are_refused_where_something_is_taken_out(make: Callable[[], Any]) -> None:
    holder = Batches(make())
    first = next(make())

    def caught(x: Tensor) -> Any:
        try:
            return x * next(holder.batches)
        except Exception:
            return x

    def kept(x: Tensor) -> Tensor:
        holder.other = holder.batches
        return x

    for program in (lambda x: x * next(holder.batches), caught, lambda x: x * sum(holder.batches)):
        with pytest.raises(UnsupportedProgramError, match=r"the attribute or item `holder\.batches`.* is a "):
            capture(program, (X,))
    for program in (kept, lambda x: (x, holder.batches)):
        with pytest.raises(UnsupportedProgramError, match=r"which was the attribute or item `holder\.batches`"):
            capture(program, (X,))
    held: Callable[[Tensor], Tensor] = lambda x: x * holder.scale  # noqa: E731
    assert torch.equal(capture(held, (X,))(X), X * 2)
    assert holder.other is None and next(holder.batches) == first
    holder.other = both = (holder.batches, iter([first]))
    capture(held, (X,))
    assert holder.other is both


def test_an_iterator_of_a_loader_is_refused() -> None:
    holder = Batches(iter(torch.utils.data.DataLoader(_LOADED)))
    with pytest.raises(
        UnsupportedProgramError, match=r"`holder\.batches\._sampler_iter` of the program is a generator"
    ):
        capture(lambda x: x[:2] * next(holder.batches)[0], (X,))


def test_iterators_as_arguments_are_refused_where_something_is_taken_out() -> None:
    with pytest.raises(UnsupportedProgramError, match="the argument or item `rows` of the program is a list_iterator"):
        capture(lambda rows: next(rows) * 2, (iter([X]),))


def test_what_modules_of_python_keep_is_no_state() -> None:
    count = 0

    def run(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x if re.compile(f"other pattern {count}, each time") else -x

    run.compile = re.compile  # type: ignore[attr-defined]
    captured = capture(run, (X,), on_guard_failure="recapture")
    for _ in range(3):
        assert torch.equal(captured(X), X)
    assert count == 3


def test_rows_of_a_table_are_refused() -> None:
    holder = Batches(csv.reader(["1", "2"]))
    with pytest.raises(
        UnsupportedProgramError, match=r"the attribute or item `holder\.batches` of the program is a reader"
    ):
        capture(lambda x: x * float(next(holder.batches)[0]), (X,))
