"""Containers and Python values among results, names of arguments, and state that is a view: on every exporter's route.

A table of what a program may return, and what each route gives for it: eager's container on ExportedProgram and ONNX,
tuples, lists and dicts on JAX; or a refusal.
"""

from __future__ import annotations

import enum
import pathlib
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import PackedSequence

from functionalize import UnsupportedProgramError, capture, jaxify
from functionalize.errors import UnsupportedExportError
from tests.support.routes import CORE_ATEN, JAX, JAX_UNJITTED, MODULE, ONNX, SAVED, STABLEHLO, Route

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
jax = pytest.importorskip("jax")
from functionalize.backends import jax as ours  # noqa: E402
from functionalize.backends import onnx  # noqa: E402

Program = Callable[..., Any]


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, y: Tensor, x: Tensor) -> None:
        self.y, self.x = y, x


class MyList(list[Any]):
    pass


def _with_explicit_state(captured: Any, folder: Path) -> Program:
    module = captured.to_core_aten(explicit_state=True).module()
    return lambda x: module(x)[-1]


EXPLICIT = Route("explicit_state", _with_explicit_state)


# On JAX, the containers as JAX gives them, with arrays; `tests.support.routes` makes tensors of these.


def on_jax(program: Program, folder: Path, x: Tensor) -> Any:
    pure = capture(program, (x,)).to_jax()
    return pure(pure.initial_state, ours.from_torch(x))[1]


def jitted(program: Program, folder: Path, x: Tensor) -> Any:
    pure = capture(program, (x,)).to_jax()
    return pure.jit()(pure.initial_state, ours.from_torch(x))[1]


def jaxified(program: Program, folder: Path, x: Tensor) -> Any:
    return jaxify(program)(ours.from_torch(x))


def stablehlo(program: Program, folder: Path, x: Tensor) -> Any:
    path = capture(program, (x,)).to_stablehlo(folder / "program.stablehlo")
    return ours.load(path)(ours.from_torch(x))


OnJax = Callable[[Program, Path, Tensor], Any]

# What torch's routes give as eager does, and JAX in the form that stands behind it.
CONTAINERS: dict[str, tuple[Program, Program | None]] = {
    "deque": (lambda y, x: deque([y, x], maxlen=3), lambda y, x: [y, x]),
    "deque in a dict": (lambda y, x: {"q": deque([y]), "e": deque()}, lambda y, x: {"q": [y], "e": []}),
    "ordered": (lambda y, x: OrderedDict(b=y, a=x), lambda y, x: OrderedDict(b=y, a=x)),
    "defaultdict": (lambda y, x: defaultdict(list, {"b": y, "a": [x]}), lambda y, x: {"b": y, "a": [x]}),
    "named tuple": (Pair, Pair),
    "named tuples inside": (lambda y, x: Pair([y], {"k": Pair(x, None)}), lambda y, x: Pair([y], {"k": Pair(x, None)})),
    "return type": (lambda y, x: torch.sort(y + x), lambda y, x: tuple(torch.sort(y + x))),
    "unsorted names": (lambda y, x: {"z": y, "a": x}, lambda y, x: {"z": y, "a": x}),
    "whole keys": (lambda y, x: {10: y, 9: x}, lambda y, x: {10: y, 9: x}),
    "tuples for keys": (lambda y, x: {(1, "a"): y, (0, "b"): [x]}, lambda y, x: {(1, "a"): y, (0, "b"): [x]}),
    "mixed keys": (lambda y, x: {"b": y, 1: x, None: y, (1,): x}, lambda y, x: {"b": y, 1: x, None: y, (1,): x}),
    "keys of classes": (
        lambda y, x: {Color.RED: y, torch.int8: x, b"a": y, Pair(1, 2): x, int: y},
        lambda y, x: {Color.RED: y, torch.int8: x, b"a": y, Pair(1, 2): x, int: y},
    ),
    "ordered keys": (lambda y, x: OrderedDict({(2,): y, 1: x}), lambda y, x: OrderedDict({(2,): y, 1: x})),
    "empty": (lambda y, x: ((), [], {}, None), lambda y, x: ((), [], {}, None)),
    "text": (lambda y, x: (y, "a", {"k": "v"}), lambda y, x: (y, "a", {"k": "v"})),
    "numbers": (lambda y, x: (1, 2.5, True, 1 + 2j, float("inf")), lambda y, x: (1, 2.5, True, 1 + 2j, float("inf"))),
    "torch's": (lambda y, x: (y.dtype, y.device, y.layout), lambda y, x: (y.dtype, y.device, y.layout)),
    "python's": (
        lambda y, x: (Color.RED, slice(1, 2), range(3), b"a", ..., int, pathlib.PurePosixPath("/a"), {1, 2}),
        lambda y, x: (Color.RED, slice(1, 2), range(3), b"a", ..., int, pathlib.PurePosixPath("/a"), {1, 2}),
    ),
    "numpy's": (lambda y, x: (np.float32(2), np.int64(3)), lambda y, x: (np.float32(2), np.int64(3))),
    "slice of tensors": (lambda y, x: (slice(y, x),), None),
    "set": (lambda y, x: ({y}, frozenset({x})), None),
}
# What no pytree knows: dicts and lists of what is in it, on all routes.
OBJECTS: dict[str, tuple[Program, Program]] = {
    "slots": (Slotted, lambda y, x: {"x": x, "y": y}),
    "user dict": (lambda y, x: UserDict(b=y, a=x), lambda y, x: {"b": y, "a": x}),
    "counter": (lambda y, x: Counter({"b": y, "n": 3}), lambda y, x: {"b": y, "n": 3}),
    "list of a class": (lambda y, x: MyList([y, "t"]), lambda y, x: [y, "t"]),
}


