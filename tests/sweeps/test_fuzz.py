"""Random programs of fixed seeds against eager, in every mode; `scripts/fuzz` runs as many as one likes."""

from __future__ import annotations

import os

import pytest
import torch

from tests.sweeps.fuzz.check import MODES, check
from tests.sweeps.fuzz.generate import apart, bits_defined, generate
from tests.sweeps.fuzz.program import Program, Step
from tests.sweeps.fuzz.shrink import shrink
from tests.sweeps.fuzz.sweep import modes_of
from tests.sweeps.fuzz.verdict import FAILED, NOT_COUNTED, PASSED

SHARDS, FAST, FRESH, SLOW = 10, 15, 30, 40  # programs of a shard
QUICK = 2  # shards that are not slow
FLOOR = 0.5  # of the runs of a shard pass; about one in five is refused, most for sources that overlap what is written
CALLED = 24  # programs that are called otherwise than they were captured
FRESH_FROM = int(os.environ.get("FUZZ_SEED", "0"))


def _failures(seeds: range) -> list[str]:
    failed, passed, tried = [], 0, 0
    for seed in seeds:
        program = generate(seed)
        for mode in modes_of(seed, "rotate"):
            verdict = check(program, mode)
            tried += 1
            passed += verdict.status == PASSED
            if verdict.status == FAILED:
                failed.append(
                    f"{verdict.kind}: {verdict.reason[:300]}\n{program}"
                    f"shrink it: scripts/fuzz --programs 1 --seed {seed} --mode {mode}"
                )
    assert passed > tried * FLOOR, f"{passed} of {tried} runs passed; the others were refused, or not counted"
    return failed


@pytest.mark.parametrize("shard", [pytest.param(n, marks=[pytest.mark.slow] * (n >= QUICK)) for n in range(SHARDS)])
@pytest.mark.slow
@pytest.mark.every(5)
def test_programs_equal_eager(shard: int) -> None:
    failures = _failures(range(shard * FAST, (shard + 1) * FAST))
    assert not failures, "\n\n".join(failures)


@pytest.mark.every(5)
@pytest.mark.slow
@pytest.mark.skipif(not FRESH_FROM, reason="programs nobody has run yet: scripts/test gives them a FUZZ_SEED")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs_of_fresh_seeds_equal_eager(shard: int) -> None:
    """Other programs for each commit; a failure names its seed, and FUZZ_SEED repeats the run."""
    failures = _failures(range(FRESH_FROM + shard * FRESH, FRESH_FROM + (shard + 1) * FRESH))
    assert not failures, "\n\n".join([f"FUZZ_SEED={FRESH_FROM}", *failures])


@pytest.mark.slow
@pytest.mark.every(12)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_more_programs_equal_eager(shard: int) -> None:
    begin = SHARDS * FAST
    failures = _failures(range(begin + shard * SLOW, begin + (shard + 1) * SLOW))
    assert not failures, "\n\n".join(failures)


@pytest.mark.every(5)
@pytest.mark.parametrize("seed", range(CALLED))
def test_other_calls_equal_eager(seed: int) -> None:
    """A captured program is called otherwise than it was captured; each call equals eager, or is refused."""
    mode = ("calls/mutations", "calls/views")[seed % 2]
    verdict = check(generate(seed), mode)
    assert verdict.status != FAILED, f"{verdict.kind}: {verdict.reason}\n{generate(seed)}"


def test_some_other_calls_are_equal_and_some_are_refused() -> None:
    verdict = check(generate(3), "calls/views")
    assert verdict.equal and verdict.refused


def test_programs_are_functions_of_their_seed() -> None:
    assert [str(generate(seed)) for seed in range(20)] == [str(generate(seed)) for seed in range(20)]


def test_what_torch_makes_no_complex_number_of_is_not_counted() -> None:
    """``x + y.item()`` of complex ``x``, whose sizes are known: plain make_fx raises of it, written in place or not."""
    assert check(generate(818135837), "symbolic/views").status == NOT_COUNTED


def test_program_prints_what_it_runs() -> None:
    program, scope = generate(3), dict[str, object]()
    exec(str(program), scope)
    assert "f" in scope and "arguments" in scope


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_check_finds_a_wrong_transform(mode: str) -> None:
    def wrong(function: object, *, remove: str) -> object:
        return lambda *inputs: inputs[0] + 100

    statuses = {check(generate(seed), mode, wrong).status for seed in range(5)}
    assert FAILED in statuses


def test_shrinks_to_what_matters() -> None:
    program = generate(11)
    program = Program(program.storages, program.inputs, (*program.steps, Step("x0.zero_()")), program.outputs)
    small = shrink(program, lambda candidate: "x0.zero_()" in str(candidate))
    assert [step.source for step in small.steps] == ["x0.zero_()"]
    assert len(small.inputs) == 1


@pytest.mark.parametrize(
    ("source", "is_apart"),
    [
        ("torch._foreach_add_([x0], [x0])", True),
        ("torch._foreach_add_([x0], [v0])", False),  # an entry reads what it has written, or not yet
        ("torch._foreach_add_([x0, v1], [v1, x0])", True),
    ],
)
def test_what_an_entry_of_foreach_reads_it_writes_in_place_or_not_at_all(source: str, is_apart: bool) -> None:
    x = torch.arange(4.0).view(2, 2)
    assert apart(Step(source), {"x0": x, "v0": x.t(), "v1": x.clone()}) is is_apart


def test_bits_of_a_nan_are_not_read_as_other_numbers() -> None:
    x = torch.full((2,), float("nan"))
    step = Step("x0.mul_(2)")
    assert bits_defined(step, {"x0": x})
    assert not bits_defined(step, {"x0": x, "v0": x.view(torch.int32)})
    assert bits_defined(step, {"x0": torch.ones(2), "v0": x.view(torch.int32)})
