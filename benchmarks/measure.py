"""What both benchmarks share: the systems, timing them interleaved, and printing tables.

Invariant: every round times every system once, so that a slow minute of the machine hits all of them alike.
Limits: CPU time of one process, so that others on the machine count for little; only medians and their
ratios mean something.
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
    """CPU seconds of each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, *, warmed: bool = False) -> dict[str, Timing]:
    """Time every call once a round, each round beginning with another; a first round is not counted.

    Garbage is collected before each call, which empties the processor's caches. ``warmed``: an untimed call fills them
    before each that is timed, so that short calls are not charged for it more than long ones.

    CPython keeps frames in chunks of 16 KiB, and a loop whose calls cross the end of a chunk pays for it each time:
    a trace takes up to a quarter longer from an unlucky depth. So the rounds start from depths that are spread over
    one chunk, the same for all systems.
    """
    for call in calls.values():
        call()
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            gc.disable()
            if warmed:
                calls[name]()
            start = time.process_time()
            _deeper(turn * _FRAMES_OF_A_CHUNK // rounds, calls[name])
            seconds[name].append(time.process_time() - start)
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


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
