"""The pool of the sweeps: each part has a result, whatever becomes of its process."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.sweeps import pool
from tests.sweeps.pool import DIED, HANGS, RAISES, Loss, OutOfTime, Pool, Work, run_all, time_limit, whole


def _parts(task: str) -> list[str]:
    return [f"{task} {part}" for part in ("first", "second", "third")]


def _check(part: str) -> str:
    if part == "dies second":
        os._exit(3)
    if part == "hangs second":
        time.sleep(60)
    if part == "interrupted second":
        with contextlib.suppress(OutOfTime), time_limit(0.05):
            _use_processor(5)
    if part == "raises second":
        raise KeyError(part)
    return f"{part}: {os.getpid()}"


def _lost(part: str, loss: Loss) -> str:
    return f"{part}: {loss.kind}"


def _use_processor(seconds: float) -> None:
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        pass


WORK = Work(_parts, _check, _lost, 2.0)


@pytest.mark.slow(seconds=10)
def test_each_part_has_one_result() -> None:
    tasks = ["dies", "hangs", "raises", "interrupted"]
    results = dict(result.split(": ") for result in run_all(WORK, tasks, 2))
    assert sorted(results) == sorted(part for task in tasks for part in _parts(task))
    lost = {part: result for part, result in results.items() if not result.isdigit()}
    assert lost == {"dies second": DIED, "hangs second": HANGS, "raises second": RAISES}
    for task in ("dies", "hangs", "interrupted"):
        assert results[f"{task} first"] != results[f"{task} third"]
    assert results["raises first"] == results["raises third"]


@pytest.mark.full(seconds=10)
def test_a_worker_that_has_used_too_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(Work(whole, _check, _lost, 60.0), 1) as workers:
        kept = {result.split(": ")[1] for result in workers.run(["one", "two"])}
        monkeypatch.setattr(pool, "MEMORY", 0)
        replaced = {result.split(": ")[1] for result in workers.run(["one", "two"])}
    assert len(kept) == 1 and len(replaced) == 2


def test_a_time_limit_ends_what_catches_exceptions() -> None:
    with pytest.raises(OutOfTime), time_limit(0.05), contextlib.suppress(Exception):
        _use_processor(5)
    _use_processor(0.1)  # past the limit, which has no effect any more


def test_sweeps_are_modules() -> None:
    from tests.sweeps.__main__ import SWEEPS

    for sweep in SWEEPS.values():
        assert (Path(__file__).parents[2] / f"{sweep.module.replace('.', '/')}.py").exists()
