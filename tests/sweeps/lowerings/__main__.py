"""Print, operator by operator, what a route makes of torch's operator database, and hold it against the route's ledger.

``python -m tests.sweeps.lowerings`` runs jitted JAX, and says how the core ATen set is covered; ``--to onnx`` ONNX
files and ONNX Runtime; ``--to module``, ``core_aten`` and ``run_decompositions`` what torch runs. It takes an hour;
``--ops PATTERN``, ``--shard 1/2``, ``--samples N``, ``--dtypes`` bound it. It exits with 1 where anything is wrong, and
where anything is refused or left out that the ledger (tests/support/ledgers) does not list; ``--write`` writes the
ledger.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from typing import Any

from tests.support.ledger import REFUSED, RIGHT, SKIPPED, WRONG, Row
from tests.sweeps.lowerings.rows import ROUTES, ledger_of, route, rows
from tests.sweeps.opinfo.cases import op_names

DTYPES = ["float32", "float16", "bfloat16", "int64", "bool", "complex64"]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    how: Any = {"to": options.to, "gradients": options.gradients, "backwards": options.backwards}
    ledger, checked = ledger_of(**how), route(**how)
    differentiates = options.gradients or options.backwards
    every = ["float64"] if differentiates else DTYPES
    dtypes = options.dtypes.split(",") if options.dtypes else every
    part, parts = map(int, options.shard.split("/"))
    names = [name for name in op_names() if re.search(options.ops, name)][part - 1 :: parts]
    everything: list[Row] = []
    for name in names:
        found = list(rows(name, dtypes, options.samples, checked, ledger, write=options.write and not differentiates))
        if options.write:
            ledger.take(found)
        _say(name, found)
        everything += found
    whole = (options.ops, options.shard, options.dtypes) == ("", "1/1", None)
    selection = f"first {options.samples}" if whole else ""
    if options.write:
        ledger.take(everything, selection)
    print("cases:", dict(Counter(row.status for row in everything)))
    objections = ledger.objections(everything, selection)
    print(*objections, sep="\n")
    uncovered = _say_coverage() if options.to == "jax" else False
    return int(bool(objections) or uncovered)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", help="a regular expression that names match")
    parser.add_argument("--shard", default="1/1", help="the N-th of M parts, as N/M")
    parser.add_argument("--samples", type=int, default=3, help="of each operator and dtype")
    parser.add_argument("--dtypes", help=f"default: {','.join(DTYPES)}; with gradients float64")
    parser.add_argument("--to", choices=ROUTES, default="jax")
    parser.add_argument("--gradients", action="store_true", help="compare gradients, in float64 by default")
    parser.add_argument("--backwards", action="store_true", help="run the gradients that torch takes")
    parser.add_argument("--write", action="store_true", help="write the ledger, for the cases that this runs")
    return parser.parse_args(arguments)


def _say(name: str, found: list[Row]) -> None:
    kinds = Counter(row.status for row in found)
    verdict = next((kind for kind in (WRONG, REFUSED, RIGHT) if kinds[kind]), SKIPPED)
    whys = {f"{row.case} {row.why}" for row in found if row.status in (WRONG, REFUSED)}
    print(f"{verdict:8} {name:45} {dict(kinds)} {'; '.join(sorted(whys))[:600]}", flush=True)


def _say_coverage() -> bool:
    """Print how the core set is covered by JAX; whether an operator is missing."""
    from functionalize.backends.jax import lowering
    from tests.sweeps.lowerings.core import coverage

    covered = coverage(lowering)
    print("core ATen:", dict(Counter(how.split(":")[0] for how in covered.values())))
    print(*(f"  {name}: {how}" for name, how in covered.items() if how not in ("row", "decomposed")), sep="\n")
    return "missing" in covered.values()


if __name__ == "__main__":
    sys.exit(main())
