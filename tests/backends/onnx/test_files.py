"""ONNX files by themselves: their names, all that they give, their first state, and what other tools make of them."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from functionalize import capture
from tests.backends.onnx.models import INSPECTING, MODELS, StreamingGru

package = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from functionalize.backends import onnx  # noqa: E402
from functionalize.backends.onnx.convention import first_state  # noqa: E402
from tests.backends.onnx.plain import PlainFile  # noqa: E402

leaves_of = torch.utils._pytree.tree_leaves
pytestmark = pytest.mark.slow(seconds=2)


def assert_calls(path: Path, twin: Any, inputs: Callable[[], tuple[Any, ...]], *, calls: int = 3) -> None:
    """Hold a file, opened by ONNX Runtime and by ours, against calls of a twin of its program."""
    plain, run = PlainFile(path), onnx.load(path)
    for _ in range(calls):
        given = inputs()
        mine = copy.deepcopy(given)
        results = plain.results(*leaves_of(given))
        expected, loaded = twin(*given), run(*mine)
        torch.testing.assert_close(loaded, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, given)
        for result, value in zip(results, leaves_of(expected), strict=True):
            assert_same(result, value)


def assert_same(result: Any, value: Any, **tolerance: Any) -> None:
    if isinstance(value, Tensor):
        limits = {"rtol": 1e-3, "atol": 1e-4, **tolerance}
        torch.testing.assert_close(torch.as_tensor(result), value.detach(), **limits)
    else:
        assert result == value


# Names


class OneName(nn.Module):
    """Everything that it has is called `x`, or as something else in the file is."""

    x: Tensor
    new: Any
    initial: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", torch.tensor([1.0, 2.0]))
        self.output_0 = nn.Buffer(torch.tensor([3.0, 4.0]))
        self.check_0 = nn.Buffer(torch.zeros(2))
        self.weight = nn.Parameter(torch.tensor([5.0, 6.0]))
        self.new = nn.Module()
        self.new.x = nn.Buffer(torch.tensor([0.5, 0.0]))
        self.initial = nn.Module()
        self.initial.x = nn.Buffer(torch.tensor([7.0, 8.0]))

    def forward(self, x: Tensor, weight: Tensor, output_1: Tensor) -> Any:
        self.x.add_(x)
        self.output_0.mul_(weight)
        self.check_0.sub_(1)
        self.new.x.add_(2 * x)
        self.initial.x.mul_(0.5)
        if x.sum() > 0:  # a check
            return self.x + self.initial.x, output_1, self.weight * weight, self.x, self.check_0 * output_1
        return x


def _positive() -> tuple[Tensor, ...]:
    return torch.rand(2), torch.rand(2), torch.rand(2)


def test_things_of_one_name(tmp_path: Path) -> None:
    path = capture(OneName(), _positive()).to_onnx(tmp_path / "names.onnx")
    assert_calls(path, OneName(), _positive)
    plain = PlainFile(path)
    names = [*plain.inputs, *plain.outputs]
    assert len(set(names)) == len(names)
    assert {"x", "weight", "output_1", "x_1", "new.x", "initial.x"} <= set(plain.inputs)
    assert [one["name"] for one in plain.convention["results"]] == [
        "output_0", "output_1_1", "output_2", "output_3", "output_4",
    ]  # fmt: skip
    state = {one["target"]: (one["input"], one["output"]) for one in plain.convention["state"]}
    assert state["x"] == ("x_1", "new.x_1")
    assert state["new.x"] == ("new.x", "new.new.x")


def test_arguments_win_then_results_then_state(tmp_path: Path) -> None:
    h, count = torch.rand(2), torch.zeros(())

    def run(x: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        h.add_(x)
        count.add_(1)
        return {"x": x * 2, "h": h * more["a"][0], "more.b": x + more["b"], "count": count}

    path = capture(run, (torch.ones(2), {"a": [torch.ones(2)], "b": torch.ones(2)})).to_onnx(tmp_path / "wins.onnx")
    plain = PlainFile(path)
    assert list(plain.inputs) == ["count_1", "h_1", "x", "more.a.0", "more.b"]
    assert list(plain.outputs) == ["new.count_1", "new.h_1", "x_1", "h", "more.b_1", "count"]


def test_an_argument_that_is_called_as_the_graph_calls_things(tmp_path: Path) -> None:
    def run(add: Tensor, val_0: Tensor, nothing: Tensor, new: Tensor) -> Any:
        new.add_(add)
        return add + val_0.reshape(1, -1) * 3, nothing * 2

    def inputs() -> tuple[Tensor, ...]:
        return tuple(torch.rand(4, 2).unbind())

    path = capture(run, inputs()).to_onnx(tmp_path / "graph.onnx")
    assert_calls(path, run, inputs)
    plain = PlainFile(path)
    assert list(plain.inputs) == ["add", "val_0", "nothing", "new"]
    assert plain.convention["writes"] == {"new": "new.new"}


Pair = namedtuple("Pair", ["mean", "spread"])


@dataclasses.dataclass
class Scores:
    logits: Tensor
    past: Any


torch.export.register_dataclass(Scores, serialized_type_name="tests.backends.onnx.test_files.Scores")
torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="tests.backends.onnx.test_files.Pair")

_RETURNED: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "tensor": (lambda x: x + 1, ["output_0"]),
    "tuple": (lambda x: (x + 1, None, x * 2, 3), ["output_0", "output_2"]),
    "nested tuple": (lambda x: (x + 1, (x * 2, [x * 3])), ["output_0", "output_1", "output_2"]),
    "dict": (lambda x: {"logits": x + 1, "more": {"a": x * 2, "b": [x, x * 3]}},
             ["logits", "more.a", "more.b.0", "more.b.1"]),
    "list of dicts": (lambda x: [{"boxes": x + 1}, {"boxes": x * 2}], ["output_0.boxes", "output_1.boxes"]),
    "namedtuple": (lambda x: Pair(x + 1, x * 2), ["mean", "spread"]),
    "dataclass": (lambda x: Scores(x + 1, ({"key": x * 2}, x * 3)), ["logits", "past.0.key", "past.1"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", _RETURNED)
def test_results_are_called_by_their_keys(kind: str, tmp_path: Path) -> None:
    func, names = _RETURNED[kind]
    path = capture(func, (torch.ones(2),)).to_onnx(tmp_path / "names.onnx")
    assert list(PlainFile(path).outputs) == names
    found, expected = onnx.load(path)(torch.ones(2)), func(torch.ones(2))
    assert type(found) is type(expected)
    torch.testing.assert_close(leaves_of(found), leaves_of(expected))


def test_results_of_transformers_are_called_by_their_attributes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    def run(x: Tensor) -> Any:
        return BaseModelOutput(last_hidden_state=x + 1, hidden_states=(x, x * 2))

    path = capture(run, (torch.ones(2),)).to_onnx(tmp_path / "output.onnx")
    assert list(PlainFile(path).outputs) == ["last_hidden_state", "hidden_states.0", "hidden_states.1"]


# All results are outputs


def test_all_results_are_outputs(tmp_path: Path) -> None:
    h, mask = torch.rand(2), torch.tensor([True, False])

    def run(x: Tensor, z: Tensor, n: int) -> Any:
        h.add_(x)
        z.mul_(2)
        y = x * 3
        return y, mask, z, y, x, h, h, None, "text", n, x.size(0), torch.ones(2)

    path = capture(run, (torch.ones(2), torch.ones(2), 5)).to_onnx(tmp_path / "all.onnx")
    plain, loaded = PlainFile(path), onnx.load(path)
    tensors = [0, 1, 2, 3, 4, 5, 6, 11]
    assert list(plain.outputs) == ["new.h", "new.z", *(f"output_{number}" for number in tensors)]
    x, z, first = torch.rand(2), torch.rand(2), loaded.state["h"].clone()
    raw = plain.results(x, z, 5)
    given = z.clone()
    results = loaded(x, given, 5)
    expected = [3 * x, mask, 2 * z, 3 * x, x, first + x, first + x, None, "text", 5, 2, torch.ones(2)]
    for value, of_call in zip(expected, results, strict=True):
        assert_same(of_call, value)
    for value, of_engine in zip(
        [value for value in expected if not isinstance(value, str)], raw, strict=True
    ):  # which has no leaf
        assert_same(of_engine, value)
    assert results[2] is given and results[4] is x and results[3] is results[0] and results[6] is results[5]
    loaded(x, given, 5)
    torch.testing.assert_close(results[5], first + x)  # no later call writes there


def test_the_identity_has_an_output(tmp_path: Path) -> None:
    path = capture(lambda x: x, (torch.ones(2),)).to_onnx(tmp_path / "identity.onnx")
    x, plain = torch.rand(2), PlainFile(path)
    assert list(plain.outputs) == ["output_0"]
    assert_same(plain.run({"x": x})["output_0"], x)
    assert onnx.load(path)(x) is x


# Sizes


def test_sizes_are_called_by_their_dims(tmp_path: Path) -> None:
    batch, time = Dim("batch", min=2, max=64), Dim("time", min=2, max=64)
    shapes = {
        "x": {0: batch, 1: time},
        "y": {0: 2 * batch},
        "more": [{0: batch}, {0: Dim.AUTO}],
        "z": {0: Dim.DYNAMIC, 1: Dim.AUTO},
    }

    def run(x: Tensor, y: Tensor, more: list[Tensor], z: Tensor) -> Any:
        return x.repeat(2, 1) + y, {"flat": x.reshape(-1)}, more[0] + x[:, 0], torch.nonzero(more[1]), z * 2

    inputs = torch.rand(3, 4), torch.rand(6, 1), [torch.rand(3), torch.rand(5)], torch.rand(7, 8)
    path = capture(run, inputs, dynamic_shapes=shapes).to_onnx(tmp_path / "sizes.onnx")
    plain = PlainFile(path)
    assert plain.inputs == {
        "x": ["batch", "time"],
        "y": ["2*batch", 1],
        "more.0": ["batch"],
        "more.1": ["more_1_dim_0"],
        "z": ["z_dim_0", "z_dim_1"],
    }
    assert plain.outputs == {
        "output_0": ["2*batch", "time"],
        "output_1.flat": ["batch*time"],
        "output_2": ["batch"],
        "output_3": ["output_3_dim_0", 1],
        "output_4": ["z_dim_0", "z_dim_1"],
    }

    def others() -> tuple[Any, ...]:
        return torch.rand(5, 3), torch.rand(10, 1), [torch.rand(5), torch.rand(2)], torch.rand(2, 4)

    assert_calls(path, run, others, calls=1)
    with pytest.raises(onnx_mismatch(), match="captured for 2 to 64"):
        onnx.load(path)(torch.rand(65, 3), torch.rand(130, 1), [torch.rand(65), torch.rand(2)], torch.rand(2, 4))


def onnx_mismatch() -> type[Exception]:
    from functionalize import InputMismatchError

    return InputMismatchError


# The first state, and what other tools make of a file


def _quantized(path: Path, made: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(path), str(made))


def _preprocessed(path: Path, made: Path) -> None:
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(path), str(made), skip_symbolic_shape=True)


def _optimized_by_runtime(path: Path, made: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(made)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _optimized_by_onnxscript(path: Path, made: Path) -> None:
    import onnxscript.optimizer

    package.save(onnxscript.optimizer.optimize(package.load(str(path))), str(made))


TOOLS: Mapping[str, Callable[[Path, Path], None]] = {
    "quantize_dynamic": _quantized,
    "quant_pre_process": _preprocessed,
    "runtime": _optimized_by_runtime,
    "onnxscript": _optimized_by_onnxscript,
}


def assert_right_after_tools(path: Path, twin: Any, inputs: Callable[[], dict[str, Tensor]]) -> None:
    """Hold what each tool makes of a file against a twin of its program, over three calls."""
    for tool, make in TOOLS.items():
        made = path.with_name(f"{tool}.onnx")
        make(path, made)
        plain, run, eager = PlainFile(made), onnx.load(made), copy.deepcopy(twin)
        for _ in range(3):
            given = inputs()
            expected = leaves_of(eager(**given))
            for results in (plain.results(*given.values()), leaves_of(run(**given))):
                for result, value in zip(results, expected, strict=True):
                    error = 0.1 if tool == "quantize_dynamic" else 1e-3
                    assert_same(result, value, rtol=0, atol=error * max(float(value.abs().max()), 1e-2))


@pytest.mark.filterwarnings("ignore")
def test_tools_leave_the_first_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = StreamingGru()
    twin = copy.deepcopy(model)
    example = {"chunk": torch.randn(1, 5, 3)}
    path = capture(model, (), example).to_onnx(tmp_path / "gru.onnx")
    assert_right_after_tools(path, twin, lambda: {"chunk": torch.randn(1, 5, 3)})


def _counter() -> Any:
    total = torch.tensor([2.0, 3.0])
    steps = torch.tensor(4)

    def count(x: Tensor) -> Tensor:
        steps.add_(1)
        return total.add_(x) * steps

    return count


def test_first_state_of_all_dtypes(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.int8, torch.uint8, torch.int64, torch.bool]
    held = {f"s{number}": torch.tensor([1, 0, 1]).to(dtype) for number, dtype in enumerate(dtypes)}

    def run(x: Tensor) -> list[Tensor]:
        before = [value.clone() for value in held.values()]
        for value in held.values():
            value.copy_(x)
        return before

    path = capture(run, (torch.ones(3),)).to_onnx(tmp_path / "dtypes.onnx")
    raw, loaded = PlainFile(path).results(torch.ones(3)), onnx.load(path)(torch.ones(3))
    for result, other, dtype in zip(raw, loaded, dtypes, strict=True):
        assert_same(result, torch.tensor([1, 0, 1]).to(dtype))
        assert_same(other, torch.tensor([1, 0, 1]).to(dtype))


def test_large_first_state_that_a_tool_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_state, "_IN_METADATA", 4)
    path = capture(_counter(), (torch.ones(2),)).to_onnx(tmp_path / "large.onnx")
    eager, run, x = _counter(), onnx.load(path), torch.rand(2)
    torch.testing.assert_close(run(x), eager(x))
    made = tmp_path / "made.onnx"
    _optimized_by_onnxscript(path, made)
    with pytest.raises(
        ValueError, match=r"no first value for its state `steps` .*, `total` .*(?s:.*)dropped.*(?s:.*)state="
    ):
        onnx.load(made)
    state = onnx.load(path).state
    eager, run = _counter(), onnx.load(made, state=dict(state))
    for _ in range(2):
        torch.testing.assert_close(run(x), eager(x))


def test_state_to_begin_with(tmp_path: Path) -> None:
    path = capture(_counter(), (torch.ones(2),)).to_onnx(tmp_path / "state.onnx")
    run = onnx.load(path, state={"total": torch.tensor([10.0, 20.0])})
    torch.testing.assert_close(run(torch.ones(2)), torch.tensor([55.0, 105.0]))
    for wrong, message in [
        ({"sum": torch.ones(2)}, "no state `sum`"),
        ({"total": torch.ones(3)}, r"has size \[2\]"),
        ({"total": torch.ones(2, dtype=torch.float64)}, "float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            onnx.load(path, state=wrong)


# Files that are changed, or written anew


def _renamed(path: Path, **names: str) -> Path:
    model = package.load(str(path))
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    package.save(model, str(path))
    return path


@pytest.mark.parametrize(("name", "message"), [("output_0", "no output `output_0`"), ("x", "an input `other`")])
def test_renamed_inputs_and_outputs_are_refused(name: str, message: str, tmp_path: Path) -> None:
    path = _renamed(capture(_counter(), (torch.ones(2),)).to_onnx(tmp_path / "renamed.onnx"), **{name: "other"})
    with pytest.raises(ValueError, match=message) as caught:
        onnx.load(path)
    assert "try  restore the names" in str(caught.value)


def test_names_that_are_changed_in_the_metadata_as_well(tmp_path: Path) -> None:
    path = _renamed(capture(_counter(), (torch.ones(2),)).to_onnx(tmp_path / "renamed.onnx"), output_0="total_now")
    model = package.load(str(path))
    entry = next(entry for entry in model.metadata_props if entry.key == "functionalize")
    convention = json.loads(entry.value)
    convention["results"][0]["name"] = "total_now"
    entry.value = json.dumps(convention)
    package.save(model, str(path))
    assert_calls(path, _counter(), lambda: (torch.rand(2),))


def test_other_types_of_state_are_refused(tmp_path: Path) -> None:
    held = torch.zeros(2)

    def hold(x: Tensor) -> Tensor:
        before = held.clone()
        held.copy_(x)
        return before

    path = capture(hold, (torch.ones(2),)).to_onnx(tmp_path / "typed.onnx")
    model = package.load(str(path))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.type.tensor_type.elem_type = package.TensorProto.DOUBLE
    package.save(model, str(path))
    with pytest.raises(ValueError, match="`held` is float32"):
        onnx.load(path)


def test_metadata_that_are_lost_or_of_another_version(tmp_path: Path) -> None:
    path = capture(_counter(), (torch.ones(2),)).to_onnx(tmp_path / "lost.onnx")
    model = package.load(str(path))
    convention = next(entry for entry in model.metadata_props if entry.key == "functionalize")
    convention.value = json.dumps({**json.loads(convention.value), "format": 3})
    package.save(model, str(path))
    with pytest.raises(ValueError, match=r"format is 3.*(?s:.*)write it again"):
        onnx.load(path)
    del model.metadata_props[:]
    package.save(model, str(path))
    with pytest.raises(ValueError, match="copy the entries"):
        onnx.load(path)


def test_weights_of_a_file_that_was_there_are_removed(tmp_path: Path) -> None:
    x = torch.rand(1, 90)
    program, other = capture(nn.Linear(90, 80), (x,)), capture(nn.Linear(90, 70), (x,))
    (tmp_path / "mine.onnx.data").write_text("of somebody else")
    first, second, mine = (tmp_path / f"{name}.onnx" for name in ("first", "second", "mine"))
    program.to_onnx(first, external_data=True)
    other.to_onnx(second, external_data=True)
    program.to_onnx(mine)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {name for each in (first, second, mine) for name in (each.name, f"{each.name}.data")}
    assert onnx.load(first)(x).shape == (1, 80) and onnx.load(second)(x).shape == (1, 70)
    program.to_onnx(first)
    assert not Path(f"{first}.data").exists() and Path(f"{second}.data").exists() and Path(f"{mine}.data").exists()
    assert_calls(first, program, lambda: (x,), calls=1)
    capture(nn.Linear(3, 2), (torch.ones(1, 3),)).to_onnx(second)
    assert not Path(f"{second}.data").exists()


# Models of libraries


_IN_CI = ("gru", "resnet", "llama")
# The first in a test of its own; each call of the second is at another position; the last rounds to lengths, which
# what quantization leaves of a number may change.
_WITHOUT_TOOLS = ("gru", "llama", "vits")


def _marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow(seconds=4) if name in _IN_CI else pytest.mark.full)


@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(map(_marked, MODELS)))
def test_model_in_plain_onnx_runtime(name: str, tmp_path: Path) -> None:
    if name != "gru":
        pytest.importorskip("transformers")
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(MODELS[name]())
    (model, inputs), (twin, others) = made
    with torch.no_grad():
        program = capture(model, (), inputs(), is_exporting=name not in INSPECTING)
        path = program.to_onnx(tmp_path / "model.onnx")
        fresh = copy.deepcopy(twin)
        plain = PlainFile(path)
        for _ in range(3):
            given = others()
            assert list(given) == [argument["name"] for argument in plain.convention["arguments"]]
            for result, value in zip(plain.results(*given.values()), leaves_of(twin(**given)), strict=True):
                assert_same(result, value)
        if name not in _WITHOUT_TOOLS:
            assert_right_after_tools(path, fresh, inputs)


def test_the_first_state_is_read_without_the_package(tmp_path: Path) -> None:
    path = capture(_counter(), (torch.ones(2),)).to_onnx(tmp_path / "plain.onnx")
    plain = PlainFile(path)
    assert {name: value.tolist() for name, value in plain.state.items()} == {"total": [2.0, 3.0], "steps": 4}
    assert isinstance(plain.state["steps"], numpy.ndarray)


def test_a_first_state_that_is_minus_zero(tmp_path: Path) -> None:
    held = torch.tensor([-0.0, 0.0])

    def run(x: Tensor) -> Tensor:
        before = held.clone()
        held.copy_(x)
        return before

    path = capture(run, (torch.ones(2),)).to_onnx(tmp_path / "zero.onnx")
    assert onnx.load(path)(torch.ones(2)).signbit().tolist() == [True, False]


def test_a_cache_that_is_written_in_place_and_returned(tmp_path: Path) -> None:
    keys = torch.zeros(1, 8, 4)

    def decode(x: Tensor, position: Tensor) -> Any:
        keys[:, position] = x
        return keys, x

    run = onnx.load(capture(decode, (torch.ones(1, 4), torch.tensor([0]))).to_onnx(tmp_path / "cache.onnx"))
    assert [state.in_place for state in run.convention.state] == [True]
    expected, results = torch.zeros(1, 8, 4), []
    for number in range(3):
        x = torch.rand(1, 4)
        expected[:, number] = x
        cache, same = run(x, torch.tensor([number]))
        assert same is x
        results.append((cache, expected.clone()))
    for cache, value in results:
        torch.testing.assert_close(cache, value)


def test_sizes_of_what_torch_exported(tmp_path: Path) -> None:
    from functionalize import from_exported_program

    exported = torch.export.export(nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("b")},))
    plain = PlainFile(from_exported_program(exported).to_onnx(tmp_path / "exported.onnx"))
    assert plain.inputs == {"input": ["input_dim_0", 3]}
    assert plain.outputs == {"output_0": ["input_dim_0", 2]}


def test_gradients_that_a_step_leaves_have_the_sizes_of_their_parameters(tmp_path: Path) -> None:
    """Nothing reads them: their sizes are fixed all the same."""
    layer = nn.Linear(3, 2)

    def step(x: Tensor) -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    plain = PlainFile(capture(step, (torch.ones(4, 3),)).to_onnx(tmp_path / "step.onnx"))
    assert plain.inputs["layer.weight_grad"] == [2, 3]
    assert plain.inputs["layer.bias_grad"] == [2]
