"""The command line: specs, targets, commands, errors, and what a pipe and a terminal see."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from functionalize import capture
from functionalize.cli.app import commands
from functionalize.cli.checking import at_ends
from functionalize.cli.shared import REMOVE, Job, describe
from functionalize.cli.specs import DTYPES, Spec, SpecError, make_inputs
from functionalize.cli.targets import TargetError, bounds_of, dynamic_shapes_of, find, grown, optimizer_of

MODELS = """
import torch

def decode(cache, new):
    cache[2] = new
    return cache.sum(dim=0)

def removed(x, remove):
    return x.mul_(remove)


def scaled(x, *, factor=None, mask=None):
    y = x if mask is None else x.masked_fill(mask, 0)
    return y if factor is None else y.mul_(factor)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(self.norm(x)).relu_()

class Loss(Net):
    def forward(self, x):
        return super().forward(x).square().mean()

class Needy(Net):
    def __init__(self, width):
        super().__init__()

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)

class Block(torch.nn.Module):
    def forward(self, x):
        for _ in range(20000):
            x = x.add(1)
        return x

def product(x):
    return x @ x

def make():
    return Net()

def inputs():
    return torch.randn(4, 3), torch.randn(3)

def keyword_inputs():
    return (torch.randn(4),), {"factor": 2.0}

def one_input():
    return torch.randn(5, 3)

calls = []

def deciding(x):
    return x + 1 if x.mean() < 50 else x * 2

def branching(x):
    return x + 1 if x.shape[0] > 5 else x * 2

def unlike(x):
    calls.append(x)  # the program is captured on the first call, and gives what that gave
    return x + min(len(calls), 2)

def unsupported(x):
    x.unfold(0, 3, 2).cumsum_(0)
    return x

limit = 3
shapes = {"x": {0: torch.export.Dim.AUTO}}

stepped = Net()
optimizer = torch.optim.Adam(stepped.parameters())

def step(x):
    optimizer.zero_grad()
    loss = stepped(x).sum()
    loss.backward()
    optimizer.step()
    return loss
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command where `cli_models` can be imported."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(commands, arguments)

    yield invoke
    sys.modules.pop("cli_models", None)


def passes(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


# Specs


@pytest.mark.parametrize(
    "text",
    [
        "f32[2,16]",
        "f32[batch=2,16]",
        "f32[]",
        "i64[2,5]<1000",
        "bool[3]@mask",
        "=3",
        "=None@mask",
        "='a@b'",
        "c64[2]",
        "u8[4]<256@pixels",
    ],
)
def test_specs_print_back(text: str) -> None:
    assert str(Spec.parse(text)) == text


def test_specs_make_tensors() -> None:
    for name, dtype in DTYPES.items():
        (made,), _ = make_inputs([Spec.parse(f"{name}[3,2]")], seed=0)
        assert made.dtype is getattr(torch, dtype) and made.shape == (3, 2)
    (tokens,), named = make_inputs([Spec.parse("i64[1000]<7"), Spec.parse("=2.5@factor")], seed=0)
    assert set(tokens.tolist()) == set(range(7))
    assert named == {"factor": 2.5}
    (again,), _ = make_inputs([Spec.parse("i64[1000]<7")], seed=0)
    (other,), _ = make_inputs([Spec.parse("i64[1000]<7")], seed=1)
    assert torch.equal(tokens, again) and not torch.equal(tokens, other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f33[2]", "cannot read the input 'f33"),
        ("f32[2", "a tensor is written as"),
        ("f32[n]", "a tensor is written as"),
        ("f32[-1]", "a tensor is written as"),
        ("f32[2]<5", "only integers can have a limit"),
        ("bool[2]<1", "only integers can have a limit"),
        ("i8[2]<129", "at most 128"),
        ("u8[2]<0", "must be above 0"),
        ("=x", "a Python literal"),
    ],
)
def test_specs_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("[", r"\[")):
        Spec.parse(text)


def test_a_keyword_is_given_once() -> None:
    with pytest.raises(SpecError, match="given twice"):
        make_inputs([Spec.parse("=1@x"), Spec.parse("=2@x")], seed=0)


