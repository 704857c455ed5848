"""Capture time beside the other ways to a functional graph, in one interleaved run; memory, calls and decoding.

Models: `capture` of a module, cold (nothing known of any op) and warm, beside `make_fx` over
`torch.func.functionalize` of the same module as a function of its state (over the module alone where that fails), and
`torch.export.export(...).run_decompositions({})`; and how far a capture is from the program on fake tensors alone.
Growth: time per op of programs of 1,000 to 100,000 ops. Memory: the peak of a process that captures a module with more
parameters than this machine has memory. Calls: overhead over the graph. Decode: bytes written a step.
"""

from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import environment, interleaved, table
from functionalize import capture
from functionalize.tracing import meta_cache
from functionalize.verify.observation import clone_inputs
from tests.support.models import kv_cache_decode, state_of
from tests.support.transformer_models import TRANSFORMERS

aten = torch.ops.aten
NAMES = ("bert", "vit", "swin", "resnet", "gpt2", "llama")


class Logits(torch.nn.Module):
    """A model of transformers whose output is a tensor."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(**batch).logits
        return logits


def systems(name: str) -> dict[str, Callable[[], object]]:
    """The ways to capture one model, by what the table calls them."""
    make, inputs = TRANSFORMERS[name]
    module, batch = Logits(make().eval()), inputs()
    batch.pop("labels", None)
    state = state_of(module)

    def pure(parameters: Any, buffers: Any, batch: Any) -> Any:
        return torch.func.functional_call(module, {**parameters, **buffers}, (), batch)

    def ours() -> None:
        assert capture(module, (), batch, remove="mutations").graph is not None

    def cold() -> None:
        meta_cache.clear()
        ours()

    def traced(func: Callable[..., Any]) -> None:
        make_fx(func, tracing_mode="fake")(*clone_inputs((*state, batch)))

    def exported() -> None:
        torch.export.export(module, (), batch, strict=False).run_decompositions({})

    def fake() -> None:
        with FakeTensorMode() as mode:
            pure(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (*state, batch)))

    theirs = partial(traced, torch.func.functionalize(pure))
    try:
        theirs()
    except Exception:
        theirs = partial(traced, pure)
    return {"warm": ours, "cold": cold, "make_fx": theirs, "export": exported, "fake": fake}


def models(rounds: int) -> None:
    rows, ratios = [], []
    for name in NAMES:
        timings = {key: timing.median for key, timing in interleaved(systems(name), rounds, in_a_row=4).items()}
        ratio = [timings["make_fx"] / timings["cold"], timings["make_fx"] / timings["warm"]]
        ratio += [timings["export"] / timings["cold"], timings["warm"] / timings["fake"]]
        ratios.append(ratio)
        milliseconds = [f"{timings[key] * 1e3:.1f}" for key in ("cold", "warm", "make_fx", "export", "fake")]
        rows.append([name, *milliseconds, *(f"{value:.1f}" for value in ratio)])
    lowest = [min(column) for column in zip(*ratios, strict=True)]
    header = ["ms", "cold", "warm", "make_fx", "export", "fake alone"]
    print(table([*header, "make_fx/cold", "make_fx/warm", "export/cold", "warm/fake"], rows))
    print(
        f"lowest: {lowest[0]:.1f} times as fast as make_fx cold, {lowest[1]:.1f} warm, "
        f"{lowest[2]:.1f} as torch.export; at most {max(r[3] for r in ratios):.2f} of fake tensors alone"
    )


def chain(x: torch.Tensor, ops: int) -> torch.Tensor:
    """A program of about so many ops: sums, views and writes."""
    for _ in range(ops // 4):
        y = x * 2
        y.view(-1)[0].add_(1)
        x = x + y
    return x


def growth() -> None:
    """Time per op of longer and longer programs."""
    x = torch.randn(4, 4)
    figures = []
    for ops in (1_000, 10_000, 100_000):
        calls = {"capture": partial(capture, partial(chain, ops=ops), (x,))}
        seconds = interleaved(calls, 1 if ops > 10_000 else 3)["capture"].median
        figures.append((ops, seconds / ops * 1e6))
    print("microseconds an op: " + ", ".join(f"{value:.1f} of {ops:,} ops" for ops, value in figures))


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
        "what", nargs="?", choices=("all", "models", "growth", "memory", "calls", "decode", "huge"), default="all"
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.what == "huge":
        huge()
        return
    print(f"{environment()}; remove='mutations'; medians of {options.rounds} rounds")
    if options.what in ("all", "models"):
        models(options.rounds)
    if options.what in ("all", "growth"):
        growth()
    if options.what in ("all", "calls"):
        calls(options.rounds)
    if options.what in ("all", "decode"):
        decode()
    if options.what in ("all", "memory"):
        subprocess.run([sys.executable, __file__, "huge"], check=True)


if __name__ == "__main__":
    main()
