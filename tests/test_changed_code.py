"""Programs that change the code that they run are refused; lists of numbers that they keep are those of the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize import UnsupportedProgramError, capture

X = torch.arange(3.0)


def tripled(x: Tensor, factor: float = 3.0) -> Tensor:
    return x * factor


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return x * 2


class Tripling(Doubling):
    def __call__(self, x: Tensor) -> Tensor:
        return x * 3


def _function() -> Callable[..., Tensor]:
    def scaled(x: Tensor, factor: Any = 2.0, *, by: Any = 1.0) -> Tensor:
        scaled: Tensor = x * factor * by
        return scaled

    return scaled


def other_defaults() -> tuple[Any, str]:
    scaled: Any = _function()

    def run(x: Tensor) -> Any:
        result = scaled(x)
        scaled.__defaults__ = (x + 1,)
        return result

    return run, "scaled.__defaults__"


def other_named_defaults() -> tuple[Any, str]:
    scaled: Any = _function()

    def run(x: Tensor) -> Any:
        result = scaled(x)
        scaled.__kwdefaults__ = {"by": scaled.__kwdefaults__["by"] + 1}
        return result

    return run, "scaled.__kwdefaults__"


def other_code() -> tuple[Any, str]:
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    def run(x: Tensor) -> Any:
        result = scaled(x)
        scaled.__code__ = tripled.__code__
        return result

    return run, "scaled.__code__"


def another_class() -> tuple[Any, str]:
    scaled: Any = Doubling()

    def run(x: Tensor) -> Any:
        result = scaled(x)
        scaled.__class__ = Tripling
        return result

    return run, "scaled.__class__"


def another_method() -> tuple[Any, str]:
    class Local(Doubling):
        pass

    scaled = Local()

    def run(x: Tensor) -> Any:
        result = scaled.scaled(x)
        Local.scaled = staticmethod(tripled)  # type: ignore[method-assign]
        return result

    return run, "Local.scaled"


@pytest.mark.parametrize("make", [other_defaults, other_named_defaults, other_code, another_class, another_method])
def test_programs_that_change_their_code_are_refused_and_it_is_put_back(make: Callable[[], tuple[Any, str]]) -> None:
    run, path = make()
    with pytest.raises(UnsupportedProgramError, match=f"the program changes `.*{path}`"):
        capture(run, (X,))
    torch.testing.assert_close(run(X), X * 2)  # as if nothing had been captured


def test_a_method_that_a_class_inherits_is_inherited_afterwards() -> None:
    class Local(Doubling):
        pass

    def run(x: Tensor) -> Any:
        result = Local.scaled(x)
        Local.scaled = staticmethod(tripled)  # type: ignore[method-assign]
        return result

    with pytest.raises(UnsupportedProgramError, match=r"changes `.*Local\.scaled`"):
        capture(run, (X,))
    assert "scaled" not in vars(Local)


def test_what_a_program_changes_and_puts_back_is_no_change() -> None:
    scaled: Any = Doubling()

    def run(x: Tensor) -> Any:
        scaled.__class__ = Tripling
        try:
            return scaled(x)
        finally:
            scaled.__class__ = Doubling

    torch.testing.assert_close(capture(run, (X,))(X), X * 3)


class Holder:
    def __init__(self) -> None:
        self.numbers, self.kept = [1.0, 2.0], list[Any]()


def keeps(holder: Holder, x: Tensor) -> Any:
    holder.kept = holder.numbers
    return x * holder.numbers[0]


def gives(holder: Holder, x: Tensor) -> Any:
    return x * holder.numbers[0], holder.numbers


def collects(holder: Holder, x: Tensor) -> Any:
    holder.kept = [*holder.kept, holder.numbers]
    return x * holder.numbers[0]


@pytest.mark.parametrize("program", [keeps, gives, collects])
@pytest.mark.parametrize("others", [[1.0, 2.0], [5.0, 2.0]], ids=["equal", "different"])
def test_a_list_of_numbers_that_the_caller_replaces_is_that_list(program: Any, others: list[float]) -> None:
    holders = Holder(), Holder()
    run, captured_program = (functools.partial(program, holder) for holder in holders)
    captured = capture(captured_program, (X,), on_guard_failure="recapture")
    for _ in range(4):
        found, expected = captured(X), run(X)
        torch.testing.assert_close(found, expected)
        for holder, result in zip(holders, (expected, found), strict=True):
            if program is gives:
                assert result[1] is holder.numbers
            else:
                assert holder.kept is holder.numbers or holder.kept[-1] is holder.numbers
            holder.numbers = others.copy()
