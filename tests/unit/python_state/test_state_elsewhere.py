"""State of programs in other places than objects: classes, modules of Python, context variables, arrays, generators."""

from __future__ import annotations

import array
import collections
import contextvars
import datetime
import decimal
import fractions
import pathlib
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from functionalize import InputMismatchError, UnsupportedProgramError, capture

X = torch.arange(3.0)


class Config:
    scale = 2.0
    table = torch.ones(3)
    seen: list[int] = []  # noqa: RUF012

    def scaled(self, x: Tensor) -> Tensor:
        return x.mul(self.scale)


class Inherits(Config):
    pass


@pytest.fixture
def settings() -> Iterator[types.ModuleType]:
    """A module of a program's own."""
    module: Any = types.ModuleType("settings_of_a_program")
    module.SCALE, module.count, module.table = 2.0, 0, torch.ones(3)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    before: dict[str, Any] = {"scale": Config.scale, "table": Config.table, "seen": Config.seen}
    Config.seen = []
    yield
    for name, value in before.items():
        setattr(Config, name, value)
    for name in set(vars(Config)) - set(before) - {"scaled"}:
        if not name.startswith("__"):
            delattr(Config, name)


def _add_to_class(x: Tensor) -> Tensor:
    Config.scale += 1
    Config.table = Config.table + x
    Config.seen.append(len(Config.seen))
    return Config.table * Config.scale


def _add_attribute(x: Tensor) -> Tensor:
    kind: Any = Config
    if not hasattr(kind, "calls"):
        kind.calls = 0
    kind.calls += 1
    return x.add(kind.calls)


@pytest.mark.parametrize("program", [_add_to_class, _add_attribute])
def test_what_a_program_leaves_in_classes_calls_leave_there(program: Callable[[Tensor], Tensor]) -> None:
    def attributes() -> dict[str, Any]:
        return {name: value for name, value in vars(Config).items() if not callable(value) and name[:2] != "__"}

    first = attributes() | {"seen": []}
    eager = [(program(X).tolist(), str(attributes())) for _ in range(4)]
    for name in attributes():
        delattr(Config, name)
    for name, value in first.items():
        setattr(Config, name, value)
    before = str(attributes())
    captured = capture(program, (X,))
    assert str(attributes()) == before
    assert [(captured(X).tolist(), str(attributes())) for _ in range(4)] == eager


def test_attributes_of_classes_are_guards() -> None:
    by_name, by_object = capture(lambda x: x * Config.scale, (X,)), capture(Inherits().scaled, (X,))
    Config.scale = 5.0
    for program in (by_name, by_object):
        torch.testing.assert_close(program(X), X * 5)


class ByClass(torch.nn.Module):
    """Computes by the class that it holds, which its code also names."""

    def __init__(self, held: type) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(2 if self.held is Config else 3)


def test_classes_that_a_module_holds_are_guards_also_where_its_code_names_them() -> None:
    module = ByClass(Config)
    program = capture(module, (X,))
    module.held = Inherits
    with pytest.raises(InputMismatchError, match=r"`held` is .*Inherits.*, and was .*Config"):
        program(X)


def test_variables_of_other_modules_are_state(settings: Any) -> None:
    def program(x: Tensor) -> Tensor:
        settings.count += 1
        settings.table.add_(1)
        return x.mul(settings.SCALE).add(settings.table * settings.count)

    captured = capture(program, (X,))
    assert settings.count == 0 and settings.table.sum() == 3
    for call in range(1, 4):
        torch.testing.assert_close(captured(X), X * settings.SCALE + (call + 1.0) * call)
        assert settings.count == call
        settings.SCALE += 1


def test_modules_that_are_imported_inside_are_state(settings: Any) -> None:
    def program(x: Tensor) -> Tensor:
        import settings_of_a_program  # type: ignore[import-not-found]

        return x.mul(settings_of_a_program.SCALE)

    captured = capture(program, (X,))
    settings.SCALE = 7.0
    torch.testing.assert_close(captured(X), X * 7)


def test_context_variables_are_state() -> None:
    depth = contextvars.ContextVar("depth", default=1)

    def program(x: Tensor) -> Tensor:
        depth.set(depth.get() + 1)
        return x * depth.get()

    captured = capture(program, (X,))
    assert depth.get() == 1
    for call in range(2, 5):
        torch.testing.assert_close(captured(X), X * call)
        assert depth.get() == call
    depth.set(10)
    torch.testing.assert_close(captured(X), X * 11)


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (decimal.Decimal(1), decimal.Decimal(1)),
        (fractions.Fraction(1, 2), fractions.Fraction(1)),
        (datetime.timedelta(seconds=1), datetime.timedelta(seconds=2)),
    ],
)
def test_numbers_of_libraries_count(first: Any, more: Any) -> None:
    held = [first]

    def program(x: Tensor) -> Tensor:
        held[0] += more
        return x * (held[0].total_seconds() if isinstance(held[0], datetime.timedelta) else float(held[0]))

    captured = capture(program, (X,))
    expected = first
    for _ in range(3):
        expected = expected + more
        factor = expected.total_seconds() if isinstance(expected, datetime.timedelta) else float(expected)
        torch.testing.assert_close(captured(X), X * factor)
        assert held == [expected]


