"""Engines behind an ExportedProgram, driven end to end: three calls in a row, their state threaded, beside eager.

Those that are not installed are skipped; docs/reference/export-details.md says which install beside torch, and what
they do. Limits: CPU, small programs.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from examples.explicit_state import for_engines
from functionalize import capture
from functionalize.errors import UnsupportedExportError

pytestmark = pytest.mark.filterwarnings("ignore")  # of compilers, about their own tools
Compiled = Callable[..., list[Tensor]]
Program = Callable[[Tensor], Tensor]
PRECISE = {"INFERENCE_PRECISION_HINT": "f32"}  # OpenVINO computes with bfloat16 where the processor does
IREE = {"iree.compiler.tools": "iree-base-compiler", "iree.runtime": "iree-base-runtime"}


class Counter(nn.Module):
    """Begins at 5: an engine may keep what is written, and lose what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.full((3,), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.count
        self.count.add_(1)
        return y


class Weight(nn.Module):
    """Writes a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight
        with torch.no_grad():
            self.weight.add_(1)
        return y


class Norm(nn.Module):
    """Its statistics are seen in what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y + sum(self.norm.buffers())


class Cache(nn.Module):
    """A decoding step: a row of keys is written at a position that moves."""

    def __init__(self, scatter: bool = False) -> None:
        super().__init__()
        self.keys = nn.Buffer(torch.zeros(1, 8, 4))
        self.position = nn.Buffer(torch.zeros(1, dtype=torch.int64))
        self.scatter = scatter

    def forward(self, x: Tensor) -> Tensor:
        if self.scatter:
            self.keys.scatter_(1, self.position.expand(1, 1, 4), x[None])
        else:
            self.keys[:, self.position] = x[None]
        self.position.add_(1)
        return nn.functional.scaled_dot_product_attention(x[None], self.keys, self.keys)


def training(optimizer_of: Callable[..., torch.optim.Optimizer], **options: float) -> Program:
    layer = nn.Linear(3, 2)
    optimizer = optimizer_of(layer.parameters(), **options)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


PROGRAMS: dict[str, tuple[Callable[[], Program], tuple[int, ...]]] = {
    "counter": (Counter, (3,)),
    "weight": (Weight, (3,)),
    "batch-norm": (Norm, (4, 3)),
    "cache": (Cache, (1, 4)),
    "cache-by-scatter": (lambda: Cache(scatter=True), (1, 4)),
    "sgd": (lambda: training(torch.optim.SGD, lr=0.1, momentum=0.9), (4, 3)),
    "adamw": (lambda: training(torch.optim.AdamW, lr=0.1), (4, 3)),
}


def openvino(exported: ExportedProgram) -> Compiled:
    ov: Any = importlib.import_module("openvino")
    compiled = ov.compile_model(ov.convert_model(exported), "CPU", PRECISE)
    return lambda *inputs: [torch.tensor(one) for one in compiled([x.numpy() for x in inputs]).values()]


def executorch(exported: ExportedProgram) -> Compiled:
    exir: Any = importlib.import_module("executorch.exir")
    passes: Any = importlib.import_module("executorch.exir.passes.init_mutable_pass")
    runtime: Any = importlib.import_module("executorch.runtime")
    written = [name.replace(".", "_") for name in exported.graph_signature.buffers_to_mutate.values()]
    keeping = exir.ExecutorchBackendConfig(passes=[passes.InitializedMutableBufferPass(written)])  # else they are zeros
    program = runtime.Runtime.get().load_program(exir.to_edge(exported).to_executorch(keeping).buffer)
    method = program.load_method("forward")

    def call(*inputs: Tensor, held: Any = program) -> list[Tensor]:  # the method does not hold it
        return [one.clone() for one in method.execute(list(inputs))]

    return call


def iree(exported: ExportedProgram) -> Compiled:
    aot: Any = importlib.import_module("iree.turbine.aot")
    return compiled_by_iree(str(aot.export(exported).mlir_module), "torch")


def torch_mlir(exported: ExportedProgram) -> Compiled:
    fx: Any = importlib.import_module("torch_mlir.fx")
    return compiled_by_iree(str(fx.export_and_import(exported, output_type="linalg-on-tensors")), "auto")


def compiled_by_iree(text: str, dialect: str) -> Compiled:
    tools: Any = importlib.import_module("iree.compiler.tools")
    runtime: Any = importlib.import_module("iree.runtime")
    options = ["--iree-llvmcpu-target-cpu=host"]
    file = tools.compile_str(text, target_backends=["llvm-cpu"], input_type=dialect, extra_args=options)
    config = runtime.Config("local-sync")
    module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, file), config)

    def call(*inputs: Tensor) -> list[Tensor]:
        results = module.main(*[x.numpy() for x in inputs])
        return [torch.tensor(one.to_host()) for one in (results if isinstance(results, (list, tuple)) else [results])]

    return call


