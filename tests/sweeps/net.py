"""The net: what every kind of program gives on one commit, to be compared with what it gives on another.

``scripts/net write FILE`` runs fixed programs of each part below and writes a line for each, ``scripts/net compare
BEFORE AFTER`` prints what differs and exits with 1 where tests/sweeps/net-differences.txt does not list it with a
reason. The programs depend on nothing but this file. Limits: the text of a refusal may change, its existence may not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.sweeps.options import add_jobs
from tests.sweeps.pool import Loss, Work, run_all, whole

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "tests" / "sweeps" / "net-differences.txt"
WORLDS, CALLS = 5_000, 3_000  # programs; a program of the second kind is called about four times in each of two modes
SECONDS = 600  # for all samples of an operator or a module
SUBJECTS = ("optimizers", "hooks", "decisions", "guards")  # whose test files are a part of the net
OUTCOMES = {"passed": "right", "failed": "wrong"}  # what the sweeps call it: what the net calls it


class Entry(NamedTuple):
    """What became of one program: ``outcome`` is compared, ``why`` is for the reader."""

    part: str
    program: str
    outcome: str
    why: str = ""


def _fuzzed(name: str, modes: tuple[str, ...], programs: int, jobs: int) -> Iterator[Entry]:
    from tests.sweeps.fuzz.sweep import WORK, Run

    for result in run_all(WORK, [Run(seed, mode) for mode in modes for seed in range(programs)], jobs):
        run, verdict = result.run, result.verdict
        calls = f", {verdict.equal} equal, {verdict.refused} refused" if run.mode.startswith("calls") else ""
        outcome = OUTCOMES.get(verdict.status, verdict.status) + calls
        yield Entry(name, f"{run.mode} {run.seed}", outcome, f"{verdict.kind}: {verdict.reason}")


def worlds(jobs: int) -> Iterator[Entry]:
    """Random Python objects, and programs that change them."""
    yield from _fuzzed("worlds", ("worlds",), WORLDS, jobs)


def calls(jobs: int) -> Iterator[Entry]:
    """Random tensor programs, captured once and called with other inputs."""
    yield from _fuzzed("calls", ("calls/views", "calls/mutations"), CALLS, jobs)


def operators(jobs: int) -> Iterator[Entry]:
    """The fixed part of the sweep over torch's operator database."""
    from tests.sweeps.opinfo.cases import CI, op_names
    from tests.sweeps.opinfo.sweep import Operator, work

    for verdict in run_all(work(), [Operator(name, CI) for name in op_names()], jobs):
        outcome = OUTCOMES.get(verdict.status, verdict.status)
        yield Entry("operators", verdict.case, outcome, f"{verdict.kind}: {verdict.reason}")


def captures(jobs: int) -> Iterator[Entry]:
    """The first sample of each operator, captured, exported as an ExportedProgram, and run."""
    from tests.sweeps.opinfo.cases import op_names

    yield from _by_name("captures", _captured, op_names(), jobs)


def _captured(name: str) -> list[Entry]:
    from tests.support.routes import MODULE
    from tests.sweeps.lowerings.rows import Table, rows

    table = Table(MODULE)
    found = rows(name, ["float32", "int64"], 1, table.check(), table.ledger())
    return [Entry("captures", f"{row.name} {row.case}", row.status, row.why) for row in found]


def modules(jobs: int) -> Iterator[Entry]:
    """Training each module of torch's database by captured calls."""
    from tests.sweeps.opinfo.modules import module_names

    yield from _by_name("modules", _trained, module_names(), jobs)


def _trained(name: str) -> list[Entry]:
    from tests.sweeps.opinfo import modules as database

    verdicts = [database.check(sample, database.captured) for sample in database.samples(name, 3)]
    return [Entry("modules", v.case, OUTCOMES.get(v.status, v.status), f"{v.kind}: {v.reason}") for v in verdicts]


