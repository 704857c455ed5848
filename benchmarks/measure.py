"""What both benchmarks share: the systems, timing them interleaved, and printing tables.

Invariant: every round times every system once, so that a slow minute of the machine hits all of them alike.
Limits: medians are of processor time of one process, so that others on the machine count for little; wall time stands
beside it. Only medians and their ratios mean something.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of each round: of the processor, and on the wall."""

    seconds: tuple[float, ...]
    wall: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the processor."""
        return statistics.median(self.seconds)

    @property
    def median_wall(self) -> float:
        return statistics.median(self.wall)


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, *, in_a_row: int = 1) -> dict[str, Timing]:
    """Time every call once a round, each round beginning with another; a first round is not counted.

    Garbage is collected before a call, which empties the processor's caches. With several calls ``in_a_row`` the first
    is not timed: it fills them, so that short calls are not charged for it more than long ones.

    CPython keeps frames in chunks of 16 KiB, and a loop whose calls cross the end of a chunk pays for it each time:
    a trace takes up to a quarter longer from an unlucky depth. So the rounds start from depths that are spread over
    one chunk, the same for all systems.
    """
    for call in calls.values():
        call()
    names = list(calls)
    rounds_of: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            gc.disable()
            timed = [_timed(turn * _FRAMES_OF_A_CHUNK // rounds, calls[name]) for _ in range(in_a_row)]
            rounds_of[name] += timed[min(1, in_a_row - 1) :]
            gc.enable()
    return {name: Timing(*zip(*timed, strict=True)) for name, timed in rounds_of.items()}


def _timed(frames: int, call: Callable[[], object]) -> tuple[float, float]:
    """Processor and wall seconds of a call."""
    wall, start = time.perf_counter(), time.process_time()
    _deeper(frames, call)
    return time.process_time() - start, time.perf_counter() - wall


_FRAMES_OF_A_CHUNK = 120  # of `_deeper`, about


def _deeper(frames: int, call: Callable[[], object]) -> None:
    if frames == 0:
        call()
    else:
        _deeper(frames - 1, call)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def environment() -> str:
    """The versions and settings that a figure belongs to."""
    return f"torch {torch.__version__}, CPU, {torch.get_num_threads()} thread(s)"
