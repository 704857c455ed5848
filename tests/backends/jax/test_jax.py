"""Captured programs on JAX: three calls in a row with the state threaded, jitted, beside eager; and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import operator
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functionalize import DataDependentError, InputMismatchError, UnsupportedProgramError, capture, jaxify
from tests.support.export_programs import PROGRAMS, made
from tests.support.routes import JAX

jax = pytest.importorskip("jax")
jnp = jax.numpy

from functionalize.backends.arrays.program import RANDOM_KEY, ArrayProgram, Written  # noqa: E402
from functionalize.backends.jax import from_torch, load, lowering, to_torch  # noqa: E402

Case = tuple[Callable[..., Any], list[Tensor]]


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Buffer(torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


class Cache(torch.nn.Module):
    """A row of a cache is written at a position that moves on."""

    def __init__(self, slots: int = 8) -> None:
        super().__init__()
        self.rows = torch.nn.Buffer(torch.zeros(slots, 4))
        self.position = torch.nn.Buffer(torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, self.position, x)
        self.position.add_(1)
        return self.rows.sum(0)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 3)
        self.hidden, self.cell = (torch.nn.Buffer(torch.zeros(1, 2, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        y, (hidden, cell) = self.lstm(x, (self.hidden, self.cell))
        self.hidden.copy_(hidden.detach())
        self.cell.copy_(cell.detach())
        return y


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.out.weight.mul_(0.5)
        return self.out(self.embed(x))


def of_module(module: torch.nn.Module, x: Tensor) -> Case:
    return module, [x]


def training(kind: Any, **options: Any) -> Case:
    """A step of a model whose optimizer has taken one before, so that its state is there."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 1))
    optimizer = kind(model.parameters(), **options)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    step(torch.ones(3, 4))
    return step, [torch.randn(3, 4)]


def bump(x: Tensor) -> Tensor:
    x[1].add_(1)
    x.diagonal().mul_(2)
    return x.sum()


