"""Capture time beside the other ways to a functional graph, in one interleaved run; memory, calls and decoding.

Models, as people call them (parameters require gradients, which are on) and under `no_grad`: `capture` of a module,
warm and cold (our caches are empty), beside eager, eager under a dispatch mode that does nothing, the program on fake
tensors alone, `make_fx` over `torch.func.functionalize` of the module as a function of its state (over the module alone
where that fails), and `torch.export.export(...).run_decompositions({})`; a capture with its first call with gradients
beside `aot_function`. Growth: time per op of programs of 1,000 to 100,000 ops, beside a dispatch mode that does
nothing. Steps: captures of whole training steps, with the optimizer's numbers as inputs. Memory: the peak of a process
that captures a module with more parameters than this machine has memory. Calls: overhead over the graph. Decode: bytes
written a step. Profile: where the time of a capture goes, by folder and by line.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import Timing, environment, interleaved, table
from benchmarks.models import MODELS, Batch, build
from benchmarks.sampling import sample, tables
from functionalize import CapturedProgram, capture
from functionalize.tracing import meta_cache
from functionalize.verify.observation import clone_inputs
from tests.support.models import kv_cache_decode

aten = torch.ops.aten


class Silent(TorchDispatchMode):
    """A dispatch mode that only counts: what Python needs to run a program op by op, whoever records it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Measured:
    """One model in one mode: its dispatched ops, and the timing of each way to run or trace it."""

    model: str
    mode: str
    ops: int
    timings: Mapping[str, Timing]

    def ratio(self, column: str, beside: str) -> float:
        return self.timings[column].median / self.timings[beside].median


