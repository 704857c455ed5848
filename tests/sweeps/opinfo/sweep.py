"""`python -m tests.sweeps opinfo`: print a tally, and each failure with the command to repeat it.

It fails where a case is refused that tests/support/ledgers/opinfo.txt does not list, and where fewer cases pass than it
says.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tests.support.ledger import Ledger, Row
from tests.sweeps.opinfo.cases import CI, DTYPES, FIRST, FULL, MODES, REMOVES, Case, Selection, cases_of, op_names
from tests.sweeps.opinfo.check import FAILED, NOT_COUNTED, PASSED, Verdict, check, print_graphs, rows_of
from tests.sweeps.options import add_shard, parser, shard_of
from tests.sweeps.pool import RAISES, Loss, Pool, Work

CASE_LIMIT = 120.0  # seconds

_KINDS = {
    "trace": "could not be traced",
    "purity": "traced, but the graph mutates or views",
    "run": "traced, but the graph does not run",
    "values": "traced, but differ from eager",
    "crash": "killed or hung the process",
    "harness": "broke the sweep itself",
}


@dataclass(frozen=True)
class Operator:
    """The cases of one operator."""

    name: str
    selection: Selection


def work(impl: str = "ours") -> Work[Operator, Case, Verdict]:
    """What a worker does with an operator."""
    return Work(_cases, partial(check, impl=impl), _lost, CASE_LIMIT)


def _cases(operator: Operator) -> list[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(cases_of(operator.name, operator.selection))


def _lost(case: Case, loss: Loss) -> Verdict:
    return Verdict(str(case), FAILED, "harness" if loss.kind == RAISES else "crash", loss.reason)


def main(arguments: list[str]) -> int:
    """Run the command line; 0 if every case that counts passed, and all that are refused are listed."""
    options = _parser().parse_args(arguments)
    if options.case:
        return _single(Case.parse(options.case), options.impl)
    ops = _chosen_ops(options.op, options.shard)
    if not ops:
        print(f"no op matches --op {options.op!r} in shard {options.shard}", file=sys.stderr)
        return 2
    selection = _selection(options)
    progress = _Progress(len(ops))
    with Pool(work(options.impl), options.jobs) as pool:
        try:
            for verdict in pool.run([Operator(op, selection) for op in ops]):
                progress.verdict(verdict, pool.unfinished)
        except KeyboardInterrupt:
            print(f"interrupted, {pool.unfinished} of {len(ops)} ops are left")
    _summary(progress, options.impl, options.show)
    if pool.unfinished:
        return 1
    objections = _objections(progress, options) if options.impl == "ours" else []
    print(*objections, sep="\n")
    return 0 if progress.counts[PASSED] and not progress.failures and not objections else 1


def _objections(progress: _Progress, options: argparse.Namespace) -> list[str]:
    """What the ledger does not allow; with `--write` it allows what came out, but for failures."""
    partly = (options.op, options.template, options.dtype, options.mode, options.remove, options.shard != "1/1")
    size = "full" if options.full else "first" if options.first else "ci"
    ledger, selection = Ledger("opinfo"), "" if any(partly) else size
    if options.write:
        ledger.take(progress.rows, selection)
    return ledger.objections(progress.rows, selection)


def _parser() -> argparse.ArgumentParser:
    made = parser("opinfo", __doc__)
    size = made.add_mutually_exclusive_group()
    size.add_argument("--first", action="store_true", help="the first sample of each op, fake, views removed")
    size.add_argument("--ci", action="store_true", help="a fixed part, a few minutes on two cores (default)")
    size.add_argument("--full", action="store_true", help="every sample, every dtype, every mode")
    made.add_argument("--op", default="", help="only ops whose full name matches this regular expression")
    made.add_argument("--template", help="only this template")
    made.add_argument("--dtype", choices=list(DTYPES), help="only this dtype")
    made.add_argument("--mode", choices=MODES, help="only this tracing mode")
    made.add_argument("--remove", choices=list(REMOVES), help="only this `remove`")
    add_shard(made)
    made.add_argument("--impl", choices=("ours", "incumbent"), default="ours")
    made.add_argument("--show", type=int, default=200, help="how many failures to print")
    made.add_argument("--write", action="store_true", help="write the ledger, for the cases that this runs")
    made.add_argument("--case", help="one case, by the name that a failure prints; shows its graphs")
    return made


def _selection(options: argparse.Namespace) -> Selection:
    base = FULL if options.full else FIRST if options.first else CI
    return replace(base, dtype=options.dtype, mode=options.mode, template=options.template, remove=options.remove)


def _chosen_ops(pattern: str, shard: str) -> Sequence[str]:
    return shard_of([name for name in op_names() if re.search(pattern, name)], shard)


class _Progress:
    """Counts verdicts, names each failure at once, and tells how far the sweep is, in place on a terminal."""

    def __init__(self, ops: int) -> None:
        self.ops = ops
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.rows: list[Row] = []
        self.failures: list[Verdict] = []
        self.weaker: dict[str, Counter[str]] = {}
        self.started = self._printed = time.monotonic()

    def verdict(self, verdict: Verdict, unfinished: int) -> None:
        self.counts[verdict.status] += 1
        self.rows += rows_of(verdict)
        if verdict.status == FAILED:
            self.failures.append(verdict)
            print(f"failed: {verdict.kind} {verdict.case}", file=sys.stderr, flush=True)
        if verdict.status == NOT_COUNTED:
            self.reasons[verdict.kind] += 1
        if verdict.status == PASSED and verdict.kind:
            self.weaker.setdefault(verdict.kind, Counter())[Case.parse(verdict.case).op] += 1
        self._print(unfinished)

    def _print(self, unfinished: int) -> None:
        now = time.monotonic()
        if now - self._printed < (0.2 if sys.stderr.isatty() else 10):
            return
        self._printed = now
        text = (
            f"{self.ops - unfinished}/{self.ops} ops, {self.counts[PASSED]} passed, {self.counts[FAILED]} failed, "
            f"{self.counts[NOT_COUNTED]} not counted, {now - self.started:.0f} s"
        )
        print(text, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def _summary(progress: _Progress, impl: str, show: int) -> None:
    failures = sorted(progress.failures, key=lambda verdict: (list(_KINDS).index(verdict.kind), verdict.case))
    for verdict in failures[:show]:
        print(f"\n{verdict.kind}: {_KINDS[verdict.kind]}\n  {verdict.reason[:600]}")
        print(f"  python -m tests.sweeps opinfo --impl {impl} --case '{verdict.case}'")
    if len(failures) > show:
        print(f"\n... and {len(failures) - show} more (--show)")
    passed, failed = progress.counts[PASSED], progress.counts[FAILED]
    kinds = Counter(verdict.kind for verdict in failures)
    skipped = ", ".join(f"{kind} {count}" for kind, count in sorted(progress.reasons.items()))
    print(f"\n{impl}: {passed} of {passed + failed} cases pass, {time.monotonic() - progress.started:.0f} s")
    if kinds:
        print("failures: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    print(f"not counted: {progress.counts[NOT_COUNTED]} (by what cannot do it: {skipped or 'none'})")
    for kind, ops in sorted(progress.weaker.items()):
        named = ", ".join(f"{op} {count}" for op, count in ops.most_common())
        print(f"passed by {kind} alone: {ops.total()} ({named})")


def _single(case: Case, impl: str) -> int:
    verdict = check(case, impl)
    print_graphs(case, impl)
    print(f"{verdict.case}: {verdict.status} {verdict.kind}\n{verdict.reason}")
    return 1 if verdict.status == FAILED else 0