def litert(exported: ExportedProgram) -> Compiled:
    converter: Any = importlib.import_module("litert_torch")
    model = converter.convert(exported.module(check_guards=False), exported.example_inputs[0], enable_x64=True)

    def call(*inputs: Tensor) -> list[Tensor]:
        results = model(*inputs)
        return [torch.tensor(one) for one in (results if isinstance(results, (list, tuple)) else [results])]

    return call


def tvm(exported: ExportedProgram) -> Compiled:
    tvm: Any = importlib.import_module("tvm")
    frontend: Any = importlib.import_module("tvm.relax.frontend.torch")
    relax: Any = importlib.import_module("tvm.relax")
    compiled = tvm.compile(frontend.from_exported_program(exported), target="llvm")
    main = relax.VirtualMachine(compiled, tvm.cpu())["main"]
    return lambda *inputs: [torch.tensor(one.numpy()) for one in main(*[tvm.runtime.tensor(x.numpy()) for x in inputs])]


ENGINES: dict[str, tuple[Callable[[ExportedProgram], Compiled], dict[str, str]]] = {  # and packages by their modules
    "openvino": (openvino, {"openvino": "openvino"}),
    "executorch": (executorch, {"executorch.exir": "executorch"}),
    "iree": (iree, {"iree.turbine.aot": "iree-turbine", **IREE}),
    "torch_mlir": (torch_mlir, {"torch_mlir.fx": "torch-mlir", **IREE}),
    "litert": (litert, {"litert_torch": "litert-torch"}),
    "tvm": (tvm, {"tvm": "apache-tvm"}),
}
REFUSED = {  # by the engine, with its words
    ("openvino", "cache"): "Model wasn't fully converted",  # indices of some dimensions
    ("tvm", "cache"): "IndexPut requires the number of index tensors",
    ("tvm", "sgd"): "expect Tensor with dtype float32 but get float64",  # it promotes by scalars
    ("tvm", "adamw"): "expect Tensor with dtype float32 but get float64",  # likewise
    ("litert", "adamw"): "failed to legalize operation 'tfl.pow'",  # of float64
}


def installed(engine: str) -> Callable[[ExportedProgram], Compiled]:
    compiler, needs = ENGINES[engine]
    for module, package in needs.items():
        pytest.importorskip(module, reason=f"{engine} needs {package}")
    return compiler


def made(name: str) -> Program:
    torch.manual_seed(0)
    return PROGRAMS[name][0]()


def exported_program(name: str, **options: Any) -> ExportedProgram:
    program = capture(made(name), (torch.randn(PROGRAMS[name][1]),))
    return for_engines(program.to_core_aten(**options))


def explicit(name: str) -> tuple[ExportedProgram, list[Tensor]]:
    """A program with explicit state, and that which it begins with."""
    exported = exported_program(name, explicit_state=True)
    assert exported.example_inputs is not None
    *state, _ = exported.example_inputs[0]
    return exported, state


