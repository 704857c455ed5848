"""Every module of torch's module database, trained by captured calls and compiled, against eager; a shard a test.

A part of the samples; with `-m full` many more.
"""

from __future__ import annotations

import pytest

from tests.sweeps.opinfo.check import FAILED, PASSED
from tests.sweeps.opinfo.modules import Make, captured, check, compiled, module_names, samples

SHARDS = 8
pytestmark = pytest.mark.slow  # loading the database takes seconds


def check_modules(names: list[str], make: Make, limit: int | None, train: bool = True) -> None:
    for name in names:
        verdicts = [check(sample, make) for sample in samples(name, limit, train)]
        failures = [f"{one.case}: {one.kind} {one.reason[:300]}" for one in verdicts if one.status == FAILED]
        assert not failures, "\n".join(failures)
        assert any(one.status == PASSED for one in verdicts), name


@pytest.mark.slow(seconds=20)
@pytest.mark.every(12)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_training_by_calls(shard: int) -> None:
    check_modules(module_names()[shard::SHARDS], captured, 2)


@pytest.mark.slow(seconds=20)
@pytest.mark.every(12)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_training_compiled(shard: int) -> None:
    check_modules(module_names()[shard::SHARDS], compiled, 1)


@pytest.mark.slow(seconds=20)
@pytest.mark.every(12)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_calls_that_do_not_train(shard: int) -> None:
    check_modules(module_names()[shard::SHARDS], captured, 1, train=False)


@pytest.mark.full
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize(("make", "limit"), [(captured, 30), (compiled, 6)], ids=["captured", "compiled"])
def test_many_samples(make: Make, limit: int, shard: int, train: bool) -> None:
    check_modules(module_names()[shard::SHARDS], make, limit, train)
