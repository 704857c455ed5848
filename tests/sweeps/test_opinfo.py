"""The fixed part of the operator sweep, a shard a test; `python -m tests.sweeps opinfo --full` runs all of it.

The first shard of operators has its turn in CI, the rest with what is marked full.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from functionalize.ops.traits import TRUSTS_LAST_STRIDE, TRUSTS_STRIDES
from tests.support.ledger import Ledger
from tests.sweeps.opinfo import ranges
from tests.sweeps.opinfo.cases import CI, Case, op_names
from tests.sweeps.opinfo.check import FAILED, PASSED, Verdict, check, rows_of
from tests.sweeps.opinfo.strides import trusting
from tests.sweeps.opinfo.sweep import Operator, work
from tests.sweeps.pool import Pool

SHARDS = 72
pytestmark = pytest.mark.slow  # loading the database takes seconds


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool[Operator, Case, Verdict]]:
    with Pool(work(), processes=2) as workers:
        yield workers


@pytest.mark.slow(seconds=20)
@pytest.mark.every(SHARDS)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_sweep_equals_eager(pool: Pool[Operator, Case, Verdict], shard: int) -> None:
    verdicts = list(pool.run([Operator(name, CI) for name in op_names()[shard::SHARDS]]))
    failures = [verdict for verdict in verdicts if verdict.status == FAILED]
    listed = "\n".join(
        f"{v.kind}: {v.reason[:300]}\n  python -m tests.sweeps opinfo --case '{v.case}'" for v in failures[:20]
    )
    assert not failures, f"{len(failures)} of {len(verdicts)} cases failed\n{listed}"
    objections = Ledger("opinfo").objections(row for verdict in verdicts for row in rows_of(verdict))
    assert not objections, "\n".join(objections)
    assert any(verdict.status == PASSED for verdict in verdicts)


@pytest.mark.parametrize("name", ["linalg.det", "nn.functional.group_norm", "nn.functional.fractional_max_pool3d"])
def test_operators_that_trust_strides_are_listed(name: str) -> None:
    found = trusting([name])
    assert found
    assert found <= TRUSTS_STRIDES | TRUSTS_LAST_STRIDE


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_operators_that_trust_strides_are_listed(shard: int) -> None:
    found = trusting(op_names()[shard::SHARDS])
    assert found <= TRUSTS_STRIDES | TRUSTS_LAST_STRIDE, found - TRUSTS_STRIDES - TRUSTS_LAST_STRIDE


@pytest.mark.slow(seconds=5)
@pytest.mark.every(SHARDS)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_batches_are_in_the_ranges_of_export(shard: int) -> None:
    right = 0
    warnings.simplefilter("ignore")  # samples call deprecated functions; each test has filters of its own
    for of, shards, limit in (("operators", SHARDS, 2), ("gradients", SHARDS, 1), ("modules", SHARDS // 2, 1)):
        for name in ranges.names(of)[shard % shards :: shards]:
            for program in ranges.programs(of, name, limit):
                checked = ranges.check(program)
                right += checked.status == ranges.RIGHT
                known = of == "gradients" and name in ranges.BRANCHING
                assert checked.status != ranges.NARROWER or known, f"{program.name}: {checked.reason}"
    assert right


@pytest.mark.parametrize(
    "name",
    ["add/inplace_view/float32/0/fake/views", "nn.functional.dropout/call/float32/1/real/mutations"],
)
def test_case_name_reads_back(name: str) -> None:
    assert str(Case.parse(name)) == name


@pytest.mark.parametrize("name", ["add", "add/call/float32/x/fake/views", "nosuch/call/float32/0/fake/views"])
def test_case_name_errors(name: str) -> None:
    with pytest.raises(ValueError, match=r"add|nosuch"):
        Case.parse(name)


def test_sweep_finds_what_the_incumbent_leaves() -> None:
    # Its composite kernel of circular padding brings views and copies back below the transform.
    case = Case.parse("nn.functional.pad.circular/call/float32/0/fake/views")
    verdict = check(case, "incumbent")
    assert (verdict.status, verdict.kind) == (FAILED, "purity")
