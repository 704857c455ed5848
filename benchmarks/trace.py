"""Trace time, node count and bytes written: ours beside `torch.func.functionalize`, in one interleaved run.

Nodes are `call_function` nodes after dead-code elimination. Bytes are what running the graph writes: the size
of every tensor that a node other than a view computes or overwrites. A graph that is not free of mutations (and
views, if asked) counts as a failure. Models are those of the tests.
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import Timing, environment, interleaved, table
from benchmarks.patterns import PATTERNS, Pattern
from functionalize import functionalize
from functionalize.verify import assert_functional
from functionalize.verify.observation import clone_inputs
from tests.support.models import MODELS

Program = tuple[Callable[..., Any], tuple[Any, ...]]
THEIRS = "torch.func.functionalize"


@dataclass(frozen=True)
class Graph:
    """What one system made of one program: its graph's size and the time to trace it, or why it failed."""

    nodes: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failure: str = ""


def trace(func: Callable[..., Any], inputs: tuple[Any, ...]) -> GraphModule:
    torch.manual_seed(0)
    return make_fx(func, tracing_mode="fake")(*inputs)


def size_of(gm: GraphModule) -> tuple[int, int]:
    """Nodes and bytes written of a graph, once its dead nodes are gone."""
    gm.graph.eliminate_dead_code()
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return len(nodes), sum(bytes_written(node) for node in nodes)


def bytes_written(node: Node) -> int:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or (op.is_view and not op._schema.is_mutable):
        return 0
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def compare(program: Program, remove: str, rounds: int) -> tuple[Graph, Graph]:
    """Ours and theirs on one program, timed in turn; a system that fails, or leaves mutations, is not timed."""
    func, inputs = program
    transforms: dict[str, Callable[..., Any]] = {"ours": functionalize, "theirs": torch.func.functionalize}
    calls: dict[str, Callable[[], GraphModule]] = {}
    graphs: dict[str, Graph] = {}
    for name, transform in transforms.items():
        call = partial(trace, transform(func, remove=remove), clone_inputs(inputs))
        try:
            gm = call()
            assert_functional(gm, remove)
            nodes, size = size_of(gm)
        except Exception as error:
            text = " ".join(str(error).split())
            graphs[name] = Graph(failure=f"{type(error).__name__}: {text[:90]}")
        else:
            calls[name], graphs[name] = call, Graph(nodes, size)
    for name, timing in (interleaved(calls, rounds) if calls else {}).items():
        graphs[name] = Graph(graphs[name].nodes, graphs[name].bytes, timing.median)
    return graphs["ours"], graphs["theirs"]


def row(name: str, ours: Graph, theirs: Graph) -> list[str]:
    cells = [name]
    for attribute, scale in (("seconds", 1e3), ("nodes", 1), ("bytes", 1 / 1024)):
        pair = [getattr(graph, attribute) * scale for graph in (ours, theirs)]
        failed = [bool(graph.failure) for graph in (ours, theirs)]
        cells += ["fails" if bad else f"{value:,.0f}" for value, bad in zip(pair, failed, strict=True)]
        cells.append("" if any(failed) or not pair[1] else f"{pair[0] / pair[1]:.2f}")
    return cells


HEADER = ["", "ms", "theirs", "ratio", "nodes", "theirs", "ratio", "KiB", "theirs", "ratio"]


def growth(family: Pattern, nodes: list[int], rounds: int) -> str:
    """By how much nodes and time of ours grow where n doubles, beside the time of torch's fake tensors untraced."""
    calls: dict[str, Callable[[], object]] = {}
    for size in family.sizes:
        func, tensor = family.build(size)
        calls[f"ours {size}"] = partial(trace, functionalize(func), (tensor,))
        calls[f"fake {size}"] = partial(run_fake, func, tensor)
    timings = interleaved(calls, rounds)
    steps = [
        f"{small} to {large}: x{after / before:.2f} nodes, {', '.join(_times(timings, small, large))}"
        for (small, large), (before, after) in zip(pairwise(family.sizes), pairwise(nodes), strict=True)
    ]
    return f"{family.name}, n " + "; ".join(steps)


def _times(timings: Mapping[str, Timing], small: int, large: int) -> Iterator[str]:
    for system, label in (("ours", "time"), ("fake", "fake tensors alone")):
        yield f"x{timings[f'{system} {large}'].median / timings[f'{system} {small}'].median:.2f} {label}"


def run_fake(func: Callable[..., Any], tensor: torch.Tensor) -> None:
    """The program on fake tensors as torch runs it: the growth that no tracer can be below."""
    with FakeTensorMode() as mode:
        func(mode.from_tensor(tensor))


def programs(what: str, pattern: str) -> Iterator[tuple[str, Callable[[], Program]]]:
    if what in ("all", "models"):
        for model in MODELS:
            if re.search(pattern, model.name):
                yield model.name, model.build
    if what in ("all", "patterns"):
        for family in PATTERNS:
            if re.search(pattern, family.name):
                for size in family.sizes:
                    yield f"{family.name}, n={size}", partial(_pattern, family.build, size)


def _pattern(build: Callable[[int], Any], size: int) -> Program:
    func, tensor = build(size)
    return func, (tensor,)


def summary(pairs: list[tuple[Graph, Graph]]) -> str:
    both = [(ours, theirs) for ours, theirs in pairs if not ours.failure and not theirs.failure]
    if not both:
        return "no program that both make functional"
    ratios = sorted(ours.seconds / theirs.seconds for ours, theirs in both)
    more_nodes = sum(ours.nodes > theirs.nodes for ours, theirs in both)
    more_bytes = sum(ours.bytes > theirs.bytes for ours, theirs in both)
    return (
        f"of {len(pairs)}, both make {len(both)} functional; trace time ratio median {statistics.median(ratios):.2f}, "
        f"worst {ratios[-1]:.2f}; more nodes than {THEIRS} in {more_nodes}, more bytes in {more_bytes}"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("all", "models", "patterns"), default="all")
    parser.add_argument("--only", default="", help="a regular expression on the names")
    parser.add_argument("--remove", default="mutations", choices=("mutations", "mutations_and_views"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--failures", action="store_true", help="say why a program could not be traced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{environment()}; remove={options.remove!r}; make_fx, fake; medians of {options.rounds} rounds")
    rows, failures = [], []
    pairs: dict[str, list[tuple[Graph, Graph]]] = {"models": [], "patterns": []}
    ours_by_name: list[tuple[str, Graph]] = []
    model_names = {model.name for model in MODELS}
    for name, build in programs(options.what, options.only):
        print(f"  {name} ...", end="\r", file=sys.stderr, flush=True)
        ours, theirs = compare(build(), options.remove, options.rounds)
        pairs["models" if name in model_names else "patterns"].append((ours, theirs))
        ours_by_name.append((name, ours))
        rows.append(row(name, ours, theirs))
        failures += [
            f"{name}, {who}: {graph.failure}" for who, graph in (("ours", ours), (THEIRS, theirs)) if graph.failure
        ]
    print(table(HEADER, rows))
    print()
    for kind, measured in pairs.items():
        if measured:
            print(f"{kind}: {summary(measured)}")
    for family in PATTERNS:
        nodes = [graph.nodes for name, graph in ours_by_name if name.startswith(f"{family.name}, ")]
        if nodes:
            print(growth(family, nodes, options.rounds))
    if options.failures:
        print("\n".join(failures))


if __name__ == "__main__":
    main()
