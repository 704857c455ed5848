"""Print, operator by operator, what jitted JAX makes of torch's operator database, and how the core set is covered.

``python -m tests.lowerings`` takes minutes; ``--ops PATTERN``, ``--shard 1/2``, ``--samples N``, ``--dtypes`` bound it.
``--to onnx`` prints the same of ONNX files and ONNX Runtime; ``--to module``, ``core_aten`` and ``run_decompositions``
of what torch runs. It exits with 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.lowerings import exported
from tests.lowerings.check import REFUSED, RIGHT, SKIPPED, WRONG, Outcome, cases_of, check
from tests.opinfo.cases import op_names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", help="a regular expression that names match")
    parser.add_argument("--shard", default="1/1", help="the N-th of M parts, as N/M")
    parser.add_argument("--samples", type=int, default=3, help="of each operator and dtype")
    parser.add_argument("--dtypes", help="default: float32,int64,bool,float16,complex64; with gradients float64")
    parser.add_argument("--to", choices=["jax", *exported.ROUTES], default="jax")
    parser.add_argument("--gradients", action="store_true", help="compare gradients, in float64 unless told otherwise")
    parser.add_argument("--backwards", action="store_true", help="run the gradients that torch takes")
    options = parser.parse_args(arguments)
    checked: Callable[[Any], Outcome] = check
    if options.backwards:
        from tests.lowerings.backwards import checker

        checked = checker(options.to)
    elif options.to != "jax":
        checked = exported.checker(options.to)
    elif options.gradients:
        from tests.lowerings import gradients

        checked = gradients.check
    differentiates = options.gradients or options.backwards
    dtypes = options.dtypes or ("float64" if differentiates else "float32,int64,bool,float16,complex64")
    part, parts = map(int, options.shard.split("/"))
    names = [name for name in op_names() if re.search(options.ops, name)][part - 1 :: parts]
    ops: Counter[str] = Counter()
    for name in names:
        outcomes = [safely(case, checked) for case in cases_of(name, dtypes.split(","), options.samples)]
        kinds = Counter(outcome.kind for outcome in outcomes)
        verdict = next((kind for kind in (WRONG, REFUSED, RIGHT) if kinds[kind]), SKIPPED)
        ops[verdict] += 1
        whys = {outcome.why for outcome in outcomes if outcome.kind in (WRONG, REFUSED)}
        print(f"{verdict:8} {name:45} {dict(kinds)} {'; '.join(sorted(whys))[:300]}", flush=True)
    print("operators:", dict(ops))
    if options.to != "jax":
        return int(bool(ops[WRONG]))
    from functionalize.backends.jax import lowering
    from tests.lowerings.core import coverage

    covered = coverage(lowering)
    print("core ATen:", dict(Counter(how.split(":")[0] for how in covered.values())))
    print(*(f"  {name}: {how}" for name, how in covered.items() if how not in ("row", "decomposed")), sep="\n")
    return int(bool(ops[WRONG]) or "missing" in covered.values())


def safely(case: Any, check: Callable[[Any], Outcome] = check) -> Outcome:
    """The outcome of a case; an error that is no refusal is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(case)
        except Exception as error:
            return Outcome(WRONG, f"{case}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")


if __name__ == "__main__":
    sys.exit(main())
