"""`python -m tests.sweeps zoo`: capture models of other libraries; a table of verdicts, and of failures by cause."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.ledger import RIGHT
from tests.sweeps.options import add_shard, parser, shard_of
from tests.sweeps.pool import HANGS, Loss, OutOfTime, Work, run_all, time_limit, whole
from tests.sweeps.zoo.check import COUNTED, CRASH, MODES, TIME, Verdict, check, ledger_of, rows_of
from tests.sweeps.zoo.ci import CI
from tests.sweeps.zoo.families import FAMILIES

SECONDS, GRACE = 60, 240  # for a model in a mode; until a worker that hangs is killed


@dataclass(frozen=True)
class Model:
    """One model in one mode."""

    family: str
    name: str
    mode: str
    seconds: int = SECONDS
    compare: bool = False
    to: tuple[str, ...] = ()


def _check(model: Model) -> Verdict:
    try:
        with time_limit(model.seconds):
            return check(FAMILIES[model.family], model.name, model.mode, compare=model.compare, to=model.to)
    except OutOfTime:  # between the check's own handlers
        return _lost(model, Loss(HANGS, f"after {model.seconds} s"))


def _lost(model: Model, loss: Loss) -> Verdict:
    return Verdict(model.family, model.name, model.mode, TIME if loss.kind == HANGS else CRASH, loss.reason)


def work(seconds: int = SECONDS) -> Work[Model, Model, Verdict]:
    """What a worker does with a model."""
    return Work(whole, _check, _lost, seconds + GRACE)


def main(arguments: list[str]) -> int:
    """Run the command line; 0 if every model that counts was right, or is refused as the ledger says."""
    options = options_of(arguments)
    models = models_of(options)
    if not models:
        print("no model matches", file=sys.stderr)
        return 2
    verdicts: list[Verdict] = []
    begin = time.monotonic()
    for verdict in run_all(work(options.timeout), models, options.jobs):
        verdicts.append(verdict)
        text = f"[{len(verdicts)}/{len(models)} {time.monotonic() - begin:.0f} s] {verdict.family} {verdict.name} "
        print(f"{text}{verdict.mode}: {verdict.status} {verdict.reason}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(one) for one in verdicts], indent=1))
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


def options_of(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    made = parser("zoo", __doc__)
    made.add_argument("--family", choices=list(FAMILIES), help="only this library")
    made.add_argument("--mode", choices=MODES, help="only this mode")
    made.add_argument("--match", default="", help="only models whose name matches this regular expression")
    add_shard(made)
    made.add_argument("--ci", action="store_true", help="a fixed small part")
    made.add_argument("--compare", action="store_true", help="ask torch.export as well")
    routes = ["module", "onnx"]
    made.add_argument("--to", choices=routes, action="append", default=[], help="export them, and run what came out")
    made.add_argument("--write", action="store_true", help="write the ledger, for the models that this runs")
    made.add_argument("--json", type=Path, help="write the verdicts to this file, as they come")
    made.add_argument("--timeout", type=int, default=SECONDS, help="seconds for each model in each mode")
    return made.parse_args(arguments)


def models_of(options: argparse.Namespace) -> list[Model]:
    """The models that a command line chooses, in each mode."""
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
    modes = [options.mode] if options.mode else MODES
    return [
        Model(family, name, mode, options.timeout, options.compare, tuple(options.to))
        for mode in modes
        for family, name in shard_of(found, options.shard)
    ]


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
