"""What many traces leave behind in one process: memory, Python objects, tensors that were passed.

A program with views, writes and an input that changes is called directly and traced in each mode, `--traces` times
each, as it is and through `functionalize`. After a tenth as many calls to warm up, the growth of the process and of
the number of objects is printed; and whether an input lives on after a call, before garbage is collected.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from anywhere

from benchmarks.measure import environment, table
from functionalize import functionalize

Mode = Literal["real", "fake", "symbolic"]
MODES: tuple[Mode | None, ...] = (None, "real", "fake", "symbolic")
Program = Callable[[Tensor], Any]


def program(x: Tensor) -> Tensor:
    """Views, writes through them, and an input that changes."""
    y = x * 2
    y[0].mul_(2)
    y.view(-1)[1:3].zero_()
    x.add_(1)
    y.t().add_(1)
    return y.relu_()


SYSTEMS: dict[str, Callable[[Program], Program]] = {"plain": lambda func: func, "ours": functionalize}


def call(func: Program, mode: Mode | None) -> weakref.ref[Tensor]:
    """One call or trace; a reference to the input."""
    x = torch.ones(4, 8)
    if mode is None:
        func(x)
    else:
        make_fx(func, tracing_mode=mode)(x)
    return weakref.ref(x)


def resident() -> float:
    """Megabytes of memory that the process holds; where the system does not say, the most that it ever held."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * resource.getpagesize() / 2**20


def growth(func: Program, mode: Mode | None, traces: int) -> tuple[float, int, bool]:
    """Megabytes and objects more after so many traces, and whether the last input outlives its call."""
    for _ in range(max(traces // 10, 1)):
        call(func, mode)
    gc.collect()
    memory, objects = resident(), len(gc.get_objects())
    for _ in range(traces):
        call(func, mode)
    gc.collect()
    grown = resident() - memory, len(gc.get_objects()) - objects
    gc.disable()
    outlives = call(func, mode)() is not None
    gc.enable()
    return *grown, outlives


def measured(traces: int) -> str:
    """The table: one row for each way to run, and each system."""
    rows = []
    for mode in MODES:
        for name, transform in SYSTEMS.items():
            megabytes, objects, outlives = growth(transform(program), mode, traces)
            way = "direct" if mode is None else f"make_fx, {mode}"
            rows.append((f"{way}: {name}", f"{megabytes:+.1f}", f"{objects:+d}", "yes" if outlives else "no"))
    return table((f"{traces} calls", "MB", "objects", "input outlives the call"), rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=1000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(environment())
    print(measured(options.traces))


if __name__ == "__main__":
    main()