@dataclass(frozen=True)
class Program:
    """A model, its batch, and the same model as a function of its state."""

    module: torch.nn.Module
    batch: Batch

    def pure(self, parameters: Any, buffers: Any, batch: Any) -> Tensor:
        output: Tensor = torch.func.functional_call(self.module, {**parameters, **buffers}, (), batch)
        return output

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Parameters that require gradients, buffers and the batch: the arguments of ``pure``."""
        parameters = {name: p.detach().requires_grad_() for name, p in self.module.named_parameters()}
        return parameters, dict(self.module.named_buffers()), self.batch

    def eager(self) -> None:
        self.module(**self.batch)

    def silent(self) -> int:
        """How many ops the model dispatches."""
        mode = Silent()
        with mode:
            self.eager()
        return mode.ops

    def fake(self) -> None:
        inputs = self.inputs
        with FakeTensorMode() as mode:
            self.pure(*torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, inputs))

    def capture(self) -> CapturedProgram:
        return capture(self.module, (), self.batch, remove="mutations")

    def cold(self) -> None:
        meta_cache.clear()
        self.capture()

    def make_fx(self, func: Callable[..., Any]) -> None:
        make_fx(func, tracing_mode="fake")(*self.inputs)

    def theirs(self) -> Callable[[], None]:
        """`make_fx` over `torch.func.functionalize` of the model; over the model alone where that fails."""

        def pure(parameters: Any, buffers: Any, batch: Any) -> Tensor:
            return self.pure(parameters, buffers, batch)

        functional = partial(self.make_fx, torch.func.functionalize(pure))
        try:
            functional()
        except Exception:
            return partial(self.make_fx, pure)
        return functional

    def export(self) -> None:
        torch.export.export(self.module, (), self.batch, strict=False).run_decompositions({})

    def capture_and_train(self) -> None:
        self.capture()(**self.batch).sum().backward()
        self.module.zero_grad(set_to_none=True)

    def aot_function(self) -> None:
        """The joint trace of AOTAutograd, its partition into forward and backward, and a call of both."""
        from torch._functorch.aot_autograd import aot_function

        aot_function(self.pure, fw_compiler=lambda graph, _: graph)(*self.inputs).sum().backward()


FORWARD = {"eager": "eager", "silent": "null mode", "fake": "fake alone", "make_fx": "make_fx"}
CAPTURE = {"warm": "capture", "cold": "cold"}


def measure(name: str, mode: str, rounds: int) -> Measured:
    """Time the ways to run and to trace one model: with gradients on, as people call it, or off."""
    program = Program(*build(name))
    with torch.set_grad_enabled(mode == "as called"):
        systems: dict[str, Callable[[], object]] = {
            "eager": program.eager,
            "silent": program.silent,
            "fake": program.fake,
            "make_fx": program.theirs(),
            "warm": program.capture,
            "cold": program.cold,
        }
        timings = interleaved(systems, rounds, in_a_row=3)
        if mode == "as called":  # these take up to seconds, so that a few rounds will do
            systems = {"train": program.capture_and_train, "aot": program.aot_function, "export": program.export}
            timings |= interleaved(systems, (rounds + 2) // 3)
        return Measured(name, mode, program.silent(), timings)


def models(rounds: int, names: Sequence[str]) -> None:
    """Each model in both modes: processor and wall time, and the ratios that matter."""
    measured = [measure(name, mode, rounds) for name in names for mode in ("as called", "no_grad")]
    columns = {**FORWARD, **CAPTURE}
    for clock, seconds in {"processor": attrgetter("median"), "wall": attrgetter("median_wall")}.items():
        rows = []
        for row in measured:
            milliseconds = [f"{seconds(row.timings[column]) * 1e3:.1f}" for column in columns]
            rows.append([f"{row.model}, {row.mode}", str(row.ops), *milliseconds])
        print(table([f"ms, {clock} time", "ops", *columns.values()], rows) + "\n")
    pairs = {
        "warm/make_fx": ("warm", "make_fx"),
        "cold/make_fx": ("cold", "make_fx"),
        "warm/fake": ("warm", "fake"),
    }
    ratios = {title: [row.ratio(*columns) for row in measured] for title, columns in pairs.items()}
    called = [row for row in measured if row.mode == "as called"]
    without = [row for row in measured if row.mode == "no_grad"]
    rows = []
    for row, quiet in zip(called, without, strict=True):
        first_call = row.timings["train"].median - row.timings["warm"].median
        figures = [row.timings[key].median * 1e3 for key in ("export", "train", "aot")]
        figures += [row.timings["export"].median / row.timings["warm"].median]
        figures += [row.timings["warm"].median / quiet.timings["warm"].median, first_call / row.timings["aot"].median]
        rows.append([row.model, *(f"{value:.1f}" for value in figures[:4]), *(f"{value:.2f}" for value in figures[4:])])
        for title, value in zip(("export/warm", "called/no_grad", "first call/aot"), figures[3:], strict=True):
            ratios.setdefault(title, []).append(value)
    header = ["ms, processor time", "export", "capture + first gradients", "aot_function"]
    print(table([*header, "export/warm", "called/no_grad", "first call/aot"], rows) + "\n")
    rows = [
        [title, f"{statistics.median(values):.2f}", f"{max(values):.2f}", f"{min(values):.2f}"]
        for title, values in ratios.items()
    ]
    print(table(["ratio of processor times", "median", "highest", "lowest"], rows))


def profile(times: int, names: Sequence[str]) -> None:
    """Where the time of warm captures goes, as people call them."""
    for name in names:
        program = Program(*build(name))
        for _ in range(3):
            program.capture()
        print(f"{name}, {times} captures\n{tables(sample(program.capture, times), lines=30)}\n")


def chain(x: torch.Tensor, ops: int) -> torch.Tensor:
    """A program of about so many ops: sums, views and writes."""
    for _ in range(ops // 4):
        y = x * 2
        y.view(-1)[0].add_(1)
        x = x + y
    return x


def growth() -> None:
    """Time per op of longer and longer programs, and what a dispatch mode that does nothing takes for it."""
    x = torch.randn(4, 4)

    def silent(ops: int) -> None:
        with Silent():
            chain(x, ops)

    captures, nothing = [], []
    for ops in (1_000, 10_000, 100_000):
        calls: dict[str, Callable[[], object]] = {
            "capture": partial(capture, partial(chain, ops=ops), (x,)),
            "silent": partial(silent, ops),
        }
        timings = interleaved(calls, 1 if ops > 10_000 else 3)
        captures.append((ops, timings["capture"].median / ops * 1e6))
        nothing.append(timings["silent"].median / ops * 1e6)
    print("microseconds an op: " + ", ".join(f"{value:.1f} of {ops:,} ops" for ops, value in captures))
    print(
        f"a dispatch mode that does nothing: {statistics.median(nothing):.1f}; "
        f"capture / nothing {captures[0][1] / nothing[0]:.1f}"
    )


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
}


def training_step(name: str, make: Callable[..., torch.optim.Optimizer]) -> Callable[[], Tensor]:
    """A training step of a model as a function of its state."""
    model, batch = build(name)
    optimizer = make(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def steps(rounds: int, names: Sequence[str]) -> None:
    """Captures of forward, backward and the optimizer's step, beside eager under a mode that does nothing."""
    rows = []
    for name in names:
        for label, make in _OPTIMIZERS.items():
            step = training_step(name, make)

            def silent(step: Callable[[], Tensor] = step) -> int:
                mode = Silent()
                with mode:
                    step()
                return mode.ops

            ops = silent()
            systems: dict[str, Callable[[], object]] = {"silent": silent, "capture": partial(capture, step, ())}
            timings = interleaved(systems, rounds, in_a_row=2)
            nothing, captured = (timings[column].median * 1e3 for column in systems)
            rows.append([f"{name}, {label}", str(ops), f"{nothing:.1f}", f"{captured:.1f}", f"{captured / ops:.3f}"])
    print(table(["training step, ms of processor time", "ops", "null mode", "capture", "an op"], rows))