# Targets


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cli_models", "write package.module:object"),
        ("nowhere.models:f", "no module 'nowhere'"),
        ("cli_models:decod", "similar names: decode"),
        ("cli_models:limit", "neither a function nor a module"),
        ("cli_models:Needy", "write a function that makes the model"),
    ],
)
def test_targets_that_cannot_be_used(run: Any, name: str, message: str) -> None:
    job = Job(name, (), None, call=False, evaluate=False, remove=REMOVE[0], seed=0, as_json=False)
    with pytest.raises(TargetError, match=message):
        _ = job.model


def test_a_module_that_lacks_a_dependency_says_which(run: Any) -> None:
    Path("broken_models.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        find("broken_models:f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SGG", "similar names: SGD"),
        ("SGD(0.1)", "write it as 'SGD"),
        ("SGD(lr=", "cannot read the optimizer"),
        ("SGD(speed=1)", "cannot be called with the model's parameters"),
        ("builtins:list", "returns a list, which is not an optimizer"),
    ],
)
def test_optimizers_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=re.escape(message)):
        optimizer_of(text, torch.nn.Linear(1, 1))


def test_an_optimizer_of_a_function_is_an_object() -> None:
    with pytest.raises(TargetError, match="name the optimizer object"):
        optimizer_of("SGD", torch.relu)


def test_sizes_that_may_differ() -> None:
    specs = [Spec.parse(text) for text in ("f32[n=4,m=3]@mask", "f32[2]", "f32[n=4]")]
    bounds = bounds_of(["n=2:5"])
    shapes = dynamic_shapes_of(specs, bounds)
    assert [None if part is None else sorted(part) for part in shapes] == [None, [0], [0, 1]]
    assert (shapes[1][0].min, shapes[1][0].max) == (2, 5) and shapes[1][0] is shapes[2][0]
    assert grown(specs, bounds, 3) == {"n": 5, "m": 6}
    assert dynamic_shapes_of([Spec.parse("f32[2]")], {}) is None
    for text in ("n", "n=5:2", "2=3:4"):
        with pytest.raises(TargetError):
            bounds_of([text])
    for text, message in (("k=2:3", "no input has a size named 'k'"), ("n=5:", "outside its bounds")):
        with pytest.raises(TargetError, match=message):
            dynamic_shapes_of(specs, bounds_of([text]))


# Commands


def test_trace(run: Any) -> None:
    printed = passes(run("trace", "cli_models:decode", "f32[4,3]", "f32[3]"))
    assert "torch.ops.aten.select_scatter.default" in printed
    assert "writes cache: aten.copy_" in printed and "cli_models.py:5" in printed


def test_trace_for_machines(run: Any) -> None:
    data = json.loads(passes(run("trace", "cli_models:Net", "f32[4,3]", "--json")))
    assert list(data) == ["target", "remove", "ops", "inputs", "outputs", "mutations", "code"]
    kinds = {entry["name"]: entry["kind"] for entry in data["inputs"]}
    assert kinds["p_norm_weight"] == "parameter" and kinds["x"] == "user_input"
    assert {"kind": "user_input", "name": "x", "target": None, "dtype": "torch.float32", "shape": [4, 3]} in data[
        "inputs"
    ]
    written = {write["target"] for write in data["mutations"]}
    assert written == {"norm.num_batches_tracked", "norm.running_mean", "norm.running_var"}


def test_what_is_removed_can_be_chosen(run: Any) -> None:
    views = "torch.ops.aten.select.int"
    given = ("trace", "torch:select", "f32[4,3]", "=0", "=1")
    assert views not in passes(run(*given))
    assert views in passes(run(*given, "--remove", "mutations"))


