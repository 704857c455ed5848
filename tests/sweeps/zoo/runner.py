"""Runs models in worker processes. Invariant: every model gets a verdict, also where it hangs or kills its worker.

A worker takes one model after the other and stops itself by an alarm; one that does not is killed. So processes are
started rarely: to import the libraries takes longer than most models.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.sweeps.zoo.check import CRASH, TIME, OutOfTime, Verdict, check
from tests.sweeps.zoo.families import FAMILIES

_CONTEXT = multiprocessing.get_context("spawn")
_GRACE = 20.0  # seconds in which an alarm must have had its effect


@dataclass(frozen=True)
class Job:
    """One model in one mode."""

    family: str
    name: str
    mode: str
    seconds: int
    compare: bool = False
    to: tuple[str, ...] = ()


def run_job(job: Job) -> Verdict:
    """The verdict on a job, in this process."""

    def expired(number: int, frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(job.seconds)
    try:
        return check(FAMILIES[job.family], job.name, job.mode, compare=job.compare, to=job.to)
    except OutOfTime:  # between the check's own handlers
        return Verdict(job.family, job.name, job.mode, TIME, f"after {job.seconds} s")
    finally:
        signal.alarm(0)


def prepare() -> None:
    """Set up a process: one thread, and no messages of the libraries."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def _serve(pipe: Connection) -> None:
    prepare()
    while (job := pipe.recv()) is not None:
        pipe.send(run_job(job))


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: Job | None = None
    since: float = 0.0


def _start() -> _Worker:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def run(jobs: Sequence[Job], processes: int, report: Callable[[Verdict], None]) -> None:
    """Run all jobs; `report` gets each verdict as it comes."""
    waiting = list(reversed(jobs))
    workers = [_start() for _ in range(min(processes, len(jobs)))]
    try:
        while waiting or any(worker.job for worker in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.job, worker.since = waiting.pop(), time.monotonic()
                    worker.pipe.send(worker.job)
            wait([worker.pipe for worker in workers if worker.job], timeout=1.0)
            workers = [_collected(worker, report) for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _collected(worker: _Worker, report: Callable[[Verdict], None]) -> _Worker:
    """Take what a worker has to say; the worker, or a new one in its place."""
    job = worker.job
    if job is None:
        return worker
    verdicts: Iterator[Verdict] = iter(())
    lost = None
    try:
        if worker.pipe.poll():
            verdicts = iter([worker.pipe.recv()])
            worker.job = None
        elif time.monotonic() - worker.since > job.seconds + _GRACE:
            lost = Verdict(job.family, job.name, job.mode, TIME, f"killed after {job.seconds} s")
    except (EOFError, ConnectionResetError):
        lost = Verdict(job.family, job.name, job.mode, CRASH, "the process died")
    for verdict in (*verdicts, *((lost,) if lost else ())):
        report(verdict)
    if lost:
        worker.process.kill()
        worker.process.join()
        return _start()
    return worker