def _packed(x: Tensor) -> Any:
    return PackedSequence(x * 2, torch.tensor([1, 1]))


def same(expected: Any, actual: Any) -> bool:
    """Whether two nests are of the same containers, in the same order, and equal."""
    if isinstance(expected, Tensor):
        return not isinstance(actual, (dict, list, str)) and np.array_equal(expected.numpy(), np.asarray(actual))
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, dict):
        return list(expected) == list(actual) and all(same(expected[key], actual[key]) for key in expected)
    if isinstance(expected, (list, tuple, deque)):
        alike = len(expected) == len(actual) and all(map(same, expected, actual))
        return alike and getattr(expected, "maxlen", 0) == getattr(actual, "maxlen", 0)
    if isinstance(expected, slice):
        ends = [(part.start, part.stop, part.step) for part in (expected, actual)]
        return all(map(same, *ends))
    if isinstance(expected, (set, frozenset)) and any(isinstance(item, Tensor) for item in expected):
        return same(list(expected), list(actual))
    return bool(expected == actual)


def _all(table: dict[str, Any], column: int) -> Program:
    """One program that returns all of a column: each route is gone once."""

    def program(x: Tensor) -> Any:
        return [row[column](x * 2, x) for row in table.values()]

    return program


def _check(table: dict[str, Any], expected: Program, route: Route | OnJax, folder: Path) -> None:
    x, program = torch.tensor([1.0, 2.0]), _all(table, 0)
    found = route(capture(program, (x,)), folder)(x) if isinstance(route, Route) else route(program, folder, x)
    wrong = [name for name, one, two in zip(table, expected(x), found, strict=True) if not same(one, two)]
    assert not wrong


@pytest.mark.parametrize("route", [MODULE, SAVED, CORE_ATEN, EXPLICIT, ONNX])
def test_results_are_built_as_eager_builds_them(route: Route, tmp_path: Path) -> None:
    _check(CONTAINERS, _all(CONTAINERS, 0), route, tmp_path)


@pytest.mark.parametrize("route", [on_jax, jitted, jaxified])
def test_results_are_nests_that_jax_knows(route: OnJax, tmp_path: Path) -> None:
    known = {name: row for name, row in CONTAINERS.items() if row[1] is not None}
    with jax.enable_x64(True):
        _check(known, _all(known, 1), route, tmp_path)


@pytest.mark.parametrize("route", [MODULE, ONNX, on_jax])
def test_objects_are_dicts_and_lists(route: Route | OnJax, tmp_path: Path) -> None:
    _check(OBJECTS, _all(OBJECTS, 1), route, tmp_path)