def test_evaluation_mode_writes_no_statistics(run: Any) -> None:
    data = json.loads(passes(run("trace", "cli_models:make", "f32[4,3]", "--call", "--eval", "--json")))
    assert data["mutations"] == []
    refused = run("trace", "cli_models:decode", "f32[4,3]", "f32[3]", "--eval")
    assert refused.exit_code == 1 and "--eval is for modules" in refused.stderr


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "arguments",
    [
        ("cli_models:decode", "f32[4,3]", "f32[3]"),
        ("cli_models:decode", "--inputs", "cli_models:inputs"),
        ("cli_models:scaled", "--inputs", "cli_models:keyword_inputs"),
        ("cli_models:scaled", "f32[4]", "=2.0@factor", "bool[4]@mask"),
        ("cli_models:Net", "--inputs", "cli_models:one_input"),
        ("cli_models:make", "f32[4,3]", "--call"),
        ("cli_models:Net", "f32[n=4,3]", "--range", "n=2:5"),
        ("cli_models:Net", "f32[4,3]", "--dynamic-shapes", "cli_models:shapes"),
        ("cli_models:Loss", "f32[n=4,3]", "--optimizer", "AdamW(lr=0.01)"),
        ("cli_models:step", "f32[4,3]", "--optimizer", "cli_models:optimizer"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_verify(run: Any, arguments: tuple[str, ...]) -> None:
    assert "equals eager in 3 runs" in passes(run("verify", *arguments, "--runs", "3"))


def test_verify_tries_the_ends_of_ranges(run: Any) -> None:
    printed = passes(run("verify", "cli_models:Net", "f32[n=4,3]", "--range", "n=2:9"))
    assert "in 1 run, and with the smallest and largest dynamic sizes" in printed
    assert "ends" not in passes(run("verify", "cli_models:Net", "f32[4,3]"))


def test_ends_of_ranges() -> None:
    def made(x: Any, more: dict[str, Any]) -> Any:
        return x.view(-1, 4).sum() + more["y"].sum() + more["z"]

    batch = torch.export.Dim("batch", min=3, max=9)
    dims = {0: torch.export.Dim.AUTO}, {"y": {1: batch}, "z": {0: batch}}
    inputs = torch.arange(12), {"y": torch.arange(10).view(5, 2).t(), "z": torch.arange(5)}
    program = capture(made, inputs, dynamic_shapes=dims)
    found = dict(at_ends(program, (inputs, {})))
    sizes = {said: (x.size(0), more["y"].size(1), more["z"].size(0)) for said, ((x, more), _) in found.items()}
    assert sizes == {
        "dimension 0 of the input `x` = 8": (8, 5, 5),
        "dimension 0 of the input `x` = 24": (24, 5, 5),
        "dimension 1 of the input `more_y` = 3": (12, 3, 3),
        "dimension 1 of the input `more_y` = 9": (12, 9, 9),
    }
    (x, more), _ = found["dimension 1 of the input `more_y` = 9"]
    assert more["z"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3] and more["y"].stride() == (1, 2)
    for (x, more), _ in found.values():
        assert torch.equal(program(x, more), made(x, more))


def test_ranges_that_a_program_does_not_take(run: Any) -> None:
    result = run("trace", "cli_models:branching", "f32[n=4]", "--range", "n=2:64")
    assert result.exit_code == 1 and "does not support 6" in result.stderr and "try  --range n=2:5, or" in result.stderr
    passes(run("trace", "cli_models:branching", "f32[n=4]", "--range", "n=2:5"))


def test_verify_finds_differences(run: Any) -> None:
    result = run("verify", "cli_models:unlike", "f32[3]")
    assert result.exit_code == 1 and "run 0: output 0: values" in result.stdout
    data = json.loads(run("verify", "cli_models:unlike", "f32[3]", "--json").stdout)
    assert list(data) == ["target", "functional", "equal", "runs", "differences"]


@pytest.mark.every(5)
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("kind", ["pt2", "onnx", "stablehlo"])
def test_exported_files_are_run_with_their_state(run: Any, kind: str) -> None:
    for package in {"onnx": ("onnxscript", "onnxruntime"), "pt2": ()}.get(kind, ("jax",)):
        pytest.importorskip(package)
    file = f"net.{kind}"
    assert passes(run("export", "cli_models:Net", "f32[4,3]", "--to", kind, "-o", file)) == f"wrote {kind}: {file}\n"
    data = json.loads(passes(run("run", file, "--calls", "3", "--json")))
    assert [call[0]["shape"] for call in data["calls"]] == [[4, 2]] * 3
    assert data["state"]["norm.num_batches_tracked"]["first"] == [3]
    assert data["calls"][0] != data["calls"][1]
    assert "state norm.num_batches_tracked: int64[] 2" in passes(run("run", file, "f32[4,3]", "--calls", "2"))
    assert passes(run("run", file, "--json")) == passes(run("run", file, "--json"))
    if kind != "pt2":
        other = run("run", file, "f32[5,3]")
        assert other.exit_code == 1 and other.stderr.startswith("error: InputMismatchError: the argument")


@pytest.mark.slow(seconds=3)
def test_training_steps_with_sizes_that_differ_are_exported(run: Any) -> None:
    given = ("cli_models:Loss", "f32[n=4,3]", "--range", "n=2:64", "--optimizer", "SGD(lr=0.5, momentum=0.9)")
    passes(run("export", *given, "--to", "pt2", "-o", "step.pt2"))
    first, *_, last = json.loads(passes(run("run", "step.pt2", "f32[6,3]", "--calls", "9", "--json")))["calls"]
    assert first[0]["shape"] == [] and first[0] != last[0]
    pytest.importorskip("jax")
    passes(run("export", *given, "--to", "stablehlo", "-o", "step.stablehlo"))
    calls = json.loads(passes(run("run", "step.stablehlo", "f32[6,3]", "--calls", "9", "--json")))["calls"]
    assert calls[0] != calls[-1]
    for size in (1, 65):
        assert run("run", "step.stablehlo", f"f32[{size},3]").stderr.startswith("error: InputMismatchError")


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("kind", ["pt2", "onnx", "stablehlo"])
def test_without_inputs_sizes_are_those_of_the_capture(run: Any, kind: str) -> None:
    for package in {"onnx": ("onnxscript", "onnxruntime"), "pt2": ()}.get(kind, ("jax",)):
        pytest.importorskip(package)
    passes(run("export", "cli_models:Net", "f32[n=7,3]", "--range", "n=5:64", "--to", kind, "-o", f"net.{kind}"))
    ran = run("run", f"net.{kind}", "--json")
    if kind == "stablehlo":  # its files do not tell
        assert "say which inputs to pass" in ran.stderr
        ran = run("run", f"net.{kind}", "f32[7,3]", "--json")
    assert json.loads(passes(ran))["calls"][0][0]["shape"] == [7, 2]


def test_files_that_cannot_be_written_or_run(run: Any, tmp_path: Path) -> None:
    for name in ("text.onnx", "text.pt2", "text.stablehlo"):
        (tmp_path / name).write_text("no model")
    (tmp_path / "folder.pt2").mkdir()
    for arguments, said in (
        (("run", "none.pt2"), "there is no file none.pt2"),
        (("run", "net.txt"), "end in .pt2, .onnx, .stablehlo"),
        (("run", "text.stablehlo"), "was not written by to_stablehlo"),
        (("run", "text.onnx"), "is not an ONNX file"),
        (("run", "text.pt2"), "was not written by torch.export"),
        (("export", "cli_models:Net", "f32[4,3]", "--to", "pt2", "-o", "net.onnx"), "ends in .pt2: net.pt2"),
        (("export", "cli_models:Net", "f32[4,3]", "-o", "net"), "name a file with one of these endings"),
        (("export", "cli_models:Net", "f32[4,3]", "-o", "net.txt"), "name a file with one of these endings"),
        (("export", "cli_models:Net", "f32[4,3]", "-o", "folder.pt2"), "name a file, folder.pt2/model.pt2"),
        (("export", "cli_models:Net", "f32[4,3]", "-o", "net.pt2", "--verify"), "--verify is for ONNX files"),
        (("export", "cli_models:Net", "f32[4,3]", "-o", "net.pt2", "--no-check"), "--no-check is for ONNX files"),
        (("export", "cli_models:Net", "f32[4,3]", "-o", "net.onnx", "--metadata", "x"), "write KEY=VALUE"),
    ):
        result = run(*arguments)
        assert result.exit_code != 0
        assert said in " ".join(result.output.split())


@pytest.mark.slow(seconds=5)
def test_the_ending_says_what_is_written_and_onnx_has_options(run: Any, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    names = ("--input-names", "rows", "--output-names", "scores", "--metadata", "author=me", "--opset-version", "18")
    given = ("export", "cli_models:Net", "f32[batch=4,3]", "--eval", "-o", "net.onnx", *names, "--verify")
    assert passes(run(*given, "--report", "net.md", "--external-data", "--exporting")) == "wrote onnx: net.onnx\n"
    model = onnx.load(tmp_path / "net.onnx")
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["rows", "scores"]
    assert model.opset_import[0].version == 18 and (tmp_path / "net.onnx.data").is_file()
    assert {entry.key: entry.value for entry in model.metadata_props}["author"] == "me"
    assert "| `rows` | FLOAT | [batch, 3] | argument |" in (tmp_path / "net.md").read_text()
    twice = run("export", "cli_models:Net", "f32[4,3]", "-o", "net.onnx", "--input-names", "a,b")
    assert twice.exit_code == 1 and "the program has 1: x" in twice.stderr


@pytest.mark.filterwarnings("default")
def test_a_module_in_training_mode_is_warned_of_in_one_line(run: Any, tmp_path: Path) -> None:
    said = run("export", "cli_models:Net", "f32[4,3]", "-o", "net.pt2").stderr
    assert said.startswith("warning: Net is exported in training mode") and said.count("\n") == 1
    assert not run("export", "cli_models:Net", "f32[4,3]", "--eval", "-o", "net.pt2").stderr


@pytest.mark.filterwarnings("default")
def test_asserted_decisions_are_listed_in_one_line(run: Any, tmp_path: Path) -> None:
    said = run("export", "cli_models:deciding", "f32[4,3]", "-o", "net.pt2").stderr
    assert said.startswith("warning: the program branches on tensor values") and said.count("\n") == 1
    assert "if x.mean() < 50 else x * 2 -> True; try use torch.where" in said


def test_report(run: Any, tmp_path: Path) -> None:
    printed = passes(run("report", "cli_models:decode", "f32[4,3]", "f32[3]", "-o", "page.html"))
    assert printed == "wrote page.html\n"
    page = (tmp_path / "page.html").read_text()
    assert "cli_models:decode" in page and "cache[2] = new" in page
    data = json.loads(passes(run("report", "cli_models:decode", "f32[4,3]", "f32[3]", "--json")))
    assert data == {"target": "cli_models:decode", "file": "report.html", "mutations": 1}


@pytest.mark.slow
def test_ops() -> None:
    runner = CliRunner()
    explained = passes(runner.invoke(commands, ["ops", "add_.Tensor", "aten.split"]))
    assert "functional  aten::add.Tensor" in explained and "aten::split.Tensor" in explained
    assert "aten::split.Tensor\n" in passes(runner.invoke(commands, ["ops", "--view", "multi"]))
    data = json.loads(passes(runner.invoke(commands, ["ops", "add_.Tensor", "--json"])))
    assert data["ops"][0]["name"] == "aten::add_.Tensor" and data["ops"][0]["kind"] == "inplace"
    listed = json.loads(passes(runner.invoke(commands, ["ops", "--kind", "inplace", "--random", "--json"])))
    assert "aten::bernoulli_.float" in {row["name"] for row in listed["ops"]}
    unknown = runner.invoke(commands, ["ops", "ad_.Tensor"])
    assert unknown.exit_code == 1 and "similar names" in unknown.stderr
    assert runner.invoke(commands, ["ops"]).exit_code == 2


def test_help_has_examples() -> None:
    for command in ("", "trace", "report", "verify", "export", "ops"):
        printed = passes(CliRunner().invoke(commands, [*command.split(), "--help"]))
        assert "Example" in printed and "functionalize " in printed


# Errors


@pytest.mark.slow
def test_errors_are_one_line_unless_asked(run: Any) -> None:
    given = ("trace", "cli_models:decode", "f32[4,3]")
    plain = run(*given)
    assert plain.exit_code == 1 and plain.stdout == ""
    assert plain.stderr.startswith("error: TypeError: decode() missing 1") and plain.stderr.count("\n") == 1
    for asked in (("--traceback", *given), (*given, "--traceback")):
        result = run(*asked)
        assert result.exit_code == 1 and "Traceback" in result.stderr and "TypeError" in result.stderr
    data = json.loads(run(*given, "--json").stdout)
    assert data["error"]["type"] == "TypeError"


@pytest.mark.parametrize("command", ["trace", "verify", "report", "export -o out.pt2", "export -o out.onnx --to onnx"])
def test_torch_logs_nothing_before_an_error(run: Any, command: str) -> None:
    records, logger = list[logging.LogRecord](), logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logger.addHandler(handler)
    try:
        name, *options = command.split()
        result = run(name, "cli_models:product", "f32[2,3]", *options)
        assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "reduction dim" in result.stderr
        assert not records
        assert run(name, "cli_models:product", "f32[2,3]", *options, "--traceback").exit_code == 1
        assert records
    finally:
        logger.removeHandler(handler)


def test_errors_of_programs_keep_their_advice(run: Any) -> None:
    result = run("trace", "cli_models:unsupported", "f32[9]")
    assert result.exit_code == 1
    assert "UnsupportedMutationError" in result.stderr and "cli_models.py" in result.stderr and "try" in result.stderr


def test_commands_that_cannot_be_read(run: Any) -> None:
    for arguments in (("trace",), ("trace", "cli_models:decode", "f33[2]"), ("nothing",), ("trace", "x:y", "--no")):
        assert run(*arguments).exit_code == 2
    both = run("trace", "cli_models:decode", "f32[2]", "--inputs", "cli_models:inputs")
    assert both.exit_code == 1 and "one of the two" in both.stderr


def test_arguments_may_be_called_like_options_of_capture(run: Any) -> None:
    assert run("verify", "cli_models:removed", "f32[4]", "=2@remove").exit_code == 0


# Processes


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "cli_models.py").write_text(MODELS)
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.mark.full(seconds=8)
def test_a_pipe_sees_no_progress(tmp_path: Path) -> None:
    done = process("-m", "functionalize", "trace", "cli_models:Deep", "f32[2]", "--json", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["ops"] == 20000


@pytest.mark.slow
def test_a_terminal_sees_progress(tmp_path: Path) -> None:
    """A capture of some seconds, with a terminal as its standard error."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "functionalize", "trace", "cli_models:Deep", "f32[2]"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as running:
        os.close(theirs)
        seen = b""
        while running.poll() is None or select.select([ours], [], [], 0)[0]:
            try:
                if select.select([ours], [], [], 0.2)[0]:
                    seen += os.read(ours, 10000)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert running.returncode == 0
    assert b"ops/s, in block" in seen


def test_progress_in_words() -> None:
    assert describe(12000, 2.0, "block") == "captured 12,000 ops, 6,000 ops/s, in block"
    assert describe(0, 0.0, "") == "captured 0 ops, - ops/s"


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_one_line_says_which_package_is_missing(missing: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from functionalize.cli import main; sys.exit(main(['ops']))"
    done = process("-c", code, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"needs the package {missing}" in done.stderr and "functionalize[cli]" in done.stderr


@pytest.mark.slow
def test_console_script_and_module_are_one(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("functionalize")
    by_script = subprocess.run([script, "ops", "add_.Tensor"], capture_output=True, text=True, cwd=tmp_path)
    by_module = process("-m", "functionalize", "ops", "add_.Tensor", cwd=tmp_path)
    assert by_script.returncode == by_module.returncode == 0
    assert by_script.stdout == by_module.stdout != ""


def test_help_and_tables_do_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from functionalize.cli import main; status = main(['ops', 'add_.Tensor'])\n"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    assert process("-c", code, cwd=tmp_path).returncode == 0
