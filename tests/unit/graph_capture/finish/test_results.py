"""What a captured program returns: what eager returns, any object, made anew at each call, its tensors the call's own.

Each kind of object holds a tensor that is computed, an input, and a view of the input. A call is held against eager's
twin in all that can be reached from both: classes, attributes, items, which objects and tensors are one, which share
memory, gradients.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import itertools
import threading
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from functionalize import UnsupportedProgramError, capture
from functionalize._torch import FakeTensor

Function = Callable[..., Any]


class Color(enum.Enum):
    RED = 1


class Plain:
    made = 0

    def __init__(self, y: Tensor, x: Tensor) -> None:
        type(self).made += 1
        self.y, self.both, self.color, self.size = y, [y, x], Color.RED, x.shape


class Slotted:
    __slots__ = ("__weakref__", "late", "x", "y")

    def __init__(self, y: Tensor, x: Tensor) -> None:
        self.y, self.x = y, x  # and `late` is never set


class HalfSlotted(Slotted):
    def __init__(self, y: Tensor, x: Tensor) -> None:
        super().__init__(y, x)
        self.more = {"y": y}


class Closed:
    """Cannot be set from outside, and nothing that it says of itself is true."""

    def __init__(self, y: Tensor, x: Tensor) -> None:
        self.__dict__["y"], self.__dict__["x"] = y, x

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


@dataclasses.dataclass
class Data:
    y: Tensor
    x: Tensor
    count: int = 3
    log: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: Tensor
    x: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    y: Tensor
    x: Tensor


@dataclasses.dataclass(frozen=True)
class Key:
    """Hashed by what it has."""

    name: str
    number: int


class Pair(NamedTuple):
    y: Tensor
    x: Tensor


class TaggedPair(Pair):
    tag: Any = None


class MyDict(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("read only")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("not to be gone through")


class MyList(list[Any]):
    note: Any = None


class MyOrderedDict(OrderedDict[Any, Any]):
    pass


class MyInt(int):
    tensor: Any = None


class MyModule(nn.Module):
    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.register_buffer("y", y)
        self.inner = nn.Identity()


def _with(made: Any, **attributes: Any) -> Any:
    vars(made).update(attributes)
    return made


def _cycle(y: Tensor, x: Tensor) -> Any:
    made = Plain(y, x)
    child = types.SimpleNamespace(parent=made, y=y)
    made.child = child  # type: ignore[attr-defined]
    made.itself = (made, [child])  # type: ignore[attr-defined]
    return made


def _tuple_in_itself(y: Tensor, x: Tensor) -> Any:
    inner: list[Any] = [y]
    made = (inner, x)
    inner.append(made)
    return made


def _node(y: Tensor, x: Tensor) -> Any:
    made = Plain(y, x)
    made.ref = weakref.ref(made)  # type: ignore[attr-defined]
    made.method = made.__eq__  # type: ignore[attr-defined]
    return made


def _moved_to_end(y: Tensor, x: Tensor) -> Any:
    made = MyOrderedDict(a=y, b=x, c=1)
    made.move_to_end("a")
    return _with(made, note=[x])


def _my_dict(y: Tensor, x: Tensor) -> Any:
    made = MyDict(y=y)
    dict.__setitem__(made, "x", x)
    return _with(made, note=y)


def _closed_over(y: Tensor, x: Tensor) -> Any:
    count = 2

    def add(z: Tensor, *, other: Tensor = x) -> Any:
        return z + y * count + other

    def twice(z: Tensor, scale: Any = y) -> Any:
        return add(add(z)) * scale

    return _with(twice, note=x), add


KINDS: dict[str, Function] = {
    "plain": Plain,
    "plain in a list": lambda y, x: [Plain(y, x), {"k": (Plain(x, y),)}],
    "slots": Slotted,
    "slots and attributes": HalfSlotted,
    "closed": Closed,
    "dataclass": lambda y, x: Data(y, x, log=[y]),
    "frozen dataclass": Frozen,
    "frozen dataclass with slots": FrozenSlots,
    "set": lambda y, x: {y},
    "frozenset": lambda y, x: frozenset({y}),
    "set of keys": lambda y, x: [{Key("a", 1)}, y],
    "dict by keys": lambda y, x: {Key("a", 1): y, Key("b", 1): x},
    "dict by tensors": lambda y, x: [{y: x}],
    "deque": lambda y, x: deque([y, x, y], maxlen=2),
    "defaultdict": lambda y, x: defaultdict(list, y=[y], x=[x]),
    "defaultdict of its own": lambda y, x: defaultdict(lambda: y, x=x),
    "OrderedDict": lambda y, x: OrderedDict(y=y, x=x),
    "Counter": lambda y, x: [Counter("abca"), y],
    "UserDict": lambda y, x: UserDict(y=y, x=x),
    "SimpleNamespace": lambda y, x: types.SimpleNamespace(y=y, x=[x]),
    "named tuple": Pair,
    "named tuple with attributes": lambda y, x: _with(TaggedPair(y, x), tag=x),
    "class of dict": _my_dict,
    "class of list": lambda y, x: _with(MyList([y, x]), note=y),
    "class of OrderedDict": _moved_to_end,
    "class of int": lambda y, x: _with(MyInt(3), tensor=y),
    "enum": lambda y, x: [Color.RED, y],
    "partial": lambda y, x: functools.partial(torch.add, y, alpha=2),
    "partial of a method": lambda y, x: functools.partial(y.add, x),
    "method": lambda y, x: Plain(y, x).__eq__,
    "functions": _closed_over,
    "list iterator": lambda y, x: iter([y, x]),
    "tuple iterator": lambda y, x: iter((y, x)),
    "enumerate": lambda y, x: enumerate([y, x]),
    "chain": lambda y, x: itertools.chain([y], [x]),
    "range and slice": lambda y, x: [range(3), slice(1, 2), y, torch.Size([2])],
    "module": lambda y, x: MyModule(y),
    "cycle": _cycle,
    "tuple in itself": _tuple_in_itself,
    "references": _node,
    "the same twice": lambda y, x: (lambda made: [made, made, (made,)])(Plain(y, x)),
    "a list twice": lambda y, x: (lambda made: (made, made))([y, x]),
    "distribution": lambda y, x: torch.distributions.Normal(y, x.exp()),
    "distribution of many": lambda y, x: torch.distributions.Independent(torch.distributions.Normal(y, x.exp()), 1),
    "packed": lambda y, x: PackedSequence(y, torch.tensor([2, 2])),
    "max": lambda y, x: [y.max(0), Plain(y, x)],
}


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object consists of, by another way than the one that is tested."""
    if isinstance(value, dict):
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        yield from ((part, one) for item in base.items(value) for part, one in zip(("key", "item"), item, strict=True))
        yield "factory", getattr(value, "default_factory", None)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        of: Any = next(kind for kind in (list, tuple, set, frozenset, deque) if isinstance(value, kind))
        yield from (("item", item) for item in of.__iter__(value))
        yield "length", getattr(value, "maxlen", None)
    elif isinstance(value, types.FunctionType):
        yield "code", value.__code__
        yield from (("cell", cell) for cell in value.__closure__ or ())
        yield from (("default", item) for item in (value.__defaults__, value.__kwdefaults__))
    elif isinstance(value, functools.partial):
        yield from (("part", item) for item in (value.func, value.args, value.keywords))
    elif isinstance(value, weakref.ref):
        yield "target", value()
    elif isinstance(value, types.CellType):
        yield "content", value.cell_contents
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield "self", value.__self__
        yield "name", value.__name__
    elif hasattr(value, "__next__"):
        yield from (("iterated", item) for item in gc.get_referents(value))
    if not isinstance(value, (type, types.ModuleType)):
        yield from sorted((getattr(value, "__dict__", None) or {}).items())
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        yield from ((name, getattr(value, name, "not set")) for name in slots if name != "__weakref__")