def bump_both(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y.mul_(2)
    return x + y


def aliases(x: Tensor) -> Any:
    x.mul_(2)
    return x, x[0], x.t().reshape(-1)


def overlapping() -> list[Tensor]:
    memory = torch.arange(15.0).reshape(5, 3)
    return [memory[:3], memory[1:4]]


def one_tensor() -> list[Tensor]:
    x = torch.ones(2)
    return [x, x]


def fresh_training(kind: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A module that returns a loss, its optimizer that has made no step, and an input."""

    class Loss(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    model = Loss(4, 2)
    return model, kind(model.parameters(), **options), torch.randn(3, 4)


CASES: dict[str, Callable[[], Case]] = {
    "counter": lambda: of_module(Counter(), torch.ones(3)),
    "batch norm": lambda: of_module(torch.nn.BatchNorm1d(4), torch.randn(5, 4)),
    "cache": lambda: of_module(Cache(), torch.randn(1, 4)),
    "lstm": lambda: of_module(Recurrent(), torch.randn(5, 2, 4)),
    "tied weights": lambda: of_module(Tied(), torch.tensor([1, 2])),
    "sgd": lambda: training(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": lambda: training(torch.optim.AdamW, lr=0.01),
    "adamw fused": lambda: training(torch.optim.AdamW, lr=0.01, fused=True),
    "mutated input": lambda: (bump, [torch.ones(3, 3)]),
    "overlapping inputs": lambda: (bump_both, overlapping()),
    "one tensor twice": lambda: (bump_both, one_tensor()),
    "outputs alias inputs": lambda: (aliases, [torch.ones(2, 3)]),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_three_calls_are_as_eager(name: str) -> None:
    torch.manual_seed(0)
    function, args = CASES[name]()
    program = capture(function, tuple(args)).to_jax()
    step, state = program.jit(), program.initial_state
    arrays = list(map(from_torch, args))
    for _ in range(3):
        expected = function(*args)
        state, outputs = step(state, *arrays)
        if isinstance(outputs, Written):
            outputs, written = outputs
            names = program._program._capture.convention.names
            arrays = [written.get(name, array) for name, array in zip(names, arrays, strict=True)]
        same([expected, args], [outputs, arrays])
    module: dict[str, Tensor] = getattr(function, "state_dict", dict)()
    same({key: module[key] for key in state if key in module}, {key: state[key] for key in state if key in module})


def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + k * 10 + v * 100


def test_arguments_that_were_one_tensor_are_read_each_by_itself() -> None:
    x = torch.ones(2)
    program = capture(weighted, (x, x, x))
    arrays = [jnp.full(2, value, jnp.float32) for value in (1, 2, 3)]
    step = program.to_jax()
    for call in (step, step.jit()):
        assert call(step.initial_state, *arrays)[1].tolist() == [321, 321]
    slopes = jax.grad(lambda *args: step(step.initial_state, *args)[1].sum(), (0, 1, 2))(*arrays)
    assert [float(slope[0]) for slope in slopes] == [1, 10, 100]
    module = program.to_exported_program().module()
    assert module(*map(to_torch, arrays)).tolist() == [321, 321]


@pytest.mark.every(5)
@pytest.mark.parametrize("share", [Tensor.detach, lambda weight: weight.detach().t(), lambda weight: weight.data[:1]])
def test_arguments_that_share_memory_with_state_are_read_each_by_itself(share: Any, tmp_path: Path) -> None:
    """As parameters that are passed by `functional_call`; a call gives others, and their gradients are asked for."""
    layer, x, other = torch.nn.Linear(2, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    shared = share(layer.weight)
    other = other[: shared.size(0)]

    def both(weight: Tensor, x: Tensor) -> Any:
        return torch.nn.functional.linear(x, weight).sum() + 10 * layer(x).sum()

    expected, slope = both(other, x).item(), torch.func.grad(both)(other, x).tolist()
    program = capture(both, (shared, x))
    step = program.to_jax()
    assert step(step.initial_state, from_torch(other), from_torch(x))[1].item() == pytest.approx(expected)
    gradient = jax.grad(lambda *args: step(step.initial_state, *args)[1])(from_torch(other), from_torch(x))
    assert gradient.tolist() == slope
    assert program.to_exported_program().module()(other, x).item() == pytest.approx(expected)
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from functionalize.backends import onnx

    assert onnx.load(program.to_onnx(tmp_path / "both.onnx"))(other, x).item() == pytest.approx(expected)


def test_dicts_come_with_sorted_keys_from_jax() -> None:
    arguments = {"weight": torch.ones(2), "bias": torch.zeros(2)}
    step = capture(lambda p, x: (p["weight"] * x + p["bias"]).sum(), (arguments, torch.ones(2))).to_jax()
    parameters, x = {name: from_torch(value) for name, value in arguments.items()}, jnp.array([2.0, 3.0])
    slopes = jax.grad(lambda p: step(step.initial_state, p, x)[1])(parameters)
    assert slopes["weight"].tolist() == [2, 3] and slopes["bias"].tolist() == [1, 1]
    assert jax.jit(lambda p: step(step.initial_state, p, x)[1])(parameters) == 5


def test_decisions_stand_where_arguments_are_read_each_by_itself() -> None:
    x = torch.full((2,), -5.0)
    step = capture(lambda x, y: x - y if x.sum() < -3 else x + y, (x, x)).to_jax()
    one, other = jnp.full(2, -5.0), jnp.full(2, 2.0)
    assert step(step.initial_state, one, other)[1].tolist() == [-7, -7]


def test_arguments_that_are_written_as_one_tensor_have_one_value() -> None:
    program = capture(bump_both, tuple(one_tensor())).to_jax()
    state, one = program.initial_state, jnp.ones(2)
    with pytest.raises(InputMismatchError, match="`y` and the input `x` have different elements"):
        program(state, one, one * 2)
    with pytest.raises(InputMismatchError, match="may differ, because the call is traced"):
        jax.jit(program)(state, one, one)
    assert jax.jit(lambda x: program(state, x, x)[1].returned)(one).tolist() == [8, 8]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.slow
def test_the_first_step_makes_the_state_of_an_optimizer(name: str) -> None:
    torch.manual_seed(0)
    kind, options = OPTIMIZERS[name]
    model, optimizer, x = fresh_training(kind, **options)
    program = capture(model, (x,), optimizer=optimizer).to_jax()
    assert not optimizer.state
    step, state = program.jit(), program.initial_state
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        state, outputs = step(state, from_torch(x))
        same([loss, model.weight, model.weight.grad], [outputs, state["weight"], state["weight.grad"]])


def same(expected: Any, actual: Any) -> None:
    one = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, Tensor)]
    two = pytree.tree_leaves(actual)
    assert len(one) == len(two)
    for tensor, array in zip(one, two, strict=True):
        reference = np.asarray(from_torch(tensor))
        assert (reference.dtype, reference.shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(array, reference, rtol=1e-4, atol=1e-5)


def test_donation_reuses_the_memory_of_what_is_overwritten() -> None:
    program = capture(Cache(1024), (torch.ones(1, 4),)).to_jax()
    assert program.written == {"rows", "position"}
    step, state = program.jit(), program.initial_state
    for _ in range(3):
        before, pointer = state, state["rows"].unsafe_buffer_pointer()
        state, _ = step(state, jnp.ones((1, 4)))
        assert state["rows"].unsafe_buffer_pointer() == pointer and before["rows"].is_deleted()
    kept = program.initial_state
    program.jit(donate=False)(kept, jnp.ones((1, 4)))
    assert not kept["rows"].is_deleted()


def test_what_is_returned_is_not_what_the_next_call_overwrites() -> None:
    held = {"sum": torch.zeros(3), "kept": torch.ones(3)}

    def add(x: Tensor, y: Tensor) -> Any:
        held["sum"].add_(x)
        x.mul_(2)
        return held, [x, y]

    program = capture(add, (torch.ones(3), torch.ones(3))).to_jax()
    step, x = program.jit(), jnp.ones(3)
    state, first = program(program.initial_state, x, jnp.ones(3))
    state, second = step(state, first.arguments["x"], jnp.ones(3))
    step(state, second.arguments["x"], jnp.ones(3))
    for outputs, total, given in ((first, 1, 2), (second, 3, 4)):
        (found, pair), _ = outputs
        assert [found["sum"][0], found["kept"][0], pair[0][0], pair[1][0]] == [total, 1, given, 1]


def test_arrays_of_the_state_are_not_torchs_memory() -> None:
    cache = Cache()
    program = capture(cache, (torch.ones(1, 4),)).to_jax()
    state = program.initial_state
    cache.rows.fill_(5)
    assert not np.asarray(state["rows"]).any()


@pytest.mark.slow
def test_a_process_without_torch_runs_the_file(tmp_path: Path) -> None:
    program = capture(Cache(), (torch.ones(1, 4),))
    path = program.to_stablehlo(tmp_path / "cache.stablehlo")
    script = f"""
import sys, jax, numpy
from jax import export
jax.config.update("jax_enable_x64", True)
program = export.deserialize(bytearray(open({str(path)!r}, "rb").read()))
state = dict(numpy.load({str(path.with_suffix(".npz"))!r}))
for call in range(3):
    state, outputs = program.call(state, numpy.ones((1, 4), numpy.float32))
assert "torch" not in sys.modules and "functionalize" not in sys.modules
print(outputs.tolist(), state["position"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[3.0, 3.0, 3.0, 3.0] [3]", done.stderr
    loaded = load(path)
    assert [loaded(np.ones((1, 4), np.float32)).tolist()[0] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.stablehlo"
    path.write_bytes(b"not a program")
    with pytest.raises(ValueError, match="was not written by"):
        load(path)
    program = capture(lambda x: x.nonzero(), (torch.ones(3),))
    with pytest.raises(UnsupportedProgramError):
        program.to_stablehlo(tmp_path / "sized.stablehlo")
    assert [file.name for file in tmp_path.iterdir()] == ["other.stablehlo"]


# jaxify


@pytest.mark.slow
def test_jaxify_inside_of_jaxs_transforms() -> None:
    function = jaxify(lambda x, y: (x * y).relu_().sum())
    x, y = jnp.array([1.0, -2.0, 3.0]), jnp.array([2.0, 1.0, 1.0])
    assert function(x, y) == jax.jit(function)(x, y) == 5
    assert jax.grad(function)(x, y).tolist() == [2, 0, 1]
    assert jax.vmap(function)(jnp.stack([x, y]), jnp.stack([y, x])).tolist() == [5, 5]
    returned, arguments = jax.jit(jaxify(bump))(jnp.ones((3, 3)))
    assert returned == 16 and arguments["x"][1].tolist() == [2, 4, 2]
    assert jax.grad(lambda x: jaxify(bump)(x).returned)(jnp.ones((3, 3))).tolist() == (np.ones(3) + np.eye(3)).tolist()


def test_jaxify_of_what_decides_by_data_in_eager_only() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x if not torch.compiler.is_exporting() and x.sum() > 0 else x * 2

    with pytest.raises(DataDependentError, match="is_exporting=True"):
        jaxify(scaled)(jnp.ones(2))
    assert jaxify(scaled, is_exporting=True)(jnp.ones(2)).tolist() == [2, 2]


def test_jaxify_of_a_module_that_writes_its_state() -> None:
    norm = torch.nn.BatchNorm1d(2)
    reference, function, x = copy.deepcopy(norm), jaxify(norm), torch.randn(4, 2)
    with pytest.raises(UnsupportedProgramError, match="changes state: num_batches_tracked, running_mean"):
        function(from_torch(x))
    state = function.state(from_torch(x))
    for _ in range(3):
        state, outputs = function.apply(state, from_torch(x))
        same(reference(x), outputs)
    same(dict(reference.named_buffers()), {name: state[name] for name, _ in reference.named_buffers()})
    assert norm.running_mean is not None and not norm.running_mean.any()


@pytest.mark.slow
def test_random_numbers_are_told_by_the_key() -> None:
    function = jaxify(torch.nn.Dropout())
    x = jnp.ones(100)
    state = function.state(x)
    after, one = function.apply(state, x)
    assert (one == function.apply(state, x)[1]).all() and set(one.tolist()) == {0.0, 2.0}
    assert (one != function.apply(after, x)[1]).any() and (after[RANDOM_KEY] != state[RANDOM_KEY]).any()


# What is refused


def test_64_bits_are_there_or_refused() -> None:
    program = capture(lambda x: x + 2**40, (torch.ones(2, dtype=torch.int64),)).to_jax()
    x = np.array([1, 2])
    assert program({}, x)[1].tolist() == program.jit()({}, x)[1].tolist() == [2**40 + 1, 2**40 + 2]
    with pytest.raises(UnsupportedProgramError, match="jax_enable_x64"):
        jax.jit(program)({}, x)
    with jax.enable_x64(True):
        assert jax.jit(program)({}, x)[1].dtype == np.int64


def test_a_refusal_has_all_causes_with_their_lines() -> None:
    def sized(x: Tensor) -> Any:
        x.t_()
        found = x.nonzero()
        return found, x[x > 0], torch.mode(x)

    with pytest.raises(UnsupportedProgramError) as error:
        capture(sized, (torch.ones(2, 2),)).to_jax()
    for said in ("found = x.nonzero()", "x[x > 0]", "aten.mode", "size, strides or storage of an input"):
        assert said in str(error.value)


class Steps(torch.nn.Module):
    """Counts, and goes another way by data."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return -x if x.sum() > 0 else x


def test_decisions_are_compared_once_the_data_are_known(tmp_path: Path) -> None:
    program = capture(Steps(), (torch.ones(2),)).to_jax()
    for run in (program, program.jit()):
        state = program.initial_state
        state, outputs = run(state, jnp.ones(2))
        assert outputs.tolist() == [-1, -1]
        with pytest.raises(DataDependentError, match=r"(?s)takes another branch.*return -x if.*no state has changed"):
            run(state, -jnp.ones(2))
        assert run(state, jnp.ones(2))[0]["count"] == 2  # the state was not given away
    for trace, x in ((jax.jit, jnp.ones(2)), (lambda f: jax.vmap(f, in_axes=(None, 0)), jnp.ones((3, 2)))):
        with pytest.raises(UnsupportedProgramError, match=r"(?s)branches on tensor values.*return -x if.*JAX traces"):
            trace(program)(state, x)
    with pytest.raises(UnsupportedProgramError, match=r"(?s)return -x if.*JAX traces"):
        capture(Steps(), (torch.ones(2),)).to_stablehlo(tmp_path / "steps.jax")
    assert not [*tmp_path.iterdir()]


def test_numbers_that_decide_and_are_computed_with() -> None:
    def decides(x: Tensor) -> Tensor:
        total = x.sum().item()
        return x * total if total > 0 and 2 * total < 100 else x

    program = capture(decides, (torch.ones(2),)).to_jax()
    for run in (program, program.jit()):
        for x in (torch.ones(2), torch.tensor([0.25, 3.0])):
            assert run({}, jnp.asarray(x.numpy()))[1].tolist() == decides(x).tolist()
        for factor in (-1, 40):
            with pytest.raises(DataDependentError, match="if total > 0"):
                run({}, factor * jnp.ones(2))


def test_calls_of_another_kind_are_refused() -> None:
    program = capture(lambda x, n: x * n, (torch.ones(2), 3)).to_jax()
    with pytest.raises(InputMismatchError, match="has the shape"):
        program({}, jnp.ones(3), 3)
    with pytest.raises(InputMismatchError, match="dtype"):
        program({}, jnp.ones(2, jnp.int32), 3)
    with jax.enable_x64(True), pytest.raises(InputMismatchError, match="has the dtype float64, but had float32"):
        program({}, jnp.ones(2, jnp.float64), 3)
    with pytest.raises(InputMismatchError, match="`n` is 4"):
        program({}, jnp.ones(2), 4)
    with pytest.raises(InputMismatchError, match="the state is passed with more"):
        program({"more": jnp.ones(2)}, jnp.ones(2), 3)


def test_what_is_no_array_of_jax_is_refused() -> None:
    program = capture(lambda x: x * 2, (torch.ones(2),)).to_jax()
    with pytest.raises(InputMismatchError, match=r"(?s)`x` is a torch.Tensor, but .* takes arrays.*from_torch"):
        program(program.initial_state, torch.ones(2))
    double = jaxify(lambda x: x * 2)
    with pytest.raises(InputMismatchError, match=r"an argument is a torch\.Tensor"):
        double(torch.ones(2))
    for array in (jnp.ones(2, jnp.float8_e4m3fn), jax.random.key(0)):
        with pytest.raises(UnsupportedProgramError, match=r"an array has the dtype (float8_e4m3fn|key<fry>)"):
            double(array)


def test_numbers_that_vmap_makes_tensors() -> None:
    def mapped(x: Tensor) -> Any:
        return torch.func.vmap(lambda row: row.sum() * 2 + row * 0.5)(x)

    x = torch.arange(6).reshape(2, 3)
    program = capture(mapped, (x,)).to_jax()
    torch.testing.assert_close(to_torch(program(program.initial_state, from_torch(x))[1]), mapped(x))


def test_sizes_may_differ_where_the_program_lets_them() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    program = capture(lambda x: x.reshape(-1).cumsum(0) / x.shape[0], (torch.ones(4, 2),), dynamic_shapes=({0: rows},))
    step = program.to_jax().jit()
    for count in (3, 7):
        assert step({}, jnp.ones((count, 2)))[1][-1] == 2
    with pytest.raises(InputMismatchError):
        step({}, jnp.ones((4, 3)))


@pytest.mark.slow(seconds=3)
def test_files_of_sizes_that_differ(tmp_path: Path) -> None:
    """Statistics over a size, a cache up to it, a count of it: three calls of other sizes each beside eager."""

    def made() -> Any:
        torch.manual_seed(0)
        norm, cache, count = torch.nn.BatchNorm1d(2), torch.zeros(9, 2), torch.zeros((), dtype=torch.int64)

        def run(x: Tensor, y: Tensor) -> Tensor:
            count.add_(x.size(0))
            with torch.no_grad():
                cache[: x.size(0)] = norm(x)
                return x.mul_(2) @ y + cache.sum() * count

        return run

    size, args = torch.export.Dim("size", min=2, max=9), (torch.randn(4, 2), torch.randn(2, 3))
    path = capture(made(), args, dynamic_shapes=({0: size}, None)).to_stablehlo(tmp_path / "sizes.stablehlo")
    loaded, eager = load(path), made()
    for rows in (2, 7, 9):
        x, y = torch.randn(rows, 2), torch.randn(2, 3)
        found, written = loaded(from_torch(x), from_torch(y))
        torch.testing.assert_close(to_torch(found), eager(x, y), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(to_torch(written["x"]), x)
    for rows in (1, 10):
        with pytest.raises(InputMismatchError, match=rf"sizes of float32\[{rows}, 2\].*\n.*within the bounds"):
            loaded(jnp.ones((rows, 2)), jnp.ones((2, 3)))
    with pytest.raises(InputMismatchError, match="the argument 0"):
        loaded(jnp.ones((4, 3)), jnp.ones((2, 3)))


def test_relations_of_sizes_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    auto = torch.export.Dim.AUTO
    program = capture(lambda x: x.reshape(-1, 4) * 2, (torch.ones(4, 2),), dynamic_shapes=({0: auto},))
    with pytest.raises(UnsupportedProgramError, match="bounds of sizes, but no other conditions"):
        program.to_stablehlo(tmp_path / "program.stablehlo")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(seconds=2)
def test_steps_of_sizes_that_differ() -> None:
    """What the first call makes is there before: other sizes may differ as well."""
    layer = torch.nn.Linear(3, 2)
    update = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Any:
        update.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        update.step()
        return loss

    program = capture(step, (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},)).to_jax()
    call, state = program.jit(), program.initial_state
    for rows in (4, 6, 2):
        state, loss = call(state, jnp.ones((rows, 3)))
        np.testing.assert_allclose(loss, step(torch.ones(rows, 3)).detach(), rtol=1e-5)


@pytest.mark.slow
def test_control_flow_goes_by_jaxs() -> None:
    def program(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 2, (x,))

    call = capture(program, (torch.ones(2),)).to_jax().jit()
    assert call({}, -jnp.ones(2))[1].tolist() == [-2, -2]
    np.testing.assert_allclose(call({}, jnp.ones(2))[1], np.sin(np.ones(2)), rtol=1e-6)


def test_a_table_of_ones_own() -> None:
    mine = lowering.extended("mine")

    @mine(torch.ops.aten.sin)
    def sin(x: Any) -> Any:
        return jnp.zeros_like(x)

    program = capture(torch.sin, (torch.ones(2),))
    assert program.to_jax(lowerings=mine)({}, jnp.ones(2))[1].tolist() == [0, 0]
    assert program.to_jax()({}, jnp.ones(2))[1][0] > 0.8

    @mine(torch.ops.aten.sin)
    def wrong(x: Any) -> Any:
        return x[0]

    with pytest.raises(UnsupportedProgramError, match=r"returns float32\[\] instead of torch.float32\[2\]"):
        program.to_jax(lowerings=mine)({}, jnp.ones(2))


@pytest.mark.slow
def test_the_backend_of_the_examples_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "examples" / "numpy_backend.py"
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("three calls as eager") == 3
    assert len(path.read_text().splitlines()) <= 150


@pytest.mark.every(4)
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_programs_of_all_exporters(name: str) -> None:
    """Three calls in a row, what they give and what they write."""
    program, inputs = made(name)
    if name == "sizes-by-data":
        with pytest.raises(UnsupportedProgramError):
            JAX(capture(program, inputs()))
        return
    run = JAX(capture(made(name)[0], inputs()))
    for _ in range(3):
        given = inputs()
        mine = copy.deepcopy(given)
        leaves = (pytree.tree_leaves(results) for results in (run(*mine), program(*given)))
        found, expected = ([leaf for leaf in some if leaf is not None] for some in leaves)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, given)


_LARGE = (
    300.0,
    -300,
    7e4,
    -7e4,
    3e9,
    -3e9,
    5e9 + 5,
    1e19,
    -1e19,
    2.0**31,
    -(2.0**31),
    2.0**63,
    -(2.0**63),
    255.7,
    -0.5,
)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_become_whole_numbers_as_in_eager(dtype: torch.dtype) -> None:
    """Narrow ones wrap around; what 32 or 64 bits do not hold, and what is no number, is the least of these."""
    inf, short = float("inf"), (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.bool)
    x = torch.tensor([*_LARGE, inf, -inf, float("nan")], dtype=torch.float64).to(dtype)
    for wanted in (short, (torch.int64, torch.uint64)):

        def run(x: Tensor, wanted: Any = wanted) -> tuple[Tensor, ...]:
            return tuple(x.to(one) for one in wanted)

        for program in ((whole := capture(run, (x,)).to_jax()), whole.jit()):
            _, found = program({}, from_torch(x))
            for mine, expected in zip(found, run(x), strict=True):
                assert to_torch(mine).tolist() == expected.tolist(), expected.dtype


def test_written_whole_numbers_wrap_around() -> None:
    def run(x: Tensor) -> Any:
        return torch.zeros(2, dtype=torch.int8).copy_(x), x.sum(dtype=torch.int32), x.short()

    x = torch.tensor([300.0, -7e4])
    _, found = capture(run, (x,)).to_jax()({}, from_torch(x))
    torch.testing.assert_close(tuple(map(to_torch, found)), run(x))


@pytest.mark.every(6)
@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str, dtype: torch.dtype) -> None:
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 2, 6])

    for padding, last in ((None, False), (4, False), (None, True)):
        bag = torch.nn.EmbeddingBag(7, 3, mode=mode, dtype=dtype, padding_idx=padding, include_last_offset=last)

        def run(indices: Tensor, offsets: Tensor, bag: Any = bag, last: bool = last) -> Any:
            weight, number = bag.weight.detach(), ("sum", "mean", "max").index(mode)
            kept = torch.embedding_bag(weight, indices, offsets, mode=number, include_last_offset=last)
            return (
                bag(indices, offsets).detach(),
                kept[0],
                kept[1],
                *(() if last else kept[2:]),
            )  # of whose sizes torch is unsure

        program = capture(run, (indices, offsets)).to_jax()
        _, found = program.jit()(program.initial_state, from_torch(indices), from_torch(offsets))
        torch.testing.assert_close(tuple(map(to_torch, found)), run(indices, offsets))


def test_products_are_as_precise_as_torch_is_set_to() -> None:
    """On a CPU all are; on GPUs and TPUs what is not told rounds more than eager."""
    program, x = capture(torch.nn.Linear(3, 2), (torch.ones(4, 3),)).to_jax(), jnp.ones((4, 3))

    def precision() -> str:
        return str(jax.make_jaxpr(lambda x: program(program.initial_state, x))(x))

    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in precision()
    with jax.default_matmul_precision("high"):
        assert "precision=(Precision.HIGH, Precision.HIGH)" in precision()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert "Precision.HIGH" not in precision()
    finally:
        torch.set_float32_matmul_precision(before)


def test_operators_that_give_nothing_are_not_dropped() -> None:
    def func(x: Tensor) -> Tensor:
        torch.ops.aten._print("seen")
        return x + 1

    with pytest.raises(UnsupportedProgramError, match=r"_print\.default has no lowering(.|\n)*"):
        capture(func, (torch.ones(2),)).to_jax()


def test_backends_say_whether_they_end_gradients() -> None:
    numpy = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "numpy_backend.py"))["NUMPY"]

    def ends(x: Tensor) -> Tensor:
        return x * x.detach()

    def ends_without_grad_mode(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x * 2
        return scale + x

    x, given = torch.tensor([2.0, 3.0], requires_grad=True), np.array([2.0, 3.0], np.float32)
    unsaid = dataclasses.replace(numpy, differentiates=None)
    for func in (ends, ends_without_grad_mode):
        found = capture(func, (x,)).specialization
        for backend in (numpy, dataclasses.replace(numpy, differentiates=True)):
            program = ArrayProgram(found, backend)
            np.testing.assert_allclose(program({}, given)[1], func(x).detach().numpy())
            assert len(program.stopped) == 1
        with pytest.raises(
            UnsupportedProgramError, match=rf"numpy cannot run a program that stops.*\n.*in {func.__name__}:"
        ):
            ArrayProgram(found, unsaid)
        with torch.no_grad():  # as the error says
            ArrayProgram(capture(func, (x,)).specialization, unsaid)
    ArrayProgram(capture(lambda x: x * 2, (x,)).specialization, unsaid)


def test_a_size_of_the_data_is_refused_unless_it_is_decided() -> None:
    def program(convert: Callable[[Tensor], int]) -> Any:
        return capture(lambda x, n: x[: convert(n)] * 2, (torch.ones(5), torch.tensor(3)))

    with pytest.raises(UnsupportedProgramError, match=r"data-dependent size(.|\n)*operator\.index"):
        program(lambda n: int(n)).to_jax()
    decided = program(operator.index).to_jax()
    _, sliced = decided(decided.initial_state, from_torch(torch.ones(5)), from_torch(torch.tensor(3)))
    assert np.array_equal(sliced, np.full(3, 2.0))
