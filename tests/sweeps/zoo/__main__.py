"""`python -m tests.sweeps.zoo`: capture models of other libraries; a table of verdicts, and of failures by cause."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.support.ledger import RIGHT
from tests.sweeps.zoo.check import COUNTED, MODES, Verdict, ledger_of, rows_of
from tests.sweeps.zoo.ci import CI
from tests.sweeps.zoo.families import FAMILIES
from tests.sweeps.zoo.runner import Job, prepare, run, run_job


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0 if every model that counts was right, or is refused as the ledger says."""
    options = _parser().parse_args(arguments)
    jobs = _jobs(options)
    if not jobs:
        print("no model matches", file=sys.stderr)
        return 2
    verdicts: list[Verdict] = []
    begin = time.monotonic()

    def report(verdict: Verdict) -> None:
        verdicts.append(verdict)
        text = f"[{len(verdicts)}/{len(jobs)} {time.monotonic() - begin:.0f} s] {verdict.family} {verdict.name} "
        print(f"{text}{verdict.mode}: {verdict.status} {verdict.reason}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(one) for one in verdicts], indent=1))

    if options.processes:
        run(jobs, options.processes, report)
    else:
        prepare()
        for job in jobs:
            report(run_job(job))
    print(summary(verdicts))
    objections = _objections(verdicts, options)
    print(*objections, sep="\n")
    return int(bool(objections))


def _objections(verdicts: list[Verdict], options: argparse.Namespace) -> list[str]:
    """What the ledgers do not allow; with `--write` they allow what was refused."""
    partly = (options.family, options.mode, options.match, options.shard != "1/1")
    selection = "" if any(partly) else "ci" if options.ci else "whole"
    ledger, rows = ledger_of(options.to), [row for verdict in verdicts for row in rows_of(verdict)]
    if options.write:
        ledger.take(rows, selection)
    return ledger.objections(rows, selection)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sweeps.zoo", description=__doc__)
    parser.add_argument("--family", choices=list(FAMILIES), help="only this library")
    parser.add_argument("--mode", choices=MODES, help="only this mode")
    parser.add_argument("--match", default="", help="only models whose name matches this regular expression")
    parser.add_argument("--shard", default="1/1", help="I/N: only every N-th model, from the I-th on, counted from 1")
    parser.add_argument("--ci", action="store_true", help="a fixed small part")
    parser.add_argument("--compare", action="store_true", help="ask torch.export as well")
    routes = ["module", "onnx"]
    parser.add_argument("--to", choices=routes, action="append", default=[], help="export them, and run what came out")
    parser.add_argument("--write", action="store_true", help="write the ledger, for the models that this runs")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file, as they come")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for each model in each mode")
    parser.add_argument("--processes", type=int, default=1, help="worker processes; 0: this one")
    return parser


def _jobs(options: argparse.Namespace) -> list[Job]:
    match = re.fullmatch(r"(\d+)/(\d+)", options.shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise SystemExit(f"--shard wants I/N with 1 <= I <= N, got {options.shard!r}")
    found: list[tuple[str, str]] = []
    for family in [options.family] if options.family else FAMILIES:
        try:
            names = FAMILIES[family].names()
        except ImportError as error:
            print(f"{family} is left out, it does not import: {error}", file=sys.stderr)
            continue
        found += [(family, name) for name in names if re.search(options.match, name)]
    if options.ci:
        found = [one for one in found if one in CI]
    found = found[int(match[1]) - 1 :: int(match[2])]
    modes = [options.mode] if options.mode else MODES
    how = options.timeout, options.compare, tuple(options.to)
    return [Job(family, name, mode, *how) for mode in modes for family, name in found]


def cause(verdict: Verdict) -> str:
    """A reason without the names and numbers of one model."""
    text = re.sub(r"'[^']*'|`[^`]*`|\[[^\]]*\]|, at .*", "_", verdict.reason)
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", text)[:110]


def summary(verdicts: list[Verdict]) -> str:
    """The table of verdicts; then what was not right, or right but for rounding, grouped by cause."""
    statuses = list(dict.fromkeys((*COUNTED, *(one.status for one in verdicts))))
    lines = ["", "| | " + " | ".join(statuses) + " |", "|---" * (len(statuses) + 1) + "|"]
    for family, mode in dict.fromkeys((one.family, one.mode) for one in verdicts):
        counts = Counter(one.status for one in verdicts if (one.family, one.mode) == (family, mode))
        lines.append(f"| {family} {mode} | " + " | ".join(str(counts[status]) for status in statuses) + " |")
    for status in statuses:
        groups: dict[str, list[str]] = {}
        for one in verdicts:
            if one.status == status and (status != RIGHT or one.reason):
                groups.setdefault(cause(one), []).append(f"{one.name}/{one.mode}")
        if groups:
            lines.append(f"\n{status}")
        for text, names in sorted(groups.items(), key=lambda entry: -len(entry[1])):
            lines.append(f"{len(names):5} {text}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
    exported = [one for one in verdicts if one.export]
    if exported:
        right = sum(one.export == RIGHT for one in exported)
        ahead = [f"{one.name}/{one.mode}" for one in exported if one.export == RIGHT and one.status != RIGHT]
        lines.append(f"\ntorch.export is right for {right} of {len(exported)}; where capture is not: {ahead}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
