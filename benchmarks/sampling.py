"""Where the processor time of a capture goes, by folder of this package and by line.

A timer of processor time interrupts many captures of one model, and each time notes the line that runs. Limits: Python
is interrupted between two instructions, so that the time of C code counts for the line that Python runs next.
"""

from __future__ import annotations

import linecache
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from benchmarks.measure import table

_OWN = Path(__file__).resolve().parent.parent / "functionalize"
_TORCH = Path(torch.__file__).parent
_INTERVAL = 0.001  # seconds; the kernel's clock may be coarser


class Samples:
    """How often each line was seen to run, and each folder or library as the innermost of ours."""

    def __init__(self) -> None:
        self.lines, self.parts = Counter[tuple[str, int]](), Counter[str]()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Count the line that runs; a line of torch's also for the innermost part of ours that called it."""
        assert frame is not None
        self.lines[frame.f_code.co_filename, frame.f_lineno or 0] += 1  # code that torch generates may have no line
        part = _part(frame.f_code.co_filename)
        inner = part
        while inner == "torch" and frame.f_back is not None:
            frame = frame.f_back
            inner = _part(frame.f_code.co_filename)
        self.parts[part if inner == part else f"{inner}, in torch's code"] += 1


def sample(call: Callable[[], object], times: int) -> Samples:
    """What runs while a function is called many times."""
    samples = Samples()
    before = signal.signal(signal.SIGPROF, samples.note)
    signal.setitimer(signal.ITIMER_PROF, _INTERVAL, _INTERVAL)
    try:
        for _ in range(times):
            call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return samples


def tables(samples: Samples, lines: int) -> str:
    """The parts, and the lines that were seen most often, with their shares in percent."""
    total = sum(samples.lines.values())
    parts = [[part, f"{100 * count / total:.1f}"] for part, count in samples.parts.most_common()]
    rows = [
        [f"{_short(file)}:{line}  {linecache.getline(file, line).strip()[:90]}", f"{100 * count / total:.1f}"]
        for (file, line), count in samples.lines.most_common(lines)
    ]
    return table(["part", "%"], parts) + "\n\n" + table(["line", "%"], rows)


def _part(file: str) -> str:
    path = Path(file)
    if path.is_relative_to(_OWN):
        folders = path.relative_to(_OWN).parts[:-1]
        return "/".join(folders[:2]) or "functionalize"
    if path.is_relative_to(_TORCH / "nn"):
        return "torch.nn"
    return "torch" if path.is_relative_to(_TORCH) else "the model and other libraries"


def _short(file: str) -> str:
    for folder in (_OWN, _TORCH.parent, Path(sys.prefix)):
        if Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file
