"""The command line: run random programs, tally, shrink and print what fails.

Invariant: the same seed gives the same programs. The exit status is 1 when a program failed.
"""

from __future__ import annotations

import argparse
import collections
import logging
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from tests.sweeps.fuzz.check import MODES, check, run_in_eager
from tests.sweeps.fuzz.generate import generate, well_defined
from tests.sweeps.fuzz.program import Program
from tests.sweeps.fuzz.shrink import shrink
from tests.sweeps.fuzz.verdict import FAILED, NOT_COUNTED, REFUSED, Verdict
from tests.sweeps.fuzz.workers import run_all, run_alone
from tests.sweeps.fuzz.worlds import generate as worlds
from tests.sweeps.fuzz.worlds.check import check_world
from tests.sweeps.fuzz.worlds.program import World
from tests.sweeps.fuzz.worlds.tally import by_feature

DIED = "the process died"
SECONDS, SHRINKING = 20, 60  # for one program in one mode, to make one smaller
WORLDS = "worlds"  # the mode of random Python worlds, which are generated otherwise
Result = tuple[int, str, Verdict]
_CALL = re.compile(r"\.\w+\(|[-+*]=|\w\[")


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


def run(job: tuple[int, str, int]) -> list[Result]:
    """All verdicts on the program of one seed."""
    seed, mode, length = job
    program = made(seed, mode, length)
    return [(seed, name, _timed(program, name)) for name in modes_of(seed, mode)]


def made(seed: int, mode: str, length: int) -> Program | World:
    """The program of a seed."""
    return worlds.generate(seed, length) if mode == WORLDS else generate(seed, length)


class _TimeIsUpError(BaseException):
    """Not an Exception, which the program's own errors are."""


def _time_is_up(*_: Any) -> None:
    raise _TimeIsUpError


def _timed(program: Program | World, mode: str) -> Verdict:
    signal.alarm(SECONDS)
    try:
        return check_world(program) if isinstance(program, World) else check(program, mode)
    except _TimeIsUpError:
        return Verdict(FAILED, "hangs")
    except Exception as error:
        return Verdict(FAILED, "the fuzzer itself raises", f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)


def _crashed(job: tuple[int, str, int]) -> list[Result]:
    """The verdict on what killed a process: of a program that kills eager, too, none."""
    lives = run_alone(_lives_in_eager, job, lambda job: False, _start)
    return [(job[0], job[1], Verdict(FAILED, DIED) if lives else Verdict(NOT_COUNTED, "eager dies"))]


def _lives_in_eager(job: tuple[int, str, int]) -> bool:
    seed, mode, length = job
    program = made(seed, mode, length)
    if isinstance(program, Program):
        for name in modes_of(seed, mode):
            run_in_eager(program, name)
    return True


def _unshrunk(job: tuple[Result, int]) -> tuple[Result, str, str]:
    (seed, mode, verdict), length = job
    return (seed, mode, verdict), str(made(seed, mode, length)), "not shrunk: the process died"


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # fake tensors log the errors that they raise
    signal.signal(signal.SIGALRM, _time_is_up)


def shrunk(seed: int, mode: str, length: int, verdict: Verdict) -> Program | World:
    """The failing program of a seed, made smaller."""
    end = time.monotonic() + SHRINKING

    def fails(program: Program | World) -> bool:
        return time.monotonic() < end and _fails_alike(program, mode, verdict)

    if mode == WORLDS:
        return worlds.shrink(worlds.generate(seed, length), fails)
    return shrink(generate(seed, length), fails)


def _fails_alike(program: Program | World, mode: str, verdict: Verdict) -> bool:
    return (isinstance(program, World) or well_defined(program)) and _timed(
        program, mode
    ).signature == verdict.signature


def shrink_job(job: tuple[Result, int]) -> tuple[Result, str, str]:
    """A failure, its program made smaller, and the group of failures that it looks like: what its steps do."""
    (seed, mode, verdict), length = job
    small = shrunk(seed, mode, length, verdict)
    calls = sorted({call for step in small.steps for call in _CALL.findall(step.source)})
    return (seed, mode, verdict), str(small), f"{verdict.kind}: {', '.join(calls)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others count up")
    parser.add_argument("--mode", default="rotate", choices=("rotate", "all", WORLDS, *MODES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--length", type=int, default=8, help="steps of a program at most")
    parser.add_argument("--without", metavar="REGEX", help="leave out the programs with a line that matches")
    parser.add_argument("--show", type=int, default=4, help="failures of one look to shrink and print")
    given = parser.parse_args(arguments)
    seeds: Sequence[int] = range(given.seed, given.seed + given.programs)
    if given.without:
        seeds = [s for s in seeds if not re.search(given.without, made(s, given.mode, given.length).body())]
    jobs = [(seed, given.mode, given.length) for seed in seeds]
    begin, results = time.monotonic(), list[Result]()
    for found in run_all(run, jobs, _crashed, workers=given.jobs, start=_start):
        results += found
        for seed, mode, verdict in found:
            if verdict.status == FAILED:
                print(f"failed: {seed} {mode}: {verdict.kind}: {verdict.reason[:300]}", file=sys.stderr, flush=True)
    failed = sorted((r for r in results if r[2].status == FAILED), key=lambda r: r[:2])
    by_look: dict[str, list[Result]] = collections.defaultdict(list)
    for result in failed:
        by_look[f"{result[1].split('/')[0]} {result[2].signature}"].append(result)
    chosen = [(result, given.length) for look in by_look.values() for result in look[: given.show]]
    _print_groups(list(run_all(shrink_job, chosen, _unshrunk, workers=given.jobs, start=_start)))
    _print_tally(results)
    print(by_feature([result for result in results if result[1] == WORLDS], given.length), end="")
    print(f"{len(jobs)} programs in {time.monotonic() - begin:.0f} s")
    return int(bool(failed))


def _print_tally(results: Sequence[Result]) -> None:
    kinds = collections.Counter(v.kind for _, _, v in results if v.status == NOT_COUNTED)
    tally = collections.Counter((mode, verdict.status) for _, mode, verdict in results)
    for (mode, status), count in sorted(tally.items()):
        print(f"{mode:20} {status:12} {count}")
    equal, refused = (sum(getattr(verdict, name) for _, _, verdict in results) for name in ("equal", "refused"))
    if equal or refused:
        print(f"calls: {equal} equal to eager, {refused} refused")
    for kind, count in kinds.most_common():
        print(f"not counted {count:6}: {kind}")
    reasons = collections.Counter(verdict.reason for _, _, verdict in results if verdict.status == REFUSED)
    for reason, count in reasons.most_common():
        print(f"refused {count:6}: {reason}")


def _print_groups(small: list[tuple[Result, str, str]]) -> None:
    groups: dict[str, list[tuple[Result, str, str]]] = collections.defaultdict(list)
    for entry in small:
        groups[entry[2]].append(entry)
    for name, entries in sorted(groups.items(), key=lambda item: -len(item[1])):
        seeds = ", ".join(f"{seed} {mode}" for (seed, mode, _), _, _ in entries)
        (seed, mode, verdict), source, _ = min(entries, key=lambda entry: len(entry[1]))
        print(f"\n==== {name}  [{seeds}]\n# seed {seed}, {mode}: {verdict.kind}: {verdict.reason[:600]}\n{source}")


if __name__ == "__main__":
    sys.exit(main())