def _reached(root: Any, into: dict[int, Any] | None = None) -> list[Any]:
    """All that can be reached from a value, in words that are the same for twins."""
    found: list[Any] = []
    numbers: dict[int, int] = {}
    storages: dict[int, int] = {}
    kept: dict[int, Any] = {} if into is None else into

    def visit(value: Any) -> None:
        kept[id(value)] = value
        if isinstance(value, (torch.device, torch.dtype)):  # eager makes new ones, which nobody can tell from others
            found.append(value)
            return
        known = id(value) in numbers
        number = numbers.setdefault(id(value), len(numbers))
        if isinstance(value, Tensor):
            storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            look = (tuple(value.shape), value.stride(), value.dtype, value.requires_grad, value.is_leaf)
            found.append((number, storage, look, value.detach().tolist()))
        elif known:
            found.append(number)
        elif isinstance(value, (int, str, float, types.NoneType, type, enum.Enum, types.CodeType)):
            found.append((value, type(value)))
            if isinstance(value, MyInt):
                visit(vars(value))
        else:
            found.append(type(value))
            for name, part in _parts(value):
                found.append(name)
                visit(part)

    visit(root)
    return found


def _tensors(root: Any) -> list[Tensor]:
    found: dict[int, Any] = {}
    _reached(root, found)
    return [value for value in found.values() if isinstance(value, Tensor)]


