"""The options of `to_onnx`: what each does to the file, what contradicts another, and what is put back by `verify`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from functionalize import NotEquivalentError, TrainingModeWarning, UnsupportedExportError, capture

pytest.importorskip("onnx")
onnxscript = pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from functionalize.backends import onnx  # noqa: E402

op: Any = onnxscript.opset18


class Counted(nn.Module):
    """State of all kinds: a buffer, a number, a tensor that the first call makes."""

    total: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.last = nn.Linear(2, 2), 0, None
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.total.add_(x.sum(0))
        if self.last is None:
            self.last = torch.zeros(2)
        self.last = self.last * 0.5 + self.layer(x).mean(0)
        return {"scores": x * self.total + self.last, "x": x}


def names(model: Any) -> tuple[list[str], list[str]]:
    return [value.name for value in model.graph.input], [value.name for value in model.graph.output]


def exponential(**options: Any) -> Any:
    return capture(lambda x: x.exp(), (torch.ones(3),)).to_onnx(**options)


def doubled(x: Any) -> Any:
    return op.Add(x, x)


@pytest.mark.slow(seconds=4)
def test_names_are_those_that_were_given() -> None:
    program = capture(Counted(), (torch.randn(3, 2),))
    model = program.to_onnx(input_names=["total"], output_names=["calls", "new.total"], verify=True)
    inputs, outputs = names(model)
    assert inputs[-1] == "total" and outputs[-2:] == ["calls", "new.total"]
    assert len({*inputs, *outputs}) == len(inputs) + len(outputs)
    found = onnx.load(model.SerializeToString())(torch.ones(3, 2))
    torch.testing.assert_close(found, Counted.forward(program.original, torch.ones(3, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"input_names": ["a", "b"]}, ValueError, "2 names, but the program has 1: x"),
        ({"output_names": []}, ValueError, "0 names, but the program has 1: output_0"),
        ({"output_names": ["x"]}, ValueError, "'x', the name of an input"),
        ({"input_names": ["a"], "output_names": ["a"]}, ValueError, "are unique"),
        ({"input_names": ["a", "a"]}, ValueError, "'a' twice"),
        ({"input_names": "x"}, TypeError, "a list of names"),
        ({"opset_version": 99}, ValueError, "20, the default"),
        ({"opset_version": "18"}, ValueError, "20, the default"),
        ({"custom_translation_table": {torch.ops.aten.exp: doubled}}, TypeError, "aten.exp.default"),
        ({"custom_translation_table": {torch.ops.aten.exp.default: [doubled]}}, TypeError, "one function"),
        ({"custom_translation_table": {torch.ops.aten.linear.default: doubled}}, ValueError, "is decomposed"),
        ({"custom_translation_table": {torch.ops.aten.exp_.default: doubled}}, ValueError, "it writes"),
        ({"metadata": {"functionalize": ""}}, ValueError, "are reserved"),
        ({"metadata": {"epoch": 3}}, TypeError, "strings for key and value"),
        ({"verify": True, "check": False}, ValueError, "one of the two"),
        ({"verify": [(torch.ones(3),)]}, TypeError, "pairs of arguments"),
        ({"verify": []}, ValueError, "an empty list"),
        ({"report": True}, ValueError, "report='model.md'"),
        ({"external_data": True}, ValueError, "needs the path"),
    ],
)
def test_options_that_are_wrong_say_what_to_do(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        exponential(**options)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        exponential(path=tmp_path)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("opset", [14, 17, 18, 23])
def test_opsets(opset: int) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)).eval()
    made = capture(model, (torch.randn(2, 1, 4),)).to_onnx(opset_version=opset, verify=True)
    assert [entry.version for entry in made.opset_import if not entry.domain] == [opset]


def test_an_opset_without_an_operator_is_refused() -> None:
    with pytest.raises(UnsupportedExportError, match="opset 16"):
        capture(lambda x: torch.fft.rfft(x).abs(), (torch.randn(4),)).to_onnx(opset_version=16)


def test_translations_of_your_own_come_first() -> None:
    table = {torch.ops.aten.exp.default: doubled}
    found = onnx.load(exponential(custom_translation_table=table))(torch.ones(3))
    assert found.tolist() == [2, 2, 2]
    with pytest.raises(NotEquivalentError, match=r"call 1, output `output_0`: .*absolute difference"):
        exponential(custom_translation_table=table, verify=True)


@pytest.mark.slow(seconds=4)
def test_verify_puts_back_what_the_original_changes() -> None:
    module = Counted()
    program = capture(module, (torch.randn(3, 2),))
    for _ in range(2):  # without state, and with some
        state = {name: value.clone() for name, value in module.state_dict().items()}
        calls, last, drawn = module.calls, module.last, torch.get_rng_state()
        kept = None if last is None else last.clone()
        program.to_onnx(verify=True)
        assert module.calls == calls and module.last is last and torch.equal(torch.get_rng_state(), drawn)
        assert last is None or (kept is not None and torch.equal(last, kept))
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
        program(torch.randn(3, 2))


@pytest.mark.slow(seconds=4)
def test_verify_of_a_training_step_leaves_its_optimizer() -> None:
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(layer.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    program, weight = capture(step, (torch.randn(4, 3),)), layer.weight.detach().clone()
    program.to_onnx(verify=True)
    assert torch.equal(layer.weight, weight) and not optimizer.state and layer.weight.grad is None


@pytest.mark.slow(seconds=4)
def test_verify_by_calls_of_your_own() -> None:
    program = capture(lambda i, table: table[i] if i.sum() > 3 else -table[i], (torch.tensor([3, 1]), torch.rand(4, 2)))
    with pytest.raises(NotEquivalentError, match="pass calls with data"):
        program.to_onnx(verify=True)  # whose integers are zeros
    program.to_onnx(verify=[((torch.tensor([2, 2]),), {"table": torch.rand(4, 2)})])
    with pytest.raises(ValueError, match="random"):
        capture(nn.Dropout(), (torch.ones(3),)).to_onnx(verify=True)


def test_a_report_is_written_with_the_file_or_its_causes(tmp_path: Path) -> None:
    program = capture(lambda x: x + 1, (torch.ones(4),), dynamic_shapes={"x": {0: "batch"}})
    program.to_onnx(tmp_path / "a.onnx", report=True, metadata={"author": "me"})
    page = (tmp_path / "a.onnx.md").read_text()
    assert "| `x` | FLOAT | [batch] | argument |" in page and "loaded by ONNX Runtime" in page
    with pytest.raises(UnsupportedExportError):
        capture(torch.linalg.eigvals, (torch.eye(2),)).to_onnx(tmp_path / "b.onnx", report=tmp_path / "why.md")
    page = (tmp_path / "why.md").read_text()
    assert "not written" in page and "linalg_eig" in page and not (tmp_path / "b.onnx").exists()


def test_what_this_engine_does_not_load_can_be_written() -> None:
    program = capture(lambda x: x @ x, (torch.ones(2, 2, dtype=torch.bfloat16),))
    with pytest.raises(UnsupportedExportError, match="check=False"):
        program.to_onnx()
    assert [node.op_type for node in program.to_onnx(check=False).graph.node] == ["MatMul"]


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.every(5)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()), "Dropout at `1`"),
        (nn.BatchNorm1d(2), "BatchNorm1d"),
        (Dropped(), "random"),
        (nn.Dropout(0.0), None),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval(), None),
        (nn.Linear(2, 2), None),
    ],
)
def test_training_mode_is_warned_of(model: nn.Module, said: str | None) -> None:
    program = capture(model, (torch.randn(3, 2),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program.to_onnx()
    messages = [str(one.message) for one in caught if one.category is TrainingModeWarning]
    assert len(messages) == (said is not None) and all(str(said) in message for message in messages)
    assert all(one.filename == __file__ for one in caught if one.category is TrainingModeWarning)


# Sizes by name


def sizes(model: Any) -> list[list[Any]]:
    values = (*model.graph.input, *model.graph.output)
    return [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values]


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: "batch"}, "y": {0: "batch"}},
        ({0: "batch"}, {-2: "batch"}),
        [("batch", None), ["batch", None]],
        {"x": {0: "batch"}, "y": {0: Dim("batch", max=64)}},
    ],
)
def test_sizes_of_one_name_are_equal(shapes: Any) -> None:
    inputs = torch.ones(4, 3), torch.ones(4, 3)
    program = capture(lambda x, y: x + y, inputs, dynamic_shapes=shapes)
    assert sizes(program.to_onnx()) == [["batch", 3]] * 3
    assert program(torch.ones(7, 3), torch.ones(7, 3)).shape == (7, 3)


def test_sizes_that_follow_from_a_name() -> None:
    shapes = {"x": {0: "batch"}, "y": {0: "2*batch + 1"}}
    program = capture(lambda x, y: x.sum() + y.sum(), (torch.ones(4), torch.ones(9)), dynamic_shapes=shapes)
    assert program(torch.ones(5), torch.ones(11)) == 16


@pytest.mark.parametrize("text", ["a b", "past + new", "3", "", "class"])
def test_texts_that_are_no_names_of_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="a name such as"):
        capture(lambda x: x, (torch.ones(4),), dynamic_shapes={"x": {0: text}})
