"""`python -m tests.sweeps fuzz`, or `scripts/fuzz`: run random programs, tally, shrink and print what fails.

Invariant: the same seed gives the same programs. The exit status is 1 when a program failed.
"""

from __future__ import annotations

import collections
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tests.sweeps.fuzz.check import MODES, check, run_in_eager
from tests.sweeps.fuzz.generate import generate, well_defined
from tests.sweeps.fuzz.program import Program
from tests.sweeps.fuzz.shrink import shrink
from tests.sweeps.fuzz.verdict import FAILED, NOT_COUNTED, PASSED, REFUSED, Verdict
from tests.sweeps.fuzz.worlds import generate as worlds
from tests.sweeps.fuzz.worlds.check import check_world
from tests.sweeps.fuzz.worlds.program import World
from tests.sweeps.options import parser
from tests.sweeps.pool import DIED, HANGS, RAISES, Loss, OutOfTime, Work, run_all, time_limit, whole

SECONDS, SHRINKING, GRACE = 20, 60, 160  # for a program in a mode; to shrink one; until a worker that hangs is killed
LENGTH = 8  # steps of a program at most
WORLDS = "worlds"  # the mode of random Python worlds, which are generated otherwise
_CALL = re.compile(r"\.\w+\(|[-+*]=|\w\[")


@dataclass(frozen=True)
class Run:
    """The program of a seed in a mode, or in those that ``all`` and ``rotate`` stand for."""

    seed: int
    mode: str
    length: int = LENGTH


@dataclass(frozen=True)
class Result:
    """What became of the program of a seed in one mode."""

    run: Run
    verdict: Verdict


@dataclass(frozen=True)
class Shrunk:
    """A failure, its program made smaller, and the group of failures that it belongs to: what its steps do."""

    result: Result
    source: str
    group: str