def _program(make: Function) -> Function:
    def program(x: Tensor) -> Any:
        return make(x * 2 + 1, x)

    return program


def _input(requires_grad: bool) -> Tensor:
    return torch.arange(1.0, 5.0).requires_grad_(requires_grad)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_result_is_what_eager_returns(make: Function, requires_grad: bool) -> None:
    func = _program(make)
    program = capture(func, (torch.zeros(4, requires_grad=requires_grad),))
    for _ in range(3):
        x, twin = _input(requires_grad), _input(requires_grad)
        result, expected = program(x), func(twin)
        assert _reached((x, result)) == _reached((twin, expected))
        assert not any(isinstance(tensor, FakeTensor) for tensor in _tensors(result))


def _is_made(value: Any) -> bool:
    """Whether eager makes another one in each call: a container, or an object of a class of this module."""
    old = (type, types.ModuleType, types.CodeType, enum.Enum, int, str)
    made = isinstance(value, (list, dict, set, deque, types.CellType)) or hasattr(value, "__dict__")
    of_module = isinstance(value, types.FunctionType) and "<locals>" not in value.__qualname__
    return made and not isinstance(value, old) and not of_module


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_result_is_made_anew(make: Function) -> None:
    program = capture(_program(make), (torch.zeros(4),))
    x, other = _input(False), _input(False) + 1
    first, second = program(x), program(other)
    found: list[dict[int, Any]] = [{}, {}]
    shown = _reached(first, found[0])
    _reached(second, found[1])
    shared = [found[0][key] for key in found[0].keys() & found[1].keys()]
    assert [value for value in shared if isinstance(value, Tensor) or _is_made(value)] == []
    assert _reached(first) == shown  # the second call did nothing to the first one's result


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_gradients_flow_through_what_a_result_holds(make: Function) -> None:
    func = _program(make)
    program = capture(func, (torch.zeros(4, requires_grad=True),))
    gradients = []
    for one in (program, func):
        x = _input(True)
        found = [tensor for tensor in _tensors(one(x)) if tensor.requires_grad and tensor is not x]
        loss = sum(((n + 1) * (tensor * tensor).sum() for n, tensor in enumerate(found)), (x * 0).sum())
        gradients.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*gradients)


# What was there before


class Config:
    def __init__(self) -> None:
        self.name, self.inner = "c", types.SimpleNamespace(lock=threading.Lock())


CONFIG = Config()
CONSTANTS = [1, 2]