def zoo(jobs: int) -> Iterator[Entry]:
    """Every fourth model of transformers, timm and diffusers that is installed."""
    from tests.sweeps.zoo.sweep import models_of, options_of, work

    for verdict in run_all(work(), models_of(options_of(["--shard", "1/4"])), jobs):
        yield Entry("zoo", f"{verdict.family} {verdict.name} {verdict.mode}", verdict.status, verdict.reason)


def tests(jobs: int) -> Iterator[Entry]:
    """The tests of optimizers, hooks, decisions and guards, wherever their files stand."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if any(name in path.stem for name in SUBJECTS)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", "-q", "-n", str(jobs), "-m", "", f"--junitxml={report}", *map(str, files)]
        subprocess.run([sys.executable, *command], cwd=ROOT, stdout=sys.stderr)
        cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "right")
        program = f"{case.attrib['classname'].rpartition('.')[2]} {case.attrib['name']}"
        yield Entry("tests", program, outcome)


def _by_name(part: str, run: Callable[[str], list[Entry]], names: list[str], jobs: int) -> Iterator[Entry]:
    work: Work[str, str, list[Entry]] = Work(whole, run, partial(_lost, part), SECONDS)
    for entries in run_all(work, names, jobs):
        yield from entries


def _lost(part: str, name: str, loss: Loss) -> list[Entry]:
    return [Entry(part, name, loss.kind, loss.reason)]


PARTS = {part.__name__: part for part in (worlds, calls, operators, captures, modules, zoo, tests)}


def write(path: Path, parts: list[str], jobs: int) -> None:
    """Run parts of the net, and write an entry for each program, sorted."""
    entries: list[Entry] = []
    for name in parts:
        begin = time.monotonic()
        results = sorted(PARTS[name](jobs))
        entries += results
        counts = ", ".join(f"{count} {outcome}" for outcome, count in _tally(results).most_common())
        print(f"{name}: {len(results)} programs: {counts}; {time.monotonic() - begin:.0f} s", flush=True)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def _tally(entries: list[Entry]) -> Counter[str]:
    tally: Counter[str] = Counter()
    for entry in entries:
        outcome, *calls = entry.outcome.split(", ")
        tally[outcome] += 1
        for text in calls:
            number, kind = text.split()
            tally[f"calls {kind}"] += int(number)
    return tally


def compare(before: Path, after: Path) -> int:
    """Print the programs that give something else now; 1 where one of them is not listed as meant."""
    old, new = _read(before), _read(after)
    parts = {part for part, _ in old} & {part for part, _ in new}
    meant = [line.split(" | ") for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    unlisted = 0
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if key[0] not in parts or (was and now and was.outcome == now.outcome):
            continue
        text = " ".join(key)
        reason = next((why for part, pattern, why in meant if part == key[0] and re.search(pattern, text)), None)
        unlisted += reason is None
        print(f"{'listed: ' + reason if reason else 'DIFFERS'}: {text}")
        for label, entry in (("before", was), ("after", now)):
            print(f"    {label}: {f'{entry.outcome}: {entry.why[:300]}' if entry else 'there is no such program'}")
    compared = sum(key[0] in parts for key in old)
    print(f"{compared} programs of {', '.join(sorted(parts))} compared, {unlisted} differ without a listed reason")
    return int(bool(unlisted))


def _read(path: Path) -> dict[tuple[str, str], Entry]:
    entries = (Entry(*json.loads(line)) for line in path.read_text().splitlines())
    return {(entry.part, entry.program): entry for entry in entries}


def main(arguments: list[str]) -> int:
    """Run the command line."""
    made = argparse.ArgumentParser(prog="scripts/net", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="run the programs, and write what they give")
    writing.add_argument("file", type=Path)
    writing.add_argument("--parts", default=",".join(PARTS), help=f"default: all, {','.join(PARTS)}")
    add_jobs(writing)
    comparing = commands.add_parser("compare", help="print what differs between two files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = made.parse_args(arguments)
    if options.command == "compare":
        return compare(options.before, options.after)
    write(options.file, options.parts.split(","), options.jobs)
    return 0