def modes_of(seed: int, mode: str) -> tuple[str, ...]:
    """``all`` modes, one named mode, or (``rotate``) direct use and one traced mode that the seed chooses.

    Calls otherwise than captured, which take as long as all others together, are no part of a rotation.
    """
    if mode == "all":
        return MODES
    if mode != "rotate":
        return (mode,)
    traced = [name for name in MODES if not name.startswith(("direct/", "calls/"))]
    return (("direct/mutations", "direct/views")[seed % 2], traced[seed // 2 % len(traced)])


def runs_of(run: Run) -> list[Run]:
    """One run for each mode."""
    return [Run(run.seed, mode, run.length) for mode in modes_of(run.seed, run.mode)]


@lru_cache(maxsize=1)
def made(seed: int, length: int, *, world: bool) -> Program | World:
    """The program of a seed."""
    return worlds.generate(seed, length) if world else generate(seed, length)


def program_of(run: Run) -> Program | World:
    return made(run.seed, run.length, world=run.mode == WORLDS)


def _timed(program: Program | World, mode: str) -> Verdict:
    try:
        with time_limit(SECONDS):
            return check_world(program) if isinstance(program, World) else check(program, mode)
    except OutOfTime:
        return Verdict(FAILED, "hangs")
    except Exception as error:
        return Verdict(FAILED, "the fuzzer itself raises", f"{type(error).__name__}: {error}")


def _checked(run: Run) -> Result:
    return Result(run, _timed(program_of(run), run.mode))


def _lost(run: Run, loss: Loss) -> Result:
    """The result of what a process was lost with: of a program that kills eager, too, no failure."""
    if loss.kind == HANGS:
        return Result(run, Verdict(FAILED, "hangs"))
    if loss.kind == DIED:
        (lives,) = run_all(EAGER, [run], 1)
        if not lives:
            return Result(run, Verdict(NOT_COUNTED, "eager dies"))
    return Result(run, Verdict(FAILED, "the process died" if loss.kind == DIED else "raises", loss.reason))


def _lives_in_eager(run: Run) -> bool:
    program = program_of(run)
    if isinstance(program, Program):
        run_in_eager(program, run.mode)
    return True


def _lost_in_eager(run: Run, loss: Loss) -> bool:
    return loss.kind == RAISES


WORK: Work[Run, Run, Result] = Work(runs_of, _checked, _lost, SECONDS + GRACE)
EAGER: Work[Run, Run, bool] = Work(whole, _lives_in_eager, _lost_in_eager, SECONDS + GRACE)


def shrunk(result: Result) -> Shrunk:
    """A failing program made smaller."""
    end, run = time.monotonic() + SHRINKING, result.run

    def fails(program: Program | World) -> bool:
        return time.monotonic() < end and _fails_alike(program, result)

    program = program_of(run)
    small = worlds.shrink(program, fails) if isinstance(program, World) else shrink(program, fails)
    calls = sorted({call for step in small.steps for call in _CALL.findall(step.source)})
    return Shrunk(result, str(small), f"{result.verdict.kind}: {', '.join(calls)}")


def _fails_alike(program: Program | World, result: Result) -> bool:
    if isinstance(program, Program) and not well_defined(program):
        return False
    return _timed(program, result.run.mode).signature == result.verdict.signature


def _unshrunk(result: Result, loss: Loss) -> Shrunk:
    return Shrunk(result, str(program_of(result.run)), f"not shrunk: {loss.kind}")


SHRINK: Work[Result, Result, Shrunk] = Work(whole, shrunk, _unshrunk, SHRINKING + SECONDS + GRACE)


def main(arguments: list[str]) -> int:
    command = parser("fuzz", __doc__)
    command.add_argument("--programs", type=int, default=200)
    command.add_argument("--seed", type=int, default=0, help="of the first program; the others count up")
    command.add_argument("--mode", default="rotate", choices=("rotate", "all", WORLDS, *MODES))
    command.add_argument("--length", type=int, default=LENGTH, help="steps of a program at most")
    command.add_argument("--without", metavar="REGEX", help="leave out the programs with a line that matches")
    command.add_argument("--show", type=int, default=4, help="failures of one look to shrink and print")
    given = command.parse_args(arguments)
    runs = [Run(seed, given.mode, given.length) for seed in range(given.seed, given.seed + given.programs)]
    if given.without:
        runs = [run for run in runs if not re.search(given.without, program_of(run).body())]
    begin, results = time.monotonic(), list[Result]()
    for result in run_all(WORK, runs, given.jobs):
        results.append(result)
        run, verdict = result.run, result.verdict
        if verdict.status == FAILED:
            text = f"failed: {run.seed} {run.mode}: {verdict.kind}: {verdict.reason[:300]}"
            print(text, file=sys.stderr, flush=True)
    results.sort(key=lambda result: (result.run.seed, result.run.mode))
    failed = [result for result in results if result.verdict.status == FAILED]
    by_look: dict[str, list[Result]] = collections.defaultdict(list)
    for result in failed:
        by_look[f"{result.run.mode.split('/')[0]} {result.verdict.signature}"].append(result)
    chosen = [result for look in by_look.values() for result in look[: given.show]]
    _print_groups(list(run_all(SHRINK, chosen, given.jobs)))
    _print_tally(results)
    _print_features([result for result in results if result.run.mode == WORLDS])
    print(f"{len(runs)} programs in {time.monotonic() - begin:.0f} s")
    return int(bool(failed))


def _print_tally(results: Sequence[Result]) -> None:
    verdicts = [result.verdict for result in results]
    kinds = collections.Counter(verdict.kind for verdict in verdicts if verdict.status == NOT_COUNTED)
    tally = collections.Counter((result.run.mode, result.verdict.status) for result in results)
    for (mode, status), count in sorted(tally.items()):
        print(f"{mode:20} {status:12} {count}")
    equal, refused = (sum(getattr(verdict, name) for verdict in verdicts) for name in ("equal", "refused"))
    if equal or refused:
        print(f"calls: {equal} equal to eager, {refused} refused")
    for kind, count in kinds.most_common():
        print(f"not counted {count:6}: {kind}")
    reasons = collections.Counter(verdict.reason for verdict in verdicts if verdict.status == REFUSED)
    for reason, count in reasons.most_common():
        print(f"refused {count:6}: {reason}")


def _print_groups(failures: list[Shrunk]) -> None:
    groups: dict[str, list[Shrunk]] = collections.defaultdict(list)
    for failure in failures:
        groups[failure.group].append(failure)
    for name, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        seeds = ", ".join(f"{member.result.run.seed} {member.result.run.mode}" for member in members)
        shortest = min(members, key=lambda member: len(member.source))
        run, verdict = shortest.result.run, shortest.result.verdict
        print(f"\n==== {name}  [{seeds}]\n# seed {run.seed}, {run.mode}: {verdict.kind}: {verdict.reason[:600]}")
        print(shortest.source)


def _print_features(results: Sequence[Result]) -> None:
    """A table of the features of worlds, and how often each came to which verdict; the most failures first."""
    if not results:
        return
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        for feature in worlds.generate(result.run.seed, result.run.length).features:
            counts[feature][result.verdict.status] += 1
    statuses = (PASSED, REFUSED, FAILED, NOT_COUNTED)
    print(f"{'feature':40}" + "".join(f"{status:>13}" for status in statuses))
    for feature, count in sorted(counts.items(), key=lambda item: -item[1][FAILED] / item[1].total()):
        print(f"{feature:40}" + "".join(f"{count[status]:13}" for status in statuses))
