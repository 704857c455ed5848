"""Which code a program runs, and what that reaches: closures of one factory, decorators, methods that are replaced."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from functionalize import InputMismatchError, capture
from functionalize.python_state.code_names import names_in

Change = Callable[[], Any]
Program = Callable[[Tensor], Any]
World = tuple[Program, list[Change]]


def scaled(holder: Any) -> Program:
    return lambda x: x * holder.k


def counted(function: Program) -> Any:
    calls = types.SimpleNamespace(k=1)

    @functools.wraps(function)
    def wrapper(x: Tensor) -> Any:
        calls.k += 1
        return function(x) * calls.k

    return wrapper


def two_closures_of_one_factory() -> World:
    first, second = types.SimpleNamespace(k=2), types.SimpleNamespace(k=3)
    functions = [scaled(first), scaled(second)]
    return lambda x: functions[1](functions[0](x)), [lambda: setattr(second, "k", 5), lambda: setattr(first, "k", 7)]


def two_closures_by_name() -> World:
    first, second = types.SimpleNamespace(k=torch.ones(2)), types.SimpleNamespace(k=torch.ones(2))
    one, other = scaled(first), scaled(second)
    return lambda x: one(x) + other(x), [lambda: second.k.add_(1), lambda: setattr(second, "k", torch.zeros(2))]


def state_of_a_decorator() -> World:
    @counted
    def program(x: Tensor) -> Any:
        return x

    return lambda x: program(x), [lambda: None, lambda: None]


def variables_of_a_decorator() -> World:
    holder = types.SimpleNamespace(k=2)

    def decorated(function: Program) -> Any:
        @functools.wraps(function)
        def wrapper(x: Tensor) -> Any:
            return function(x) * holder.k

        return wrapper

    program = decorated(lambda x: x + 1)
    return lambda x: program(x), [lambda: setattr(holder, "k", 5)]


def a_method_of_a_class() -> World:
    class Scale:
        def of(self, x: Tensor) -> Any:
            return x * 2

    scale = Scale()
    return lambda x: scale.of(x), [lambda: setattr(Scale, "of", lambda self, x: x * 3)]


def a_method_behind_super() -> World:
    class Scale:
        def of(self, x: Tensor) -> Any:
            return x * 2

    class Shifted(Scale):
        def of(self, x: Tensor) -> Any:
            return super().of(x) + 1

    scale = Shifted()
    return lambda x: scale.of(x), [lambda: setattr(Scale, "of", lambda self, x: x * 3)]


def a_size_in_an_attribute() -> World:
    holder = types.SimpleNamespace(size=torch.Size([1, 2]))
    return lambda x: x.reshape(holder.size) * 2, [lambda: setattr(holder, "size", torch.Size([2, 1]))] * 2


def a_method_above() -> World:
    holder = types.SimpleNamespace(k=2)

    class Scale:
        def of(self, x: Tensor) -> Any:
            return x * holder.k

    class Shifted(Scale):
        def of(self, x: Tensor) -> Any:
            return super().of(x) + 1

    shifted = Shifted()
    changes = [lambda: setattr(holder, "k", 5), lambda: setattr(Shifted, "of", lambda self, x: x * 7)]
    return lambda x: shifted.of(x), changes


def forward_above() -> World:
    holder = types.SimpleNamespace(k=2)

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * holder.k

    class Shifted(Scale):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + 1

    return Shifted(), [lambda: setattr(holder, "k", 5)]


def forward_of_a_class() -> World:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2

    module = Scale()
    replaced = [lambda: setattr(Scale, "forward", lambda self, x: x * 4)]
    return module, [*replaced, lambda: setattr(module, "forward", lambda x: x * 5)]


def a_static_method_in_c() -> World:
    class Activated(nn.Module):
        act = staticmethod(torch.relu)

        def forward(self, x: Tensor) -> Any:
            return self.act(x - 1)

    return Activated(), [lambda: setattr(Activated, "act", staticmethod(torch.sigmoid))]


def the_class_of_a_module() -> World:
    module = nn.ReLU()
    return lambda x: module(x - 1), [lambda: setattr(module, "__class__", nn.Sigmoid)]


def the_class_of_an_object() -> World:
    class One:
        def of(self, x: Tensor) -> Any:
            return x * 2

    class Other(One):
        def of(self, x: Tensor) -> Any:
            return x * 3

    one = One()
    return lambda x: one.of(x), [lambda: setattr(one, "__class__", Other)]


def defaults_and_code() -> World:
    def helper(x: Tensor, factor: Any = 2, *, shift: Any = 1) -> Any:
        return x * factor + shift

    def other(x: Tensor, factor: Any = 2, *, shift: Any = 1) -> Any:
        return x * factor - shift

    changes: list[Change] = [
        lambda: setattr(helper, "__defaults__", (5,)),
        lambda: setattr(helper, "__defaults__", (torch.full((2,), 6.0),)),
        lambda: setattr(helper, "__kwdefaults__", {"shift": 7}),
        lambda: (helper.__kwdefaults__ or {}).update(shift=8),
        lambda: setattr(helper, "__code__", other.__code__),
    ]
    return lambda x: helper(x), changes


def an_attribute_that_a_class_inherited() -> World:
    class Base:
        k = 2

    class Derived(Base):
        pass

    return lambda x: x * Derived.k, [lambda: setattr(Base, "k", 3), lambda: setattr(Derived, "k", 4)]


def methods_of_all_kinds() -> World:
    holder = types.SimpleNamespace(k=2)

    class Scale:
        @staticmethod
        def static(x: Tensor) -> Any:
            return x * holder.k

        @classmethod
        def of_class(cls, x: Tensor) -> Any:
            return x * holder.k

        @property
        def factor(self) -> Any:
            return holder.k

        def __mul__(self, x: Tensor) -> Any:
            return x + holder.k

    scale = Scale()
    changes: list[Change] = [
        lambda: setattr(holder, "k", 5),
        lambda: setattr(Scale, "static", staticmethod(lambda x: x * 9)),
        lambda: setattr(Scale, "of_class", classmethod(lambda cls, x: x * 4)),
        lambda: setattr(Scale, "factor", property(lambda self: 7)),
        lambda: setattr(Scale, "__mul__", lambda self, x: x - 1),
    ]
    return lambda x: scale.static(x) + scale.of_class(x) * 10 + scale.factor * 100 + scale * x, changes


def methods_of_all_kinds_of_a_module() -> World:
    holder = types.SimpleNamespace(k=2)

    class Scale(nn.Module):
        @staticmethod
        def static(x: Tensor) -> Any:
            return x * holder.k

        @property
        def factor(self) -> Any:
            return holder.k

        def forward(self, x: Tensor) -> Any:
            return self.static(x) + self.factor

    changes = [lambda: setattr(holder, "k", 5), lambda: setattr(Scale, "factor", property(lambda self: 7))]
    return Scale(), changes


def a_function_of_autograd() -> World:
    holder = types.SimpleNamespace(k=2)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            return x * holder.k

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * holder.k

    apply: Any = Scale.apply
    return lambda x: apply(x), [lambda: setattr(holder, "k", 5)]


def an_object_that_the_program_makes() -> World:
    holder = types.SimpleNamespace(k=2)

    class Scale:
        def of(self, x: Tensor) -> Any:
            return x * holder.k

    changes = [lambda: setattr(holder, "k", 5), lambda: setattr(Scale, "of", lambda self, x: x * 8)]
    return lambda x: Scale().of(x), changes


def a_class_that_is_a_setting() -> World:
    class Settings:
        k = 2

    class Scale:
        settings: Any = Settings

        def of(self, x: Tensor) -> Any:
            return x * self.settings.k

    scale = Scale()
    changes = [lambda: setattr(Settings, "k", 5), lambda: setattr(Scale, "settings", types.SimpleNamespace(k=9))]
    return lambda x: scale.of(x), changes


def a_descriptor() -> World:
    class Reading:
        def __init__(self) -> None:
            self.k = 2

        def __get__(self, owner: Any, kind: Any) -> Any:
            return self.k

    reading: Any = Reading()

    class Scale:
        k = reading

    scale = Scale()
    return lambda x: x * scale.k, [lambda: setattr(reading, "k", 7)]


def a_named_tuple_with_methods() -> World:
    holder = types.SimpleNamespace(k=2)

    class Scale(NamedTuple):
        k: int = 2

        def of(self, x: Tensor) -> Any:
            return x * self.k + holder.k

    held = types.SimpleNamespace(scale=Scale())
    return lambda x: held.scale.of(x), [lambda: setattr(held, "scale", Scale(5)), lambda: setattr(holder, "k", 3)]


def an_object_behind_a_weak_reference() -> World:
    class Holder:
        k = 2

    one, other = Holder(), Holder()
    held = types.SimpleNamespace(reference=weakref.ref(one))
    other.k = 5
    changes: list[Change] = [
        lambda: setattr(one, "k", 4),
        lambda: setattr(held, "reference", weakref.ref(other)),
    ]
    return lambda x: x * held.reference().k, changes


def the_call_of_a_module() -> World:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net: Any = Net()
    return net, [lambda: setattr(Net, "__call__", lambda self, x: x * 3)]


def slots_of_a_module() -> World:
    class Net(torch.nn.Module):
        __slots__ = ("by", "shift")

        def __init__(self) -> None:
            super().__init__()
            self.by, self.shift = 2, torch.ones(2)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by + self.shift

    net = Net()
    changes: list[Change] = [lambda: setattr(net, "by", 3), lambda: setattr(net, "shift", torch.zeros(2))]
    return net, changes


def methods_whose_names_are_computed() -> World:
    holder = types.SimpleNamespace(k=2)

    class Net(torch.nn.Module):
        method = "shift"

        def shift(self, x: Tensor) -> Any:
            return x + 1

        def scale(self, x: Tensor) -> Any:
            return x * holder.k

        def forward(self, x: Tensor) -> Any:
            return getattr(self, self.method)(x) + operator.methodcaller("scale", x)(self)

    changes = [lambda: setattr(Net, "shift", lambda self, x: x + 5), lambda: setattr(holder, "k", 3)]
    return Net(), changes


def forward_between_a_class_and_a_library() -> World:
    class Rectified(torch.nn.ReLU):
        pass

    class Net(Rectified):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    return Net(), [lambda: setattr(Rectified, "forward", lambda self, x: x * 3)]


def the_call_of_a_partial() -> World:
    class Bound(functools.partial[Any]):
        pass

    bound: Any = Bound(torch.mul, 2)
    return bound, [lambda: setattr(Bound, "__call__", lambda self, x: x * 3)]


def methods_that_python_calls() -> World:
    class Net(torch.nn.Module):
        def __getattr__(self, name: str) -> Any:
            return 2 if name == "scale" else super().__getattr__(name)

        def __len__(self) -> int:
            return 3

        def forward(self, x: Tensor) -> Any:
            return x * self.scale + len(self)

    attribute = torch.nn.Module.__getattr__
    changes: list[Change] = [
        lambda: setattr(Net, "__len__", lambda self: 7),
        lambda: setattr(Net, "__getattr__", lambda self, name: 5 if name == "scale" else attribute(self, name)),
    ]
    return Net(), changes


def a_tensor_that_says_whether_a_module_trains() -> World:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if self.training else x * 3

    net: Any = Net()
    net.training = torch.tensor(True)
    return net, [lambda: net.training.fill_(False), lambda: setattr(net, "training", torch.tensor(True)), net.eval]


WORLDS = [
    methods_whose_names_are_computed,
    forward_between_a_class_and_a_library,
    the_call_of_a_partial,
    methods_that_python_calls,
    a_tensor_that_says_whether_a_module_trains,
    methods_of_all_kinds,
    the_call_of_a_module,
    slots_of_a_module,
    methods_of_all_kinds_of_a_module,
    a_function_of_autograd,
    a_class_that_is_a_setting,
]
WORLDS += [an_object_that_the_program_makes, a_descriptor, a_named_tuple_with_methods]
WORLDS += [an_object_behind_a_weak_reference]
WORLDS += [two_closures_of_one_factory, two_closures_by_name, state_of_a_decorator, variables_of_a_decorator]
WORLDS += [
    a_method_of_a_class,
    a_method_behind_super,
    a_size_in_an_attribute,
    a_method_above,
    forward_above,
    forward_of_a_class,
    the_class_of_a_module,
]
WORLDS += [the_class_of_an_object, defaults_and_code, an_attribute_that_a_class_inherited]


@pytest.mark.parametrize("make", WORLDS)
def test_what_was_changed_between_calls_is_followed(make: Callable[[], World]) -> None:
    (program, changes), (eager, theirs) = make(), make()
    captured = capture(program, (torch.ones(2),), on_guard_failure="recapture", cache_size=16)
    for number, (mine, other) in enumerate(zip([lambda: None, *changes], [lambda: None, *theirs], strict=True)):
        mine()
        other()
        x = torch.tensor([1.0, number])
        assert torch.equal(captured(x), eager(x)), number


def test_a_method_that_was_replaced_is_refused_by_its_name() -> None:
    program, changes = a_method_of_a_class()
    captured = capture(program, (torch.ones(2),))
    changes[0]()
    with pytest.raises(InputMismatchError, match=r"Scale\.of` is <function"):
        captured(torch.ones(2))


def test_a_program_that_goes_another_way_for_fake_tensors_goes_that_of_eager() -> None:
    """As transformers' masks: `torch.compiler.is_compiling()` is false as well."""
    from functionalize._torch import FakeTensor

    def is_fake(x: Any) -> bool:
        return isinstance(x, FakeTensor) or (x is not None and isinstance(x, (FakeTensor, str)))

    def program(x: Tensor) -> Any:
        return x * 2 if is_fake(x) or not isinstance(x, (FakeTensor, Tensor)) else x * 3

    assert capture(program, (torch.ones(2),))(torch.ones(2)).tolist() == [3, 3]
    assert "isinstance" not in is_fake.__globals__