@pytest.mark.parametrize("name", ["deque", "deque in a dict", "unsorted names", "empty", "return type", "defaultdict"])
def test_files_of_stablehlo_keep_what_arrays_are_in(name: str, tmp_path: Path) -> None:
    makes, gives = CONTAINERS[name]
    x = torch.tensor([1.0, 2.0])
    assert gives is not None
    assert same(gives(x * 2, x), stablehlo(lambda x: makes(x * 2, x), tmp_path, x))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("whole keys", "keys are not strings, at"),
        ("mixed keys", "keys are not strings"),
        ("text", "returns 'a', at"),
        ("torch's", "torch.float32"),
        ("slice of tensors", "class slice"),
        ("set", "class set"),
    ],
)
def test_files_of_stablehlo_refuse_what_they_cannot_hold(name: str, said: str, tmp_path: Path) -> None:
    makes = CONTAINERS[name][0]
    with pytest.raises(UnsupportedProgramError, match=said):
        stablehlo(lambda x: makes(x * 2, x), tmp_path, torch.ones(2))


@pytest.mark.parametrize("keys", [(1, 0), ((1,), "a"), (None, 2)])
def test_arguments_with_any_keys(keys: tuple[Any, Any], tmp_path: Path) -> None:
    def program(given: dict[Any, Tensor]) -> Tensor:
        one, two = given.values()
        return one * 2 + two

    given = {keys[0]: torch.tensor([1.0, 2.0]), keys[1]: torch.tensor([3.0, 5.0])}
    arrays = {key: ours.from_torch(value) for key, value in given.items()}
    captured = capture(program, (given,))
    pure = captured.to_jax()
    assert same(program(given), captured.to_exported_program().module()(given))
    assert same(program(given), pure.jit()(pure.initial_state, arrays)[1])
    with pytest.raises(UnsupportedProgramError, match="takes a dict whose keys are not strings"):
        captured.to_stablehlo(tmp_path / "program.stablehlo")


def test_a_deque_as_an_argument(tmp_path: Path) -> None:
    def program(given: deque[Tensor]) -> Tensor:
        return given[0] * 2 + given[1]

    given = deque([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])])
    captured = capture(program, (given,))
    pure = captured.to_jax()
    assert same(program(given), pure(pure.initial_state, deque(map(ours.from_torch, given)))[1])
    with pytest.raises(UnsupportedProgramError, match="takes a deque"):
        captured.to_stablehlo(tmp_path / "program.stablehlo")


def _holds_itself(x: Tensor) -> Any:
    made: list[Any] = [x]
    made.append(made)
    return made


@pytest.mark.parametrize("route", [MODULE, ONNX, JAX, STABLEHLO])
def test_a_container_that_holds_itself_is_refused(route: Route, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedProgramError, match="contains itself"):
        route(capture(_holds_itself, (torch.ones(2),)), tmp_path)(torch.ones(2))


@pytest.mark.parametrize("route", [on_jax, jitted])
@pytest.mark.parametrize("program", [lambda x: iter([x * 2]), lambda x: {x * 2: 1}, lambda x: [slice(x * 2, 1)]])
def test_no_internal_object_comes_out(program: Program, route: OnJax, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedProgramError, match="return its tensors"):
        route(program, tmp_path, torch.ones(2))


def test_fields_of_a_packed_sequence_keep_their_names(tmp_path: Path) -> None:
    found = on_jax(_packed, tmp_path, torch.ones(2))
    assert list(found) == ["data", "batch_sizes", "sorted_indices", "unsorted_indices"]


def test_mixed_keys_go_through_a_jit_of_the_users() -> None:
    x = torch.tensor([1.0, 2.0])
    pure = capture(lambda x: {"b": x * 2, 1: x + 1, (1,): x - 1}, (x,)).to_jax()
    found = jax.jit(pure)(pure.initial_state, ours.from_torch(x))[1]
    assert list(found) == ["b", 1, (1,)]
    assert found[1].tolist() == [2.0, 3.0]


def test_a_factory_without_a_name_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    program = capture(lambda x: defaultdict(lambda: 3, {"a": x * 2}), (torch.ones(2),))
    with pytest.raises(UnsupportedExportError, match="files cannot name"):
        program.to_onnx(tmp_path / "program.onnx")
    assert not list(tmp_path.iterdir())


