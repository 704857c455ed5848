"""Cost per operator in eager use on plain tensors, beside the incumbents; and what importing us costs.

One program of n small operators runs as it is, under an empty TorchDispatchMode, through
`torch.func.functionalize`, under torch's FunctionalTensorMode, and through ours. From each time that of plain
eager is taken away, and the rest divided by n.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import environment, interleaved, table
from functionalize import functionalize

OPS = 200


class EmptyMode(TorchDispatchMode):
    """Does nothing: what any mode in Python costs at least."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def functional(x: Tensor) -> Tensor:
    """Out-of-place operators only."""
    for _ in range(OPS):
        x = x + 1
    return x


def in_place(x: Tensor) -> Tensor:
    """Every operator writes into one intermediate."""
    x = x.clone()
    for _ in range(OPS - 1):
        x.add_(1)
    return x


def viewed(x: Tensor) -> Tensor:
    """Half of the operators are views, the other half writes through them."""
    x = x.clone()
    for _ in range(OPS // 2):
        x[0].add_(1)
    return x


def under_empty_mode(program: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with EmptyMode():
        return program(x)


def under_functional_tensor_mode(program: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FunctionalTensorMode():
        result: Any = program(FunctionalTensor.to_functional(x))
        synced: Tensor = result.from_functional()
        return synced


SYSTEMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "plain eager": lambda program, x: program(x),
    "empty dispatch mode": under_empty_mode,
    "ours": lambda program, x: functionalize(program)(x),
    "torch.func.functionalize": lambda program, x: torch.func.functionalize(program)(x),
    "FunctionalTensorMode": under_functional_tensor_mode,
}


def per_operator(rounds: int) -> str:
    x = torch.zeros(4, 4)
    names = {"out-of-place": functional, "in-place": in_place, "through views": viewed}
    columns = {}
    for label, program in names.items():
        expected = program(x)
        for name, system in SYSTEMS.items():
            if not torch.equal(system(program, x), expected):
                raise SystemExit(f"{name} gives a wrong result for the program {label!r}; no figure is of use")
        calls = {name: partial(system, program, x) for name, system in SYSTEMS.items()}
        columns[label] = interleaved(calls, rounds)
    rows = []
    for name in SYSTEMS:
        cells = [name]
        for timings in columns.values():
            eager, own = timings["plain eager"].median, timings[name].median
            taken = own if name == "plain eager" else own - eager
            cells.append(f"{taken / OPS * 1e6:.2f}")
        rows.append(cells)
    return table(["microseconds an operator (over plain eager)", *names], rows)


def import_time(processes: int) -> str:
    """Medians over processes that import torch, then the package, then the transform itself.

    The package imports its parts on first use, so `import functionalize` alone says little: what a user
    waits for is `from functionalize import functionalize`.
    """
    times: list[list[float]] = []
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); "
        "import functionalize; c = time.perf_counter(); from functionalize import functionalize; "
        "d = time.perf_counter(); print(b - a, c - b, d - b)"
    )
    root = Path(__file__).resolve().parent.parent
    for _ in range(processes + 1):
        start = time.perf_counter()
        run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
        times.append([float(figure) for figure in run.stdout.split()])
        print(f"  one process: {time.perf_counter() - start:.1f} s", end="\r", file=sys.stderr, flush=True)
    torch_median, package, transform = map(statistics.median, zip(*times[1:], strict=True))
    return (
        f"import torch {torch_median:.3f} s; import functionalize adds {package:.3f} s, "
        f"from functionalize import functionalize {transform:.3f} s (medians of {processes} processes)"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("all", "operators", "import"), default="all")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--processes", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{environment()}; medians of {options.rounds} interleaved rounds")
    if options.what in ("all", "operators"):
        print(per_operator(options.rounds))
    if options.what in ("all", "import"):
        print(import_time(options.processes))


if __name__ == "__main__":
    main()
