"""Programs that change the code that they run are refused; objects that they keep are those that they found."""

from __future__ import annotations

import array
import decimal
import fractions
import functools
import operator
import re
import types
import weakref
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


class Factor:
    def __init__(self) -> None:
        self.by = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.by


def another_dict() -> tuple[Any, str]:
    factor = Factor()

    def run(x: Tensor) -> Any:
        result = factor.scaled(x)
        factor.__dict__ = {"by": factor.by + 1}
        return result

    return run, "factor.__dict__"


def another_method() -> tuple[Any, str]:
    class Local(Doubling):
        pass

    scaled = Local()

    def run(x: Tensor) -> Any:
        result = scaled.scaled(x)
        Local.scaled = staticmethod(tripled)  # type: ignore[method-assign]
        return result

    return run, "Local.scaled"


def another_class_method() -> tuple[Any, str]:
    class Base:
        @classmethod
        def scaled(cls, x: Tensor) -> Tensor:
            return x * 2

    class Local(Base):
        pass

    def run(x: Tensor) -> Any:
        result = Local.scaled(x)
        Local.scaled = classmethod(lambda cls, x: x * 3)  # type: ignore[assignment]
        return result

    return run, "Local.scaled.__func__"


@pytest.mark.parametrize(
    "make",
    [
        another_class_method,
        other_defaults,
        other_named_defaults,
        other_code,
        another_class,
        another_dict,
        another_method,
    ],
)
def test_programs_that_change_their_code_are_refused_and_it_is_put_back(make: Callable[[], tuple[Any, str]]) -> None:
    run, path = make()
    with pytest.raises(UnsupportedProgramError, match=f"the program changes `.*{path}`"):
        capture(run, (X,))
    torch.testing.assert_close(run(X), X * 2)  # as if nothing had been captured


@pytest.mark.parametrize("name", ["__class__", "__dict__"])
def test_programs_that_change_what_an_argument_is_are_refused(name: str) -> None:
    values = {"__class__": Tripling, "__dict__": {"by": 3.0}}

    def run(x: Tensor, scaled: Any) -> Tensor:
        setattr(scaled, name, values[name])
        return x * 2

    scaled: Any = Doubling()
    scaled.by = 2.0
    with pytest.raises(UnsupportedProgramError, match=f"the program changes `scaled.{name}`"):
        capture(run, (X, scaled))
    assert type(scaled) is Doubling and vars(scaled) == {"by": 2.0}


class Shown(Factor):
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"shown": 1}


def test_a_class_may_show_another_dict_each_time() -> None:
    assert capture(lambda x, shown: shown.scaled(x), (X, Shown()))(X, Shown()).tolist() == [0, 2, 4]


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


def _kept() -> dict[str, tuple[Any, Any]]:
    return {
        "functions in C": (torch.sin, operator.neg),
        "objects": (object(), object()),
        "slices": (slice(1), slice(2)),
        "patterns": (re.compile("a"), re.compile("b")),
        "numbers": (decimal.Decimal(1), fractions.Fraction(1, 2)),
        "partials": (functools.partial(torch.sin), functools.partial(torch.cos)),
        "methods": (Doubling().__call__, Tripling().__call__),
        "functions": (lambda x: x, _function()),
        "operators": (torch.ops.aten.sin, torch.ops.aten.cos.default),
        "generators": (torch.Generator(), torch.Generator()),
        "arrays": (array.array("d", [1.0]), array.array("d", [2.0])),
        "sets": (frozenset({1}), frozenset({2})),
        "descriptors": (property(len), staticmethod(len)),
    }


def in_attributes(holder: Any) -> None:
    holder.one, holder.other = holder.other, holder.one


def in_a_list(holder: Any) -> None:
    holder.items.reverse()


def in_a_dict(holder: Any) -> None:
    holder.named["one"], holder.named["other"] = holder.named["other"], holder.named["one"]


PLACES: list[Callable[[Any], None]] = [in_attributes, in_a_list, in_a_dict]


@pytest.mark.parametrize("exchange", PLACES)
@pytest.mark.parametrize("kind", _kept())
def test_what_a_program_puts_elsewhere_is_the_very_object(kind: str, exchange: Callable[[Any], None]) -> None:
    one, other = _kept()[kind]
    holder = types.SimpleNamespace(one=one, other=other, items=[one, other], named={"one": one, "other": other})

    def run(x: Tensor) -> Tensor:
        exchange(holder)
        return x * 2

    captured = capture(run, (X,), on_guard_failure="recapture")
    for call in range(4):
        captured(X)
        found = [[holder.one, holder.other], holder.items, [*holder.named.values()]][PLACES.index(exchange)]
        assert all(map(operator.is_, found, [one, other] if call % 2 else [other, one]))


def test_a_weak_reference_that_a_program_puts_elsewhere_is_to_the_tensor_that_is_there() -> None:
    holder = types.SimpleNamespace(tensor=torch.ones(3), kept=None)
    holder.reference = weakref.ref(holder.tensor)

    def run(x: Tensor) -> Any:
        holder.kept = holder.reference
        return x * holder.reference()

    captured = capture(run, (X,), on_guard_failure="recapture")
    for _ in range(3):
        torch.testing.assert_close(captured(X), X)
        assert holder.kept() is holder.tensor
