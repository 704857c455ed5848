"""What libraries do: hooks put in at the first call, descriptors, dicts by tensors, names and positions of numbers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from functionalize import UnsupportedProgramError, capture

X = torch.ones(2)


class Hooking(nn.Module):
    """A module that registers a hook when it is first called, as transformers does to collect hidden states."""

    def __init__(self, register: Callable[[nn.Module], Any], before: int, keeps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.register, self.keeps = nn.Linear(2, 2), register, keeps
        self.hooked = False
        self.handle: Any = None
        for _ in range(before):
            self.layer.register_forward_hook(lambda m, i, o: o * 5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            handle = self.register(self.layer)
            self.hooked, self.handle = True, handle if self.keeps else None
        elif self.handle is not None:
            self.handle.remove()
            self.handle = None
        result: Tensor = self.layer(x)
        return result

    def numbers(self) -> list[int]:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
        return [len(getattr(self.layer, name)) for name in hooks]


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda m, i, o: o * 2),
    "with kwargs": lambda m: m.register_forward_hook(lambda m, a, k, o: o * 3, with_kwargs=True),
    "before": lambda m: m.register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
    "first": lambda m: m.register_forward_hook(lambda m, i, o: o + 1, prepend=True),
    "backward": lambda m: m.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),  # type: ignore[index]
}


@pytest.mark.parametrize("keeps", [False, True], ids=["left", "removed by the second call"])
@pytest.mark.parametrize("before", [0, 1], ids=["alone", "beside another one"])
@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_of_the_first_call_are_left(kind: str, before: int, keeps: bool) -> None:
    module, eager = (Hooking(REGISTER[kind], before, keeps) for _ in range(2))
    numbers = module.numbers()
    program = capture(module, (X.clone().requires_grad_(),))
    assert module.numbers() == numbers
    assert not module.hooked
    for number in range(4):
        x, y = ((X + number).requires_grad_() for _ in range(2))
        result, expected = program(x), eager(y)
        result.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close((result, x.grad), (expected, y.grad), rtol=0, atol=0)
        assert module.numbers() == eager.numbers()


def test_a_refused_program_leaves_no_hooks() -> None:
    layer = nn.Linear(2, 2)

    def program(x: Tensor) -> Any:
        layer.register_forward_hook(lambda m, i, o: o * 2, with_kwargs=False)
        return layer(x), (n for n in range(3))

    with pytest.raises(UnsupportedProgramError, match="generator"):
        capture(program, (X,))
    assert not layer._forward_hooks


def test_hooks_that_are_left_on_an_argument_are_refused() -> None:
    layer = nn.Linear(2, 2)

    def program(x: Tensor, module: nn.Module) -> Tensor:
        module.register_forward_hook(lambda m, i, o: o * 2)
        result: Tensor = module(x)
        return result

    with pytest.raises(UnsupportedProgramError, match="and does not remove it"):
        capture(program, (X, layer))
    assert not layer._forward_hooks


class Described:
    """A class whose methods are descriptors of the standard library."""

    weight = torch.ones(2)

    def times(self, factor: Any, x: Tensor) -> Tensor:
        result: Tensor = x * factor + self.weight
        return result

    twice = functools.partialmethod(times, 2)
    by_tensor = functools.partialmethod(times, torch.full((2,), 2.0))

    @functools.singledispatchmethod
    def of(self, x: Any) -> Any:
        return x * 2

    def forward(self, x: Tensor) -> Any:
        return self.twice(x) + self.by_tensor(x) + self.of(x)


def replace_the_partial(kind: Any) -> None:
    kind.twice = functools.partialmethod(kind.times, 3)


def write_what_is_bound(kind: Any) -> None:
    vars(kind)["by_tensor"].args[0].add_(1)


def register_another_method(kind: Any) -> None:
    kind.of.register(Tensor)(lambda self, x: x * 7)


@pytest.mark.parametrize("change", [replace_the_partial, write_what_is_bound, register_another_method])
def test_descriptors_are_state(change: Callable[[Any], None]) -> None:
    times = Described.__dict__["times"]
    methods = {
        "of": functools.singledispatchmethod(lambda self, x: x * 2),
        "by_tensor": functools.partialmethod(times, torch.full((2,), 2.0)),
    }
    kind: Any = type("Fresh", (Described,), methods)
    made = kind()
    program = capture(made.forward, (X,), on_guard_failure="recapture")
    for number in range(3):
        assert torch.equal(program(X + number), made.forward(X + number))
    change(kind)
    for number in range(3):
        assert torch.equal(program(X + number), made.forward(X + number))


@pytest.mark.parametrize("kind", [dict, WeakTensorKeyDictionary])
def test_the_order_of_a_dict_by_tensors_is_guarded(kind: type[MutableMapping[Tensor, Any]]) -> None:
    keys = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    held = kind()
    for number, key in enumerate(keys):
        held[key] = torch.full((2,), float(number + 1))

    def program(x: Tensor) -> Tensor:
        for key, value in held.items():
            x = x * value.sum() + key
        return x

    captured = capture(program, (X,), on_guard_failure="recapture")
    for key in keys:
        assert torch.equal(captured(X), program(X))
        held[key] = held.pop(key)
    assert torch.equal(captured(X), program(X))


def test_a_program_that_turns_a_dict_by_tensors() -> None:
    keys = torch.ones(2), torch.full((2,), 2.0)
    worlds = [{keys[0]: 3, keys[1]: 5} for _ in range(2)]

    def turning(held: dict[Tensor, int]) -> Callable[[Tensor], Tensor]:
        def program(x: Tensor) -> Tensor:
            key = next(iter(held))
            value = held.pop(key)
            held[key] = value
            return x * value + key

        return program

    captured, eager = capture(turning(worlds[0]), (X,)), turning(worlds[1])
    for number in range(4):
        assert torch.equal(captured(X + number), eager(X + number))


def test_a_call_follows_the_order_of_keys_with_tensors() -> None:
    first, second = torch.ones(2), torch.zeros(2)
    held = {(first, 1): 2, (second, 2): 3}

    def program(x: Tensor) -> Tensor:
        for (key, _), value in held.items():
            x = x * value + key
        return x

    captured = capture(program, (X,))
    before = captured(X)
    held[first, 1] = held.pop((first, 1))
    assert torch.equal(captured(X), program(X))
    assert not torch.equal(captured(X), before)


def test_names_made_of_whole_numbers() -> None:
    experts = {f"expert_{number}": float(number + 1) for number in range(3)}

    def program(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for index in (x > 1).nonzero():
            total = total + experts[f"expert_{index[0]}"] * x[index[0]]
        return total

    captured = capture(program, (torch.tensor([0.0, 2.0, 3.0]),))
    for values in ([0.0, 2.0, 3.0], [2.0, 0.0, 3.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
        assert torch.equal(captured(torch.tensor(values)), program(torch.tensor(values)))


def test_positions_in_lists() -> None:
    def program(x: Tensor, places: Tensor) -> Any:
        rows, columns = zip(*places, strict=True)
        x = x.clone()
        x[rows, columns] = 0.0
        return x, x[rows], x[:, list(columns)], x[(rows[0].item(), 2), columns[:2]]

    x = torch.arange(12.0).reshape(3, 4)
    captured = capture(program, (x, torch.tensor([[0, 1], [2, 3]])))
    for places in ([[0, 1], [2, 3]], [[1, 1], [0, 2]]):
        torch.testing.assert_close(captured(x, torch.tensor(places)), program(x, torch.tensor(places)), rtol=0, atol=0)


def test_slices_of_data_dependent_length_from_the_end() -> None:
    def program(x: Tensor, mask: Tensor) -> Any:
        found, count = x[mask], int(mask.sum())
        return found[-found.shape[0] :], x[count - 3 :], x[-count:]

    x = torch.arange(8.0).reshape(4, 2)
    captured = capture(program, (x, torch.tensor([True, False, True, True])))
    for bits in ([1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]):
        mask = torch.tensor(bits, dtype=torch.bool)
        torch.testing.assert_close(captured(x, mask), program(x, mask), rtol=0, atol=0)


class Referring:
    """An object with a weak reference to a tensor of its own."""

    def __init__(self, exchanges: bool) -> None:
        self.exchanges, self.first, self.second = exchanges, torch.ones(2), torch.full((2,), 5.0)
        self.reference: Any = weakref.ref(self.first)

    def program(self, x: Tensor) -> Tensor:
        held = self.reference()
        result = x + self.first + self.second + (100 if held is None else held)
        if self.exchanges:
            self.first = self.first * 2
            self.reference = weakref.ref(self.first)
        return result


@pytest.mark.parametrize("exchanges", [False, True])
def test_weak_references_to_tensors_that_are_exchanged(exchanges: bool) -> None:
    captured, eager = Referring(exchanges), Referring(exchanges)
    program = capture(captured.program, (X,), on_guard_failure="recapture")

    def refer_to_the_second(one: Referring) -> None:
        one.reference = weakref.ref(one.second)

    def refer_to_nothing(one: Referring) -> None:
        one.reference = weakref.ref(torch.ones(1))

    for change in (lambda one: None, refer_to_the_second, refer_to_nothing, refer_to_the_second):
        for one in (captured, eager):
            change(one)
        for number in range(2):
            assert torch.equal(program(X + number), eager.program(X + number))
        assert (captured.reference() is captured.first) == (eager.reference() is eager.first)