def beside_eager(name: str, call: Program) -> list[bool]:
    """Which of three calls are right."""
    eager, found = made(name), []
    for _ in range(3):
        x = torch.randn(PROGRAMS[name][1])
        got, wanted = call(x.clone()), eager(x).detach()
        found.append(got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-3, atol=1e-4))
    return found


def threaded(compiled: Compiled, state: list[Tensor]) -> Program:
    def call(x: Tensor) -> Tensor:
        *new, result = compiled(*state, x)
        state[:] = new
        return result

    return call


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PROGRAMS)
def test_explicit_state_is_that_of_eager(name: str) -> None:
    """What the engines get, run by torch: it writes nothing."""
    exported, state = explicit(name)
    signature = exported.graph_signature
    assert not (signature.buffers_to_mutate or signature.parameters_to_mutate or signature.user_inputs_to_mutate)
    assert all(beside_eager(name, threaded(exported.module(), state)))


def test_arguments_that_are_written_have_no_explicit_state() -> None:
    with pytest.raises(UnsupportedExportError, match="writes to its argument `x`"):
        capture(lambda x: x.add_(1), (torch.ones(2),)).to_exported_program(explicit_state=True)


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_thread_explicit_state(engine: str, name: str) -> None:
    """Three calls are right, or the engine raises."""
    compiled = installed(engine)
    exported, state = explicit(name)
    if (engine, name) not in REFUSED:
        assert all(beside_eager(name, threaded(compiled(exported), state)))
        return
    with pytest.raises(Exception, match=REFUSED[engine, name]):
        beside_eager(name, threaded(compiled(exported), state))


@pytest.mark.full
@pytest.mark.parametrize("name", ["counter", "batch-norm", "cache"])
@pytest.mark.parametrize("engine", ["executorch", "iree"])
def test_buffers_stay_in_the_engine(engine: str, name: str) -> None:
    """The ExportedProgram as it is: the engine keeps its buffers."""
    call = installed(engine)(exported_program(name))
    assert all(beside_eager(name, lambda x: call(x)[-1]))


@pytest.mark.full
@pytest.mark.parametrize(
    "engine, name",
    [
        *((engine, "counter") for engine in ("openvino", "torch_mlir", "litert", "tvm")),
        *((engine, "weight") for engine in ("executorch", "iree")),
    ],
)
def test_what_engines_drop(engine: str, name: str) -> None:
    """docs/reference/export-details.md warns of it: the second call begins with the first state, without an error."""
    call = installed(engine)(exported_program(name))
    assert beside_eager(name, lambda x: call(x)[-1]) == [True, False, False]


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_openvino_takes_the_onnx_file(name: str, tmp_path: Path) -> None:
    """The file's metadata pair its inputs and outputs, and name the first values."""
    ov: Any = pytest.importorskip("openvino", reason="needs openvino")
    onnx: Any = pytest.importorskip("onnx")
    file = capture(made(name), (torch.randn(PROGRAMS[name][1]),)).to_onnx(tmp_path / "model.onnx")
    entries = {one.key: one.value for one in onnx.load(file).metadata_props}
    convention = json.loads(entries["functionalize"])
    state: dict[str, Tensor] = {}
    for one in convention["state"]:
        state[one["input"]] = torch.zeros(one["shape"], dtype=getattr(torch, one["dtype"]))
        if one["initial"] is not None:
            raw = bytearray(base64.b64decode(entries[one["initial"]]))
            state[one["input"]] = torch.frombuffer(raw, dtype=getattr(torch, one["dtype"])).reshape(one["shape"])
    compiled = ov.compile_model(file, "CPU", PRECISE)

    def call(x: Tensor) -> Tensor:
        results = compiled({key: value.numpy() for key, value in {**state, "x": x}.items()})
        for one in convention["state"]:
            state[one["input"]] = torch.tensor(results[one["output"]])
        return torch.tensor(results[convention["results"][0]["name"]])

    assert all(beside_eager(name, call))