@functools.lru_cache
def cached_key(number: int) -> Key:
    return Key("cached", number)


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.config, self.history, self.last = CONFIG, [torch.zeros(4)], None

    def forward(self, x: Tensor) -> Any:
        made = Plain(x * self.weight, x)
        made.given = (self, self.config, self.config.inner, CONSTANTS, self.weight, self.history, len, Keeper)  # type: ignore[attr-defined]
        made.key = cached_key(4)  # type: ignore[attr-defined]
        return made


def test_what_was_there_before_is_given_as_it_is() -> None:
    model = Keeper()
    program = capture(model, (torch.zeros(4),))
    for _ in range(3):
        result, expected = program(torch.ones(4)), model(torch.ones(4))
        assert result.given == expected.given
        assert all(one is other for one, other in zip(result.given, expected.given, strict=True))
        assert result.key is expected.key
        assert torch.equal(result.y, expected.y)


@pytest.mark.parametrize("old", [CONFIG, CONSTANTS, CONFIG.inner.lock, Color.RED, len])
def test_a_result_that_was_there_before(old: Any) -> None:
    program = capture(lambda x: old, (torch.zeros(4),))
    assert program(torch.ones(4)) is old
    both = capture(lambda x: (x + 1, [old]), (torch.zeros(4),))
    first, second = both(torch.ones(4)), both(torch.ones(4))
    assert first[1][0] is second[1][0] is old
    assert first[1] is not second[1]


def test_arguments_that_are_returned_are_those_of_the_call() -> None:
    def program(x: Tensor, cache: dict[str, Any], items: list[Tensor], data: Data) -> Any:
        cache["y"] = data.x * 2
        return types.SimpleNamespace(y=cache, items=items), items, data, cache["y"]

    def given() -> tuple[Any, ...]:
        x = torch.ones(4)
        return x, {"y": x}, [x], Data(x, x + 1)

    captured = capture(program, given())
    for _ in range(2):
        args, twins = given(), given()
        result, expected = captured(*args), program(*twins)
        assert _reached((args, result)) == _reached((twins, expected))
        assert result[0].y is args[1]
        assert result[1] is args[2]
        assert result[2] is args[3]


