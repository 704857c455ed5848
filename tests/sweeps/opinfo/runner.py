"""Runs cases in worker processes. Invariant: every case gets one verdict, also when its worker dies or hangs.

Limits: one op is one unit of work; a worker that dies loses only the case at hand.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from tests.sweeps.opinfo.cases import Case, Selection, cases_of
from tests.sweeps.opinfo.check import FAILED, Verdict, check

CASE_LIMIT = 120.0  # seconds
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    """The cases of one op that are still to run."""

    op: str
    selection: Selection
    impl: str
    skip: frozenset[str] = frozenset()


def run_op(job: Job) -> Iterator[tuple[str, Any]]:
    """("start", case) and ("verdict", Verdict) for each case of the job."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = list(cases_of(job.op, job.selection))
    for case in cases:
        if str(case) not in job.skip:
            yield "start", str(case)
            yield "verdict", _safely(case, job.impl)


def _safely(case: Case, impl: str) -> Verdict:
    try:
        return check(case, impl)
    except Exception as error:
        return Verdict(str(case), FAILED, "harness", f"{type(error).__name__}: {error}")


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        for message in run_op(job):
            pipe.send(message)
        pipe.send(("done", job.op))


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None
    current: str | None = None
    since: float = 0.0
    seen: set[str] = field(default_factory=set)


class Runner:
    """A pool of workers. Use as a context manager; `run` may be called many times."""

    def __init__(self, processes: int = 2) -> None:
        self._workers = [_start() for _ in range(processes)]

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            _stop(worker)

    def run(self, jobs: Sequence[Job], report: Callable[[Verdict], None], op_done: Callable[[], None]) -> None:
        """Run all jobs; `report` gets each verdict as it comes, `op_done` is called after each op."""
        queue = list(reversed(jobs))
        while True:
            for index, worker in enumerate(self._workers):
                if worker.job is None and queue:
                    self._workers[index] = _give(worker, queue.pop())
            busy = [worker for worker in self._workers if worker.job is not None]
            if not busy:
                return
            wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                retry = _collect(worker, report, op_done)
                if retry is not None:
                    self._workers[self._workers.index(worker)] = _start()
                    queue.append(retry)


def _start() -> _Worker:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _stop(worker: _Worker) -> None:
    if worker.process.is_alive() and worker.job is None:
        worker.pipe.send(None)
        worker.process.join(5)
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()


def _give(worker: _Worker, job: Job) -> _Worker:
    if not worker.process.is_alive():
        worker = _start()
    worker.pipe.send(job)
    worker.job, worker.current, worker.since = job, None, time.monotonic()
    worker.seen = set(job.skip)
    return worker


def _collect(worker: _Worker, report: Callable[[Verdict], None], op_done: Callable[[], None]) -> Job | None:
    """Take what a worker has said. Returns what is left of its job, if the worker is lost."""
    try:
        while worker.pipe.poll():
            kind, content = worker.pipe.recv()
            if kind == "start":
                worker.current, worker.since = content, time.monotonic()
                worker.seen.add(content)
            elif kind == "verdict":
                worker.current = None
                report(content)
            else:
                worker.job = None
                op_done()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return _lost(worker, report, f"the process died with exit code {worker.process.exitcode}")
    if worker.current is not None and time.monotonic() - worker.since > CASE_LIMIT:
        worker.process.kill()
        return _lost(worker, report, f"no answer within {CASE_LIMIT:.0f} s")
    return None


def _lost(worker: _Worker, report: Callable[[Verdict], None], reason: str) -> Job:
    job = worker.job
    if job is None or worker.current is None:
        raise RuntimeError(f"a worker of the sweep was lost between cases, after {worker.job}: {reason}")
    report(Verdict(worker.current, FAILED, "crash", reason))
    return Job(job.op, job.selection, job.impl, frozenset(worker.seen))