ARRAYS: dict[str, Callable[[], Any]] = {
    "NumPy array": lambda: np.ones(3),
    "array.array": lambda: array.array("d", [1.0, 2.0]),
    "bytearray": lambda: bytearray(b"\x01\x02"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_guards_and_are_not_written(kind: str) -> None:
    held = ARRAYS[kind]()
    program = capture(lambda x: x * float(held[0]), (X,))
    again = capture(lambda x: x * float(held[0]), (X,), on_guard_failure="recapture")
    torch.testing.assert_close(program(X), X)
    held[0] = 3
    torch.testing.assert_close(again(X), X * 3)
    with pytest.raises(InputMismatchError, match="held"):
        program(X)

    def writes(x: Tensor) -> Tensor:
        held[0] = 4
        return x

    with pytest.raises(UnsupportedProgramError, match=kind):
        capture(writes, (X,))
    assert held[0] == 3


MADE_OF_ARRAYS: dict[str, Callable[[Any], Tensor]] = {
    "from_numpy": torch.from_numpy,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "frombuffer": lambda array: torch.frombuffer(array, dtype=torch.float32),
    "a part": lambda array: torch.from_numpy(array[1:]),
}


@pytest.mark.parametrize("made", MADE_OF_ARRAYS.values(), ids=MADE_OF_ARRAYS)
@pytest.mark.parametrize("size", [3, 2**19])
@pytest.mark.parametrize("passed", [False, True])
def test_tensors_that_share_memory_with_arrays_are_read_and_not_written(made: Any, size: int, passed: bool) -> None:
    held = np.ones(size, dtype="float32")
    arguments = (held,) if passed else ()

    def program(use: Callable[[Tensor], Any]) -> Callable[..., Any]:
        return capture(lambda *given: use(made(given[0] if given else held)), arguments)

    torch.testing.assert_close(program(lambda tensor: tensor * 2)(*arguments), made(held) * 2)
    kept: list[Tensor] = []
    for use in (lambda tensor: tensor.mul_(2).sum(), lambda tensor: tensor[1:], lambda tensor: kept.append(tensor)):
        with pytest.raises(UnsupportedProgramError, match="memory of a NumPy array"):
            program(use)
    assert (held == 1).all() and not kept


def test_arrays_that_a_program_makes_are_its_own() -> None:
    def writes(x: Tensor) -> Tensor:
        return torch.from_numpy(np.ones(3, dtype="float32")).mul_(x)

    def reuses(x: Tensor) -> Tensor:
        buffer, total = np.zeros(3, dtype="float32"), x * 0
        for number in range(3):
            buffer[:] = number
            total = total + torch.from_numpy(buffer)
        return total

    def shows(x: Tensor) -> Any:
        array = np.zeros(3, dtype="float32")
        torch.from_numpy(array).add_(x)
        return array

    def adds_to_a_buffer(x: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(12), dtype=torch.float32).add_(x)

    program = capture(writes, (X,))
    for _ in range(2):
        torch.testing.assert_close(program(X), writes(X))
    for refused in (reuses, shows, adds_to_a_buffer):
        with pytest.raises(UnsupportedProgramError, match=r"in the memory of an? (NumPy )?array"):
            capture(refused, (X,))


GENERATORS: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(0),
    "NumPy Generator": lambda: np.random.default_rng(0),
    "NumPy RandomState": lambda: np.random.RandomState(0),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_others_are_refused_and_as_they_were(kind: str) -> None:
    generator, twin = GENERATORS[kind](), GENERATORS[kind]()
    draw = "rand" if "State" in kind else "random"
    with pytest.raises(UnsupportedProgramError, match=kind):
        capture(lambda x: x * getattr(generator, draw)(), (X,))
    assert getattr(generator, draw)() == getattr(twin, draw)()


def _counting(x: Tensor) -> Tensor:
    counting: Any = _counting
    counting.calls = getattr(counting, "calls", 0) + 1
    return x.mul(counting.calls)


def _counting_by_name(x: Tensor) -> Tensor:
    setattr(_counting_by_name, "calls", getattr(_counting_by_name, "calls", 0) + 1)  # noqa: B010
    return x.mul(vars(_counting_by_name)["calls"])


@pytest.mark.parametrize("program", [_counting, _counting_by_name])
def test_attributes_of_functions_are_state(program: Callable[[Tensor], Tensor]) -> None:
    vars(program).clear()
    captured = capture(program, (X,))
    assert not vars(program)
    for call in range(1, 4):
        torch.testing.assert_close(captured(X), X * call)
        assert vars(program) == {"calls": call}


def test_sets_of_data_dependent_numbers() -> None:
    def make() -> tuple[Callable[[Tensor], Tensor], set[int]]:
        seen = set[int]()

        def program(x: Tensor) -> Tensor:
            seen.add(int(x.argmax()))
            return x.mul(len(seen))

        return program, seen

    (mine, ours), (eager, theirs) = make(), make()
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    captured = capture(mine, (batches[0],), on_guard_failure="recapture", cache_size=20)
    for x in batches:
        assert torch.equal(captured(x), eager(x)) and ours == theirs


CONTAINERS: dict[str, Callable[[], Any]] = {
    "UserDict": lambda: collections.UserDict(n=1),
    "ChainMap": lambda: collections.ChainMap({"n": 1}, {"m": 2}),
    "defaultdict": lambda: collections.defaultdict(int, n=1),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_the_standard_library_are_state(kind: str) -> None:
    held = CONTAINERS[kind]()

    def program(x: Tensor) -> Tensor:
        held["n"] = held["n"] + 1
        held["sum"] = held.get("sum", 0) + x
        found: Tensor = held["sum"] * held["n"]
        return found

    captured = capture(program, (X,))
    assert dict(held).get("sum") is None
    for call in range(1, 4):
        torch.testing.assert_close(captured(X), X * call * (call + 1))


def test_values_that_are_weakly_kept_by_their_keys() -> None:
    module = torch.nn.Linear(3, 3)
    counts = weakref.WeakKeyDictionary({module: 0})

    def program(x: Tensor) -> Tensor:
        counts[module] += 1
        found: Tensor = module(x)
        return found.mul(counts[module])

    captured = capture(program, (X,))
    for call in range(1, 4):
        torch.testing.assert_close(captured(X), module(X) * call)


def test_what_an_object_keeps_to_itself_is_not_changed() -> None:
    held = threading.local()
    held.n = 0

    def program(x: Tensor) -> Tensor:
        held.n += 1
        return x.mul(held.n)

    with pytest.raises(UnsupportedProgramError, match="changes the contents of `held`"):
        capture(program, (X,))


class NotesItsBuffer(torch.nn.Module):
    """Keeps what it has seen in a buffer that is not saved."""

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", x.detach() * 2, persistent=False)
        return x - self.seen


def test_which_buffers_are_saved_is_state() -> None:
    module, eager = NotesItsBuffer(), NotesItsBuffer()
    captured = capture(module, (X,))
    assert not module._non_persistent_buffers_set and not module.state_dict()
    for call in range(4):
        assert torch.equal(captured(X * call), eager(X * call))
        assert module._non_persistent_buffers_set == eager._non_persistent_buffers_set == {"seen"}
        assert not module.state_dict()
        if call == 1:
            del module.seen, eager.seen


class Noting(list[Any]):
    """A list with attributes, of which it has none at first."""

    def append(self, item: Any) -> None:
        super().append(item)
        self.noted = len(self)


def test_attributes_of_lists_and_dicts_are_state() -> None:
    noted = Noting()

    def program(x: Tensor) -> Tensor:
        noted.append(x * 2)
        return x + noted.noted

    captured = capture(program, (X,))
    assert not noted and not vars(noted)
    for call in range(1, 4):
        assert torch.equal(captured(X), X + call)
        assert vars(noted) == {"noted": call}


def test_lists_that_count_their_items_are_no_logs() -> None:
    def made() -> tuple[Callable[[Tensor], Tensor], collections.UserList[int]]:
        counts = collections.UserList([1])

        def program(x: Tensor) -> Tensor:
            counts.append(len(counts))
            return x * len(counts)

        return program, counts

    (program, counts), (eager, theirs) = made(), made()
    captured = capture(program, (X,))
    for _ in range(3):
        assert torch.equal(captured(X), eager(X)) and counts == theirs


def test_a_path_in_state_is_a_value() -> None:
    held = types.SimpleNamespace(where=pathlib.Path("a/b"))

    def run(x: Tensor) -> Tensor:
        return x * (len(held.where.parts) + len(str(held.where / "x")) + len(held.where.name))

    program = capture(run, (torch.ones(2),), on_guard_failure="raise")
    held.where = pathlib.Path("a/b")
    assert torch.equal(program(torch.ones(2)), run(torch.ones(2)))
    held.where = pathlib.Path("a/b/c")
    with pytest.raises(InputMismatchError, match="where"):
        program(torch.ones(2))
