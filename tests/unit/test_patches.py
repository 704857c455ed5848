"""Names that are replaced for a while: by whom they are found, and that they come back."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from functionalize import capture
from functionalize.patches import ABSENT, Patch, Patches


def adds(number: int) -> Any:
    return lambda before: lambda x: before(x) + number


def in_thread(run: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


def test_another_thread_finds_the_original() -> None:
    original = math.floor
    with Patches([Patch(math, "floor", adds(1))]):
        assert (math.floor(2.5), in_thread(lambda: math.floor(2.5))) == (3, 2)
    assert math.floor is original


def test_rows_that_are_shared_are_found_by_all_threads() -> None:
    with Patches([Patch(math, "floor", adds(1), shared=True)]):
        assert in_thread(lambda: math.floor(2.5)) == 3
    assert math.floor(2.5) == 2


def test_a_replacement_within_another_one_calls_it() -> None:
    original = math.floor
    with Patches([Patch(math, "floor", adds(1))]):
        with Patches([Patch(math, "floor", adds(10))]):
            assert math.floor(2.5) == 13
        assert math.floor(2.5) == 3
    assert math.floor is original


def test_a_name_that_others_replace_between_two_uses_keeps_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (7, 9):

        def constant(x: float, value: int = value) -> int:
            return value

        monkeypatch.setattr(math, "floor", constant)
        with Patches([Patch(math, "floor", adds(1))]):
            assert (math.floor(2.5), in_thread(lambda: math.floor(2.5))) == (value + 1, value)
            assert math.floor.__name__ == "constant"
        assert math.floor is constant


def test_threads_may_end_in_any_order() -> None:
    original, entered, ended = math.floor, threading.Event(), threading.Event()
    seen: list[int] = []

    def run() -> None:
        with Patches([Patch(math, "floor", adds(10))]):
            entered.set()
            ended.wait(10)
            seen.append(math.floor(2.5))

    thread = threading.Thread(target=run)
    with Patches([Patch(math, "floor", adds(1))]):
        thread.start()
        assert entered.wait(10)
        assert math.floor(2.5) == 3
    ended.set()
    thread.join()
    assert seen == [12]
    assert math.floor is original


def test_an_error_while_rows_are_installed_takes_back_those_that_were() -> None:
    original = math.floor

    def fails(_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Patches([Patch(math, "floor", adds(1)), Patch(math, "ceil", fails)]):
        pass
    assert math.floor is original


def test_a_name_that_was_not_there_goes_again() -> None:
    owner: Any = type("Owner", (), {})
    with Patches([Patch(owner, "new", lambda before: lambda _: before is ABSENT)]):
        assert owner().new() is True
    assert not hasattr(owner, "new")


def test_rows_can_be_suspended_and_installed_later() -> None:
    with Patches([], later=lambda: [Patch(math, "floor", adds(1))]) as patches:
        assert math.floor(2.5) == 2
        patches.install_later()
        assert math.floor(2.5) == 3
        with patches.suspended():
            assert math.floor(2.5) == 2
        assert math.floor(2.5) == 3


def test_data_dependent_numbers_have_the_class_that_eager_gives() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        number = x.sum().item()
        match number:
            case float():
                return x * 2 if number.__class__ is float else x * 3
            case _:
                return x * 4

    x = torch.arange(3.0)
    assert torch.equal(capture(program, (x,))(x), program(x))


@pytest.mark.parametrize(
    "function", ["math.sqrt(x.sum().item())", "max(x.sum().item(), 2.5)", "math.gamma(x[1].item())"]
)
def test_a_function_that_is_looked_up_before_there_is_a_number_decides_nothing(function: str) -> None:
    names = {"math": math}
    exec(f"def program(x):\n    return x * {function}", names)
    program: Any = names["program"]
    captured = capture(program, (torch.arange(3.0),))
    for factor in (1, 2, 5):
        x = torch.arange(3.0) * factor
        assert torch.equal(captured(x), program(x))
    assert len(captured.variants) == 1 and not captured.variants[0].decisions