def huge() -> None:
    """Capture a module whose parameters would take 100 GB, and print this process's peak memory."""
    width, layers = 32_768, 25
    with FakeTensorMode():
        module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.randn(1, width)
    size = sum(p.numel() * p.element_size() for p in module.parameters()) / 1e9
    program = capture(module, (x,))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{size:.0f} GB of parameters, {len(program.graph.nodes)} nodes: peak memory {peak:,.0f} MiB")


def calls(rounds: int) -> None:
    """What a call costs beside the graph that it runs: of a program, and of AOTAutograd's, which checks nothing."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True)).eval()
    module.requires_grad_(False)
    x = torch.randn(4, 8)
    from torch._functorch.aot_autograd import aot_module_simplified

    traced = make_fx(module)(x)
    traced.graph.output_node().args = (tuple(torch.utils._pytree.tree_leaves(traced.graph.output_node().args)),)
    traced.recompile()
    ran: list[Callable[[], object]] = []

    def keep(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            ran[:] = [partial(graph.forward, *values)]
            return graph.forward(*values)

        return run

    aot_module_simplified(traced, [x], keep)(x)  # type: ignore[arg-type]
    compiled = aot_module_simplified(traced, [x], lambda graph, _: graph.forward)
    named: dict[str, Callable[[], object]] = {
        "eager": partial(module, x),
        "program": partial(capture(module, (x,)), x),
        "AOTAutograd": partial(compiled, x),
        "graph": ran[0],
        "Dynamo": partial(torch.compile(module, backend="aot_eager"), x),
    }
    repeated = {name: partial(_repeat, call) for name, call in named.items()}
    us = {name: timing.median / _REPEATS * 1e6 for name, timing in interleaved(repeated, rounds).items()}
    print(
        f"microseconds a call, all guards checked: {us['program']:.1f}; AOTAutograd, which checks nothing, "
        f"{us['AOTAutograd']:.1f}, its graph alone {us['graph']:.1f}; eager {us['eager']:.1f}; "
        f"torch.compile(backend='aot_eager') {us['Dynamo']:.1f}"
    )


_REPEATS = 200


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_REPEATS):
        call()


class Written(TorchDispatchMode):
    """Counts the bytes that operators write: results that are no views, and what in-place operators write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _SOURCES:
            self.bytes += _bytes(args[_SOURCES[func]])
        elif not func.is_view:
            self.bytes += sum(map(_bytes, torch.utils._pytree.tree_leaves(out)))
        return out


# In-place operators that write a part of their first argument: which argument is as large as the part.
_SOURCES = {aten.index_copy_.default: 3, aten.index_put_.default: 2, aten.scatter_.src: 3}


def _bytes(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, torch.Tensor) else 0


def written_by(call: Callable[..., Any], inputs: Any) -> int:
    """Bytes that a call writes."""
    counter = Written()
    with torch.no_grad(), counter:
        call(*inputs)
    return counter.bytes


def decode() -> None:
    """Bytes written by a decoding step with a cache of 1,024 rows: in eager, in a captured program, in theirs."""
    func, inputs = kv_cache_decode(1024)
    with torch.no_grad():  # as a decoder runs, and as the calls below do
        program = capture(func, clone_inputs(inputs), remove="mutations")
        program(*clone_inputs(inputs))
    theirs = make_fx(torch.func.functionalize(func), tracing_mode="fake")(*clone_inputs(inputs))
    eager = written_by(func, clone_inputs(inputs))
    ours = written_by(program, clone_inputs(inputs))
    other = written_by(theirs, clone_inputs(inputs))
    print(
        f"bytes written a decoding step: eager {eager:,}, ours {ours:,} (x{ours / eager:.2f}), "
        f"torch.func.functionalize {other:,} (x{other / eager:.2f})"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        choices=("all", "models", "profile", "growth", "steps", "memory", "calls", "decode", "huge"),
        default="all",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.what == "huge":
        huge()
        return
    if options.what == "profile":
        profile(options.rounds * 10, options.models)
        return
    print(f"{environment()}; remove='mutations'; medians of {options.rounds} rounds")
    if options.what in ("all", "models"):
        models(options.rounds, options.models)
    if options.what in ("all", "growth"):
        growth()
    if options.what in ("all", "steps"):
        steps(options.rounds, options.models)
    if options.what in ("all", "calls"):
        calls(options.rounds)
    if options.what in ("all", "decode"):
        decode()
    if options.what in ("all", "memory"):
        subprocess.run([sys.executable, __file__, "huge"], check=True)


if __name__ == "__main__":
    main()
