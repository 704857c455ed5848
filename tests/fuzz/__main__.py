"""The command line: run random programs, tally, shrink and print what fails.

Invariant: the same seed gives the same programs. The exit status is 1 when a program failed.
"""

from __future__ import annotations

import argparse
import collections
import logging
import multiprocessing
import signal
import sys
import time
from typing import Any

import torch

from tests.fuzz.check import FAILED, MODES, Verdict, check
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink

SECONDS = 60  # for one program
Result = tuple[int, str, Verdict]


def modes_of(seed: int, mode: str) -> tuple[str, ...]:
    """``all`` modes, one named mode, or (``rotate``) direct use and one traced mode that the seed chooses."""
    if mode == "all":
        return MODES
    if mode != "rotate":
        return (mode,)
    traced = [name for name in MODES if not name.startswith("direct")]
    return (("direct/mutations", "direct/views")[seed % 2], traced[seed // 2 % len(traced)])


def run(job: tuple[int, str, int]) -> list[Result]:
    """All verdicts on the program of one seed."""
    seed, mode, length = job
    signal.alarm(SECONDS)
    program = generate(seed, length)
    results = [(seed, name, check(program, name)) for name in modes_of(seed, mode)]
    signal.alarm(0)
    return results


def _timed_out(*_: Any) -> None:
    raise TimeoutError(f"a program took more than {SECONDS} s")


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # fake tensors log the errors that they raise
    signal.signal(signal.SIGALRM, _timed_out)


def shrunk(seed: int, mode: str, length: int, verdict: Verdict) -> Program:
    """The failing program of a seed, made smaller."""
    return shrink(generate(seed, length), lambda program: _fails_alike(program, mode, verdict))


def _fails_alike(program: Program, mode: str, verdict: Verdict) -> bool:
    try:
        return program.within_bounds() and check(program, mode).signature == verdict.signature
    except Exception:
        return False  # a step was left out that others need


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others count up")
    parser.add_argument("--mode", default="rotate", choices=("rotate", "all", *MODES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--length", type=int, default=8, help="steps of a program at most")
    parser.add_argument("--show", type=int, default=1, help="failures of a signature to shrink and print")
    given = parser.parse_args(arguments)
    jobs = [(seed, given.mode, given.length) for seed in range(given.seed, given.seed + given.programs)]
    begin, results = time.monotonic(), list[Result]()
    with multiprocessing.get_context("fork").Pool(given.jobs, _start) as pool:
        for found in pool.imap_unordered(run, jobs, chunksize=4):
            results += found
    _start()
    _report(results, given)
    print(f"{given.programs} programs in {time.monotonic() - begin:.0f} s")
    return int(any(verdict.status == FAILED for _, _, verdict in results))


def _report(results: list[Result], given: argparse.Namespace) -> None:
    groups: dict[str, list[Result]] = collections.defaultdict(list)
    for result in sorted(results, key=lambda result: result[:2]):
        if result[2].status == FAILED:
            groups[result[2].signature].append(result)
    for signature, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"\n==== {len(group)} x {signature}")
        for seed, mode, verdict in group[: given.show]:
            print(f"# seed {seed}, {mode}: {verdict.reason[:600]}")
            print(shrunk(seed, mode, given.length, verdict), flush=True)
    tally = collections.Counter((mode, verdict.status) for _, mode, verdict in results)
    for (mode, status), count in sorted(tally.items()):
        print(f"{mode:20} {status:12} {count}")


if __name__ == "__main__":
    sys.exit(main())