class _Sums(nn.Module):
    """Makes its state in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.sum: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.sum = x * 1 if self.sum is None else self.sum + x
        return {"z": self.sum * 1, "a": "text", 3: deque([x * 2])}


@pytest.mark.parametrize("jit", [False, True])
def test_text_comes_from_a_program_whose_first_call_differs(jit: bool) -> None:
    x = torch.tensor([1.0, 2.0])
    pure = capture(_Sums(), (x,)).to_jax()
    step, state, eager = (pure.jit() if jit else pure), pure.initial_state, _Sums()
    for _ in range(3):
        state, found = step(state, ours.from_torch(x))
        assert same(eager(x) | {3: [x * 2]}, found)


# Names of arguments


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["state", "args", "kwargs", "program", "fn"])
def test_arguments_may_have_the_names_of_our_parameters(name: str, tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(f"def program(a, {name}):\n    return a + 2 * {name}", space)
    program, a, b = space["program"], torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    kwargs, arrays = {name: b}, {name: ours.from_torch(b)}
    captured, expected, first = capture(program, (a,), kwargs), program(a, b), ours.from_torch(a)
    pure, path = captured.to_jax(), captured.to_stablehlo(tmp_path / "program.stablehlo")
    found = [
        captured(a, **kwargs),
        captured.to_exported_program().module()(a, **kwargs),
        onnx.load(captured.to_onnx(tmp_path / "program.onnx"))(a, **kwargs),
        pure(pure.initial_state, first, **arrays)[1],
        pure.jit()(pure.initial_state, first, **arrays)[1],
        jax.jit(pure)(pure.initial_state, first, **arrays)[1],
        jaxify(program)(first, **arrays),
        jaxify(program).apply({}, first, **arrays)[1],
        ours.load(path)(first, **arrays),
    ]
    assert all(same(expected, value) for value in found)


def test_self_is_a_name_as_well(tmp_path: Path) -> None:
    def program(a: Tensor, self: Tensor) -> Tensor:
        return a + 2 * self

    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    captured = capture(program, (a, b))
    pure = captured.to_jax()
    assert same(program(a, b), captured(a, self=b))
    assert same(program(a, b), captured.to_exported_program().module()(a, b))
    assert same(program(a, b), onnx.load(captured.to_onnx(tmp_path / "program.onnx"))(a, b))
    assert same(program(a, b), pure(pure.initial_state, ours.from_torch(a), self=ours.from_torch(b))[1])


# State that is a view


class _Streaming(nn.Module):
    """Keeps the end of what it got: views of one tensor, at offsets that its size gives."""

    two: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last, self.two, self.first = torch.zeros(1, 2), nn.Buffer(torch.zeros(2, 2)), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.last + self.first, self.two, x])
        both = x * 2
        self.last, self.two, self.first = x[-1:], both[-2:], both[both.shape[0] // 2]
        return y.cumsum(0)


class _Convolution(nn.Module):
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.conv = nn.Buffer(torch.zeros(1, 2, 2)), nn.Conv1d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.cat([self.cache, x], -1)
        self.cache = padded.narrow(-1, padded.shape[-1] - 2, 2)
        found: Tensor = self.conv(padded)
        return found.detach()


def _streams(kind: type[nn.Module]) -> tuple[nn.Module, list[Tensor], Any]:
    torch.manual_seed(0)
    model, lengths = kind(), (5, 4, 7, 5)
    if kind is _Convolution:
        return model, [torch.randn(1, 2, length) for length in lengths], ({2: Dim("n", min=4)},)
    return model, [torch.randn(length, 2) for length in lengths], ({0: Dim("n", min=4)},)


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", [_Streaming, _Convolution])
@pytest.mark.parametrize("route", [MODULE, ONNX, JAX_UNJITTED, STABLEHLO])
def test_state_is_a_view_at_an_offset_that_sizes_give(kind: type[nn.Module], route: Route, tmp_path: Path) -> None:
    eager, inputs, _ = _streams(kind)
    model, _, shapes = _streams(kind)
    program = capture(model, (inputs[0],), dynamic_shapes=shapes)
    if route is STABLEHLO and kind is _Streaming:  # its middle is a condition, which no such file can hold
        with pytest.raises(UnsupportedProgramError, match="bounds of sizes"):
            route(program, tmp_path)
        return
    call = route(program, tmp_path)
    for x in inputs:
        torch.testing.assert_close(call(x), eager(x), rtol=1e-4, atol=1e-5)
