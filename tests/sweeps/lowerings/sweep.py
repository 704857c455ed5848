"""Print, operator by operator, what a route makes of torch's operator database, and hold it against the route's ledger.

``python -m tests.sweeps lowerings`` runs jitted JAX, and says how the core ATen set is covered; ``--to onnx`` ONNX
files and ONNX Runtime; ``--to module``, ``core_aten`` and ``run_decompositions`` what torch runs. It takes an hour;
``--ops PATTERN``, ``--shard 1/2``, ``--samples N``, ``--dtypes`` bound it. It exits with 1 where anything is wrong, and
where anything is refused or left out that the ledger (tests/support/ledgers) does not list; ``--write`` writes the
ledger.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.support.ledger import REFUSED, RIGHT, SKIPPED, WRONG, Bound, Row
from tests.support.routes import BACKWARDS, GRADIENTS, JAX, RESULTS, ROUTES, SWEPT
from tests.sweeps.lowerings.rows import Table, rows
from tests.sweeps.opinfo.cases import op_names
from tests.sweeps.options import add_shard, parser, shard_of
from tests.sweeps.pool import Loss, Work, run_all, whole

SECONDS = 1800  # for all cases of an operator
DTYPES = ["float32", "float16", "bfloat16", "int64", "bool", "complex64"]


@dataclass(frozen=True)
class Operator:
    """The cases of one operator in a table."""

    name: str
    table: Table
    dtypes: tuple[str, ...]
    samples: int
    adds_bounds: bool


@dataclass(frozen=True)
class Swept:
    """What became of the cases of an operator, and the bounds that the ledger has afterwards."""

    name: str
    rows: list[Row]
    bounds: dict[tuple[str, str], Bound]


def _sweep(operator: Operator) -> Swept:
    ledger = operator.table.ledger()
    found = rows(
        operator.name, operator.dtypes, operator.samples, operator.table.check(), ledger, write=operator.adds_bounds
    )
    return Swept(operator.name, list(found), ledger.bounds)


def _lost(operator: Operator, loss: Loss) -> Swept:
    return Swept(operator.name, [Row(operator.name, "all", WRONG, loss.reason)], {})


WORK: Work[Operator, Operator, Swept] = Work(whole, _sweep, _lost, SECONDS)


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    route = ROUTES[options.to]
    if options.compares not in route.ledgers:
        raise SystemExit(f"by {route.name} the sweep does not compare {options.compares.lstrip('-')}")
    table, differentiates = Table(route, options.compares), options.compares != RESULTS
    dtypes = tuple(options.dtypes.split(",") if options.dtypes else ["float64"] if differentiates else DTYPES)
    names = shard_of([name for name in op_names() if re.search(options.ops, name)], options.shard)
    ledger, everything = table.ledger(), list[Row]()
    adds_bounds = options.write and not differentiates
    tasks = [Operator(name, table, dtypes, options.samples, adds_bounds) for name in names]
    for swept in run_all(WORK, tasks, options.jobs):
        if options.write:
            ledger.bounds.update(swept.bounds)
            ledger.take(swept.rows)
        _print(swept)
        everything += swept.rows
    whole_table = (options.ops, options.shard, options.dtypes) == ("", "1/1", None)
    selection = f"first {options.samples}" if whole_table else ""
    if options.write:
        ledger.take(everything, selection)
    print("cases:", dict(Counter(row.status for row in everything)))
    objections = ledger.objections(everything, selection)
    print(*objections, sep="\n")
    uncovered = _print_coverage() if route == JAX else False
    return int(bool(objections) or uncovered)


def _options(arguments: list[str]) -> argparse.Namespace:
    made = parser("lowerings", __doc__)
    made.add_argument("--ops", default="", help="a regular expression that names match")
    add_shard(made)
    made.add_argument("--samples", type=int, default=3, help="of each operator and dtype")
    made.add_argument("--dtypes", help=f"default: {','.join(DTYPES)}; with gradients float64")
    made.add_argument("--to", choices=SWEPT, default=JAX.name)
    kinds = made.add_mutually_exclusive_group()
    differentiated: Any = {"dest": "compares", "action": "store_const", "default": RESULTS}
    kinds.add_argument("--gradients", const=GRADIENTS, help="compare gradients, in float64", **differentiated)
    kinds.add_argument("--backwards", const=BACKWARDS, help="run the gradients that torch takes", **differentiated)
    made.add_argument("--write", action="store_true", help="write the ledger, for the cases that this runs")
    return made.parse_args(arguments)


def _print(swept: Swept) -> None:
    kinds = Counter(row.status for row in swept.rows)
    verdict = next((kind for kind in (WRONG, REFUSED, RIGHT) if kinds[kind]), SKIPPED)
    whys = {f"{row.case} {row.why}" for row in swept.rows if row.status in (WRONG, REFUSED)}
    print(f"{verdict:8} {swept.name:45} {dict(kinds)} {'; '.join(sorted(whys))[:600]}", flush=True)


def _print_coverage() -> bool:
    """Print how the core set is covered by JAX; whether an operator is missing."""
    from functionalize.backends.jax import lowering
    from tests.sweeps.lowerings.core import coverage

    covered = coverage(lowering)
    print("core ATen:", dict(Counter(how.split(":")[0] for how in covered.values())))
    print(*(f"  {name}: {how}" for name, how in covered.items() if how not in ("row", "decomposed")), sep="\n")
    return "missing" in covered.values()
