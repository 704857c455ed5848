"""Run a sweep: ``python -m tests.sweeps NAME [options]``; ``--help`` after the name prints its options."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Sweep:
    """A module with a function ``main``, and what the sweep runs."""

    module: str
    subject: str


SWEEPS = {
    "opinfo": Sweep("tests.sweeps.opinfo.sweep", "operators of torch's database, transformed, captured and compiled"),
    "ranges": Sweep("tests.sweeps.opinfo.ranges", "batch sizes of captures, beside those of torch.export"),
    "lowerings": Sweep("tests.sweeps.lowerings.sweep", "operators of torch's database, by each exporter"),
    "lowered-programs": Sweep("tests.sweeps.lowerings.fuzz", "random programs, by each exporter"),
    "zoo": Sweep("tests.sweeps.zoo.sweep", "models of other libraries, captured and exported"),
    "deferred": Sweep("tests.sweeps.zoo.deferred", "models of transformers, deferred and materialized"),
    "fuzz": Sweep("tests.sweeps.fuzz.sweep", "random programs, random calls and random Python worlds"),
    "net": Sweep("tests.sweeps.net", "fixed programs of every kind, to compare two commits"),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in SWEEPS:
        print(__doc__, file=sys.stderr)
        print(*(f"  {name:18}{sweep.subject}" for name, sweep in SWEEPS.items()), sep="\n", file=sys.stderr)
        return 2
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns from C++ of each `out=` that it resizes
    code: int = importlib.import_module(SWEEPS[arguments[0]].module).main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
