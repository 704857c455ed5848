"""Run jobs in worker processes that may crash: eager itself can die of a program.

Invariant: each job has one result, a crash too. Limits: what runs beside a job that crashes runs twice.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
CHUNK = 8


def run_all(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    crashed: Callable[[Job], Result],
    *,
    workers: int,
    start: Callable[[], None],
) -> Iterator[Result]:
    """``function(job)`` of each job, ``crashed(job)`` where the worker died."""
    left = list(jobs)
    while left:
        done = 0
        try:
            with _pool(workers, start) as pool:
                for result in pool.map(function, left, chunksize=CHUNK):
                    done += 1
                    yield result
        except BrokenProcessPool:
            suspects = left[done : done + CHUNK * workers * 2]
            for job in suspects:
                yield run_alone(function, job, crashed, start)
            done += len(suspects)
        left = left[done:]


def run_alone(
    function: Callable[[Job], Result], job: Job, crashed: Callable[[Job], Result], start: Callable[[], None]
) -> Result:
    """``function(job)`` in a worker of its own, ``crashed(job)`` where that died."""
    try:
        with _pool(1, start) as pool:
            return pool.submit(function, job).result()
    except BrokenProcessPool:
        return crashed(job)


def _pool(workers: int, start: Callable[[], None]) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), start)
