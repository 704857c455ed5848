"""The worker processes of all sweeps.

In: tasks, whose parts are checked one after the other in one process. Out: a result for each part, also where its
process dies, hangs or runs out of memory; a new process goes on with the parts after it. Invariant: a worker that was
interrupted by a `time_limit` is replaced at once, one that has used more than `MEMORY` after its task. Limits: workers
import the functions of a `Work`, so they belong to modules; a task has the same parts each time.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

MEMORY = 8 * 2**30  # bytes
DIED, HANGS, RAISES = "died", "hangs", "raises"
_CONTEXT = multiprocessing.get_context("spawn")
Task = TypeVar("Task")
Part = TypeVar("Part")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Loss:
    """Why a part has no result of its own. ``kind``: its process died, had to be killed, or the check itself raised."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Work(Generic[Task, Part, Result]):
    """What is done with tasks. ``lost`` makes the result of a part that has none; ``seconds`` is the limit of one."""

    parts: Callable[[Task], Iterable[Part]]
    check: Callable[[Part], Result]
    lost: Callable[[Part, Loss], Result]
    seconds: float


def whole(task: Task) -> list[Task]:
    """Of a task that is checked as one: itself."""
    return [task]


class OutOfTime(BaseException):
    """The end of a `time_limit`; no program catches it by ``except Exception``."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` after some seconds of the processor, which a busy machine does not change. One at a time.

    What was interrupted, such as an import, may be left undone: a worker is replaced after that.
    """
    handler = signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


_interrupted = False


def _out_of_time(number: int, frame: object) -> None:
    global _interrupted
    _interrupted = True
    raise OutOfTime


@dataclass(frozen=True)
class _Begun(Generic[Part]):
    part: Part


@dataclass(frozen=True)
class _Checked(Generic[Result]):
    result: Result
    interrupted: bool


@dataclass(frozen=True)
class _Ended:
    memory: int


@dataclass(frozen=True)
class _Job(Generic[Task]):
    """The parts of a task that are still to check: all after the first ones."""

    task: Task
    after: int = 0


def check_here(work: Work[Task, Part, Result], part: Part) -> Result:
    """The result of a part, in this process."""
    try:
        return work.check(part)
    except Exception as error:
        return work.lost(part, Loss(RAISES, f"{type(error).__name__}: {error}"))


def _serve(work: Work[Any, Any, Any], pipe: Connection) -> None:
    import torch
    import torch._dynamo  # seconds, which are not those of the first part

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    while True:
        job = pipe.recv()
        for number, part in enumerate(work.parts(job.task)):
            if number >= job.after:
                pipe.send(_Begun(part))
                pipe.send(_Checked(check_here(work, part), _interrupted))
        pipe.send(_Ended(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


class _Worker(Generic[Task, Part, Result]):
    """A process, and what it is at."""

    def __init__(self, work: Work[Task, Part, Result]) -> None:
        self.work = work
        self.job: _Job[Task] | None = None
        self._begun: _Begun[Part] | None = None
        self._since, self._count = 0.0, 0
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(self.work, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def give(self, job: _Job[Task]) -> None:
        if not self.process.is_alive():
            self._start()
        self.job, self._begun, self._count = job, None, job.after
        self.pipe.send(job)

    def results(self) -> Iterator[Result]:
        """What the worker has found since; where it is lost, the result of the part at hand, and a new process."""
        try:
            while self.job and self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, _Begun):
                    self._begun, self._since = message, time.monotonic()
                    self._count += 1
                elif isinstance(message, _Checked):
                    self._begun = None
                    if message.interrupted:
                        self._replace()
                    yield message.result
                else:
                    self.job = None
                    if message.memory > MEMORY:
                        self._replace()
        except (EOFError, ConnectionResetError):
            self.process.join()
            yield self._lost(Loss(DIED, f"the process died with exit code {self.process.exitcode}"))
        if self._begun is not None and time.monotonic() - self._since > self.work.seconds:
            yield self._lost(Loss(HANGS, f"no answer within {self.work.seconds:.0f} s"))

    def _lost(self, loss: Loss) -> Result:
        if self._begun is None:
            raise RuntimeError(f"a worker was lost between two parts of {self.job}: {loss.reason}")
        part = self._begun.part
        self._replace()
        return self.work.lost(part, loss)

    def _replace(self) -> None:
        """Go on with a new process, with the parts that are left."""
        self.kill()
        self._start()
        if self.job is not None:
            self.give(_Job(self.job.task, self._count))


class Pool(Generic[Task, Part, Result]):
    """Some workers. Use as a context manager; `run` may be called many times. ``unfinished``: how many tasks are."""

    def __init__(self, work: Work[Task, Part, Result], processes: int) -> None:
        self._workers = [_Worker(work) for _ in range(processes)]
        self.unfinished = 0

    def __enter__(self) -> Pool[Task, Part, Result]:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.kill()

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """The result of each part of each task, as they come."""
        queue = [_Job(task) for task in reversed(tasks)]
        while True:
            for worker in self._workers:
                if worker.job is None and queue:
                    worker.give(queue.pop())
            busy = [worker for worker in self._workers if worker.job]
            self.unfinished = len(queue) + len(busy)
            if not busy:
                return
            wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                yield from worker.results()


def run_all(work: Work[Task, Part, Result], tasks: Sequence[Task], processes: int) -> Iterator[Result]:
    """The result of each part of each task, in a pool of its own."""
    if tasks:
        with Pool(work, min(processes, len(tasks))) as pool:
            yield from pool.run(tasks)