def test_masks_of_libraries_are_those_of_eager() -> None:
    masking = pytest.importorskip("transformers.utils.import_utils")

    def program(x: Tensor) -> Any:
        return x * 2 if masking.is_fake_tensor(x) else x * 3

    assert capture(program, (torch.ones(2),))(torch.ones(2)).tolist() == [3, 3]


def test_defaults_by_name_are_state() -> None:
    def new() -> Any:
        def program(x: Tensor, *, counts: list[int] = [1]) -> Any:  # noqa: B006
            counts.append(2)
            return x * sum(counts)

        return program

    program, eager = new(), new()
    captured, x = capture(program, (torch.ones(2),)), torch.ones(2)
    for start in (1, 1, 7):
        if start > 1:
            program.__kwdefaults__, eager.__kwdefaults__ = {"counts": [start]}, {"counts": [start]}
        assert torch.equal(captured(x), eager(x))


@pytest.mark.parametrize(
    ("source", "computes"),
    [
        ("getattr(m, 'scale')(x, n)", False),
        ("getattr(m.of(x), 'scale', getattr(m, 'shift', x + 1))", False),
        ("getattr(m, n)", True),
        ("getattr(m, 'sca' + n)(x, 'scale')", True),
        ("getattr(m, f'scale_{n}', 'scale')", True),
        ("map(getattr, m, n)", True),
    ],
)
def test_names_that_code_computes(source: str, computes: bool) -> None:
    assert names_in(eval(f"lambda m, n, x: {source}").__code__).computes is computes