def test_an_object_that_is_returned_and_left_is_one() -> None:
    def program(x: Tensor, log: list[Any], last: dict[str, Any]) -> Any:
        made = Plain(x + 1, x)
        log.append(made)
        last["made"] = [made, {"again": made}]
        return made, made.both

    captured = capture(program, (torch.zeros(4), [], {}))
    for _ in range(2):
        args: Any = (_input(False), [], {})
        twins: Any = (_input(False), [], {})
        result, expected = captured(*args), program(*twins)
        assert _reached((args, result)) == _reached((twins, expected))
        assert result[0] is args[1][0]


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda y: {"y": [y]},
    "list": lambda y: [y, {"y": y}],
    "tuple": lambda y: (y, [y]),
    "named tuple": lambda y: Pair(y, y),
    "deque": lambda y: deque([y], maxlen=2),
    "OrderedDict": lambda y: OrderedDict(y=y),
    "defaultdict": lambda y: defaultdict(list, y=[y]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_that_is_returned_and_kept_is_one(kind: str) -> None:
    state, make = types.SimpleNamespace(last=None), CONTAINERS[kind]

    def program(x: Tensor, log: list[Any]) -> Any:
        kept, logged = make(x + 1), make(x + 2)
        state.last = {"kept": kept}
        log.append(logged)
        return kept, {"logged": logged}

    captured, found = capture(program, (torch.zeros(4), [])), []
    for call in (captured, program):
        log: list[Any] = []
        result = call(torch.zeros(4), log)
        assert result[0] is state.last["kept"]
        assert result[1]["logged"] is log[0]
        found.append(_reached((result, log, state.last)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_that_is_returned_twice_is_one(kind: str) -> None:
    def program(x: Tensor) -> Any:
        made = CONTAINERS[kind](x + 1)
        return made, [made, ()], ()

    x = torch.zeros(4)
    result = capture(program, (x,))(x)
    assert result[0] is result[1][0]
    assert _reached(result) == _reached(program(x))


def test_state_that_keeps_what_is_returned() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [torch.zeros(4)]

        def forward(self, x: Tensor) -> Any:
            self.kept[0] = x + self.kept[0]
            return Data(self.kept[0], x, log=self.kept)

    model, twin = Remembering(), Remembering()
    program = capture(model, (torch.zeros(4),))
    for _ in range(3):
        result, expected = program(_input(False)), twin(_input(False))
        assert _reached((result, model.kept)) == _reached((expected, twin.kept))
        assert result.log is model.kept


def test_functions_and_classes_that_know_state() -> None:
    scale = nn.Linear(4, 4)
    factor = [torch.full((4,), 2.0)]

    class Scaled:
        def __init__(self, x: Tensor) -> None:
            self.x, self.factor = x, factor

        def get(self) -> Any:
            return scale(self.x) * factor[0]

    def program(x: Tensor) -> Any:
        return Scaled(x + 1), lambda z: z * factor[0] + scale.weight[0] + x

    captured = capture(program, (torch.zeros(4),))
    for _ in range(2):
        (made, function), (twin, expected) = captured(_input(False)), program(_input(False))
        factor[0] = factor[0] + 1
        assert type(made) is Scaled
        assert made.factor is factor
        assert torch.equal(made.get(), twin.get())
        assert torch.equal(function(made.x), expected(made.x))
        factor[0] = factor[0] - 1


# What holds numbers, and what is written


def test_numbers_of_the_graph_in_objects() -> None:
    def program(x: Tensor) -> Any:
        found = x.nonzero()
        return types.SimpleNamespace(count=found.shape[0], size=x.shape, twice=[x.shape[0] * 2]), x.shape

    batch = torch.export.Dim("batch", min=2)
    captured = capture(program, (torch.ones(4),), dynamic_shapes=({0: batch},))
    for length in (4, 6, 9):
        x = torch.ones(length)
        x[0] = 0
        result, expected = captured(x), program(x)
        assert result == expected
        assert all(type(number) is int for number in (result[0].count, *result[0].size, *result[0].twice, *result[1]))


def test_writes_go_through_the_tensors_of_an_object() -> None:
    def program(x: Tensor) -> Any:
        made = Plain(x.view(2, 2), x[1:])
        made.y.add_(1)
        base = x * 2
        made.views = {"a": base[1:], "b": base[:2]}  # type: ignore[attr-defined]
        return made

    captured = capture(program, (torch.zeros(4),))
    x, twin = _input(False), _input(False)
    result, expected = captured(x), program(twin)
    for made in (result, expected):
        made.y[0, 1] = 7
        made.views["a"].mul_(3)
    assert _reached((x, result)) == _reached((twin, expected))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.slow
def test_what_a_capture_made_does_not_outlive_it(make: Function) -> None:
    made: SimpleQueue[weakref.ref[Any]] = SimpleQueue()  # a list would be put back as it was

    def program(x: Tensor) -> Any:
        y = x + 1
        made.put(weakref.ref(y))
        result = make(y, x)
        with contextlib.suppress(TypeError):  # lists and the like
            made.put(weakref.ref(result))
        return result

    captured = capture(program, (torch.zeros(4),))
    gc.collect()
    assert not made.empty()
    assert not any(made.get()() for _ in range(made.qsize()))
    assert captured.signature


def test_what_a_class_counts_when_it_makes_objects_is_counted_by_calls() -> None:
    made = Plain.made
    program = capture(Plain, (torch.zeros(4), torch.zeros(4)))
    assert Plain.made == made
    program(torch.ones(4), torch.ones(4))
    assert Plain.made == made + 1


# What cannot be made again


def _generator(y: Tensor, x: Tensor) -> Any:
    return (item for item in [y, x])


def _of_a_class_made_inside(y: Tensor, x: Tensor) -> Any:
    class Inside:
        def get(self) -> Tensor:
            return y

    return Inside()


REFUSED: dict[str, tuple[Function, str]] = {
    "generator": (
        lambda y, x: Data(y, x, log=[_generator(y, x)]),
        r"the result\.log\[0\], of class generator.* holds a",
    ),
    "lock": (
        lambda y, x: UserDict(y=y, lock=threading.Lock()),
        r"the result\.data\['lock'\], of class lock, was made by",
    ),
    "class": (
        _of_a_class_made_inside,
        r"the class of the result, .*Inside, was made .* holds a tensor of the program",
    ),
    "graph of autograd": (lambda y, x: [y.grad_fn], r"the result\[0\], of class .*Backward0"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_made_again_is_refused(make: Function, message: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=message) as caught:
        capture(_program(make), (torch.zeros(4, requires_grad=True),))
    assert "    at " in str(caught.value)
    assert "    why  each call has to make a new object" in str(caught.value)


def test_long_chains_of_objects() -> None:
    def program(x: Tensor) -> Any:
        last = None
        for _ in range(2000):
            last = types.SimpleNamespace(before=last, x=x)
        return last

    one, count = capture(program, (torch.zeros(4),))(torch.ones(4)), 0
    while one is not None:
        one, count = one.before, count + 1
    assert count == 2000


# Of libraries


def test_packed_sequences() -> None:
    """One goes in, another one comes out."""
    torch.manual_seed(0)
    model: Any = nn.GRU(2, 3)
    given = pack_padded_sequence(torch.randn(4, 3, 2), [4, 2, 1])
    program = capture(model, (given,))
    (result, _), (expected, _) = program(given), model(given)
    assert type(result) is PackedSequence
    assert torch.equal(result.data, expected.data)
    assert result.batch_sizes is given.batch_sizes is expected.batch_sizes
    gradients = [torch.autograd.grad(one.data.sum(), model.weight_hh_l0)[0] for one in (result, expected)]
    assert torch.equal(*gradients)


def _decoder() -> Any:
    from tests.support.transformer_models import llama

    torch.manual_seed(0)
    return llama().eval()


def test_a_cache_that_a_decoder_makes() -> None:
    model = _decoder()
    tokens, others = torch.randint(0, 64, (1, 4)), torch.randint(0, 64, (1, 4))
    with torch.no_grad():
        program = capture(model, (tokens,), {"use_cache": True})
        expected, result = model(others, use_cache=True), program(others, use_cache=True)
        assert program(tokens, use_cache=True).past_key_values is not result.past_key_values
    assert _reached(result.past_key_values) == _reached(expected.past_key_values)
    assert [list(result), list(vars(result))] == [list(expected), list(vars(expected))]
    assert all(result[name] is vars(result)[name] for name in result)
    assert torch.equal(result.logits, expected.logits)


def test_a_cache_goes_from_call_to_call() -> None:
    model = _decoder()
    tokens = torch.randint(0, 64, (1, 4))

    def step(token: Tensor, cache: Any) -> Any:
        return model(token, past_key_values=cache, use_cache=True)

    with torch.no_grad():
        begin = capture(model, (tokens,), {"use_cache": True})
        result, expected = begin(tokens, use_cache=True), model(tokens, use_cache=True)
        example = tokens[:, :1], begin(tokens, use_cache=True).past_key_values
        program = capture(step, example, on_guard_failure="recapture")
        for _ in range(3):
            token = expected.logits[:, -1:].argmax(-1)
            cache = result.past_key_values
            result, expected = program(token, cache), step(token, expected.past_key_values)
            assert result.past_key_values is cache
            assert torch.equal(result.logits, expected.logits)
            assert _reached(cache) == _reached(expected.past_key_values)


@pytest.mark.parametrize("part", [..., slice(None)], ids=["copy", "all elements"])
def test_a_gradient_that_is_overwritten_has_memory_of_its_own(part: Any) -> None:
    weight = nn.Parameter(torch.arange(3.0))

    def program(x: Tensor, other: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((x * weight).sum(), weight)
        gradient[part] = other
        return gradient

    x, other = torch.ones(2, 3), torch.arange(3.0)
    result = capture(program, (x, other))(x, other)
    other.add_(1)
    assert torch.equal(result, torch.arange(3.0))


def test_parameters_and_buffers_are_such_whether_they_require_gradients_or_not() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    module.scale = nn.Buffer(torch.ones(1), persistent=False)

    def program(x: Tensor) -> Any:
        copied = copy.deepcopy(module)
        copied.weight.add_(isinstance(copied.weight, nn.Parameter))
        made = nn.Parameter(x * 2), nn.Parameter(x * 3, requires_grad=False), nn.Buffer(x * 4)
        classes = type(module.weight), type(module.scale), isinstance(module.scale, nn.Buffer)
        return copied, made, copied(x), classes

    captured, x = capture(program, (torch.ones(2),)), torch.arange(2.0)
    for _ in range(3):
        found, wanted = captured(x), program(x)
        torch.testing.assert_close(found[1:3], wanted[1:3])
        assert found[3] == wanted[3]
        pairs = [
            *zip(found[0].parameters(), wanted[0].parameters(), strict=True),
            *zip(found[1], wanted[1], strict=True),
        ]
        for mine, theirs in [*pairs, (found[0].scale, wanted[0].scale)]:
            assert torch.equal(mine, theirs) and mine.requires_grad == theirs.requires_grad
            for kind in (nn.Parameter, nn.Buffer):
                assert isinstance(mine, kind) == isinstance(theirs, kind)


def test_a_copied_parameter_has_memory_of_its_own_and_no_gradient() -> None:
    flat = torch.arange(6.0)
    module = nn.Module()
    module.first, module.second = nn.Parameter(flat[:2]), nn.Parameter(flat.view(3, 2)[:, 0])
    module.first.grad = torch.ones(2)

    def program(x: Tensor) -> Any:
        copied: Any = copy.deepcopy(module)
        with torch.no_grad():
            copied.first.add_(x)
        return copied.first.detach(), copied.second.detach(), copied.first.grad, copied.second.stride()

    x = torch.ones(2)
    wanted = program(x)
    torch.testing.assert_close(capture(program, (x,))(x), wanted)
    assert wanted[2] is None


def test_modules_that_a_program_moves() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(2))

    def program(x: Tensor) -> Any:
        twin = copy.deepcopy(module).double()
        y = module.to(x.device).float()(x)
        return y, twin(x.double()).detach(), copy.deepcopy(module).to("meta").weight.shape

    captured, x = capture(program, (torch.ones(2),)), torch.arange(2.0)
    weight = module.weight
    torch.testing.assert_close(captured(x), program(x))
    gradients = [torch.autograd.grad(run(x)[0].sum(), module.weight)[0] for run in (captured, program)]
    assert torch.equal(*gradients) and module.weight is weight


@pytest.mark.parametrize("kept", [[], {}, OrderedDict(), deque(), [[]], {"a": ()}])
def test_an_empty_container_of_state_is_given_itself(kept: Any) -> None:
    program = capture(lambda x: (kept, x + 1), (torch.ones(2),))
    assert program(torch.ones(2))[0] is kept


class Registered:
    """Of a class that pytrees know without names for its parts."""

    def __init__(self, part: Tensor) -> None:
        self.part = part


torch.utils._pytree.register_pytree_node(
    Registered, lambda value: ([value.part], None), lambda parts, _: Registered(next(iter(parts)))
)


def test_arguments_of_classes_that_pytrees_know_without_names() -> None:
    def run(given: Registered, *, more: dict[str, Registered]) -> Registered:
        return Registered(given.part * 2 + more["one"].part)

    def arguments(number: float) -> tuple[Registered, dict[str, Registered]]:
        return Registered(torch.full((2,), number)), {"one": Registered(torch.ones(2))}

    given, more = arguments(1)
    program = capture(run, (given,), {"more": more})
    given, more = arguments(3)
    assert program(given, more=more).part.tolist() == run(given, more=more).part.tolist() == [7, 7]
