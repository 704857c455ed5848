"""What every test gets: a seeded generator, its mark as slow where another run stands for it, its place in the queue.

Torch is imported only by tests that already did: those of codegen run without it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import zlib
from collections.abc import Iterable, Iterator

import pytest

# A worker for each core is all that a machine has to give: inductor compiles in the worker itself.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

SLOW_MODES = ("real", "symbolic")
# A fast program runs directly and traced, and with both ways to remove: twice, not four times.
SLOW_PAIRS = ((None, "mutations_and_views"), ("fake", "mutations"))

# Which rows have their turn: others for each commit that `scripts/test` runs; without a seed always the same.
TURN = int(os.environ.get("FUZZ_SEED", "0"))
HALVED = ("tests/backends/", "tests/regressions/", "tests/sweeps/")  # folders whose tests take turns of two commits
SLOW_COLLECTIONS = 3  # seconds, since the last time
SAMPLES = 3  # rows of a table that quick checks run at most


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what another run stands for, and as full three quarters of it, and rows whose turn it is not.

    Workers begin with the longest, so that none is left at the end.
    """
    for item in out_of_turn(items):
        item.add_marker(pytest.mark.full)
    quick = []
    for item in items:
        repetition = is_repetition(item)
        if repetition and scattered(item) % 4:
            item.add_marker(pytest.mark.full)
        if repetition or item.get_closest_marker("full"):
            item.add_marker(pytest.mark.slow)
        else:
            quick.append(item)
    for item in beyond_samples(quick):
        item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        items.sort(key=seconds, reverse=True)  # stable: all others stay in the order of their files


def pytest_collection_finish() -> None:
    """Have collections of garbage look at what tests make, not at all that was imported."""
    COLLECTIONS.forget_what_is_there()


def pytest_runtest_logfinish() -> None:
    """The same for what tests import, and keep, once that makes collections slow."""
    if COLLECTIONS.seconds > SLOW_COLLECTIONS:
        COLLECTIONS.forget_what_is_there()


class Collections:
    """Collections of garbage, and how long they have taken since they were last made to forget what is there."""

    def __init__(self) -> None:
        self.seconds, self._begun = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._begun = now
        else:
            self.seconds += now - self._begun

    def forget_what_is_there(self) -> None:
        """Leave what is alive out of all collections to come."""
        gc.collect()
        gc.freeze()
        self.seconds = 0.0


COLLECTIONS = Collections()


def is_repetition(item: pytest.Item) -> bool:
    """Whether a program is run in a mode, or with a way to remove, that quick checks leave out."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or "mode" not in callspec.params:
        return False
    mode, remove = callspec.params["mode"], callspec.params.get("remove")
    return mode in SLOW_MODES or (mode, remove) in SLOW_PAIRS


def tables_of(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The rows of each parametrized test, in their order."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tables.values()


def beyond_samples(items: list[pytest.Item]) -> list[pytest.Item]:
    """The rows of each table of a test but for a few, spread over it, which quick checks run."""
    return [item for rows in tables_of(items) for place, item in enumerate(rows) if place % -(-len(rows) // SAMPLES)]


def out_of_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """The rows that `every(n)` leaves to the long run: all but one in n.

    In some folders each commit runs half of the other tests of a file.
    """
    halved: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(HALVED) and not item.get_closest_marker("every"):
            item.add_marker(pytest.mark.every(2))
            halved.setdefault(item.nodeid.partition("::")[0], []).append(item)
    inside = {id(item) for rows in halved.values() for item in rows}
    marked = (item for item in items if item.get_closest_marker("every") and id(item) not in inside)
    tables = (sorted(rows, key=scattered) for rows in (*tables_of(marked), *halved.values()))
    return [item for rows in tables for place, item in enumerate(rows) if place % turn_of(item)]


def scattered(item: pytest.Item) -> int:
    """An order of rows that has nothing to do with that of their parameters, and is another one for each turn."""
    return zlib.crc32(f"{item.nodeid} {TURN}".encode() if TURN else item.nodeid.encode())


def turn_of(item: pytest.Item) -> int:
    mark = item.get_closest_marker("every")
    assert mark is not None
    turn: int = mark.args[0]
    return turn


def seconds(item: pytest.Item) -> float:
    """How long a test says that it takes: `slow(seconds=60)`, `full(seconds=60)`."""
    return max((mark.kwargs.get("seconds", 0) for mark in item.iter_markers()), default=0)


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A default group of this process alone."""
    import torch

    path = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
