"""Programs that communicate on real ranks: captured, traced and compiled they do what eager does, as often as eager."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support.communicating import BRANCHING, PROGRAMS, REFUSED, RIGHT
from tests.support.experts import EXPERTS
from tests.support.ranks import assert_right, kept, refusals
from tests.sweeps.fuzz.collectives import program


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_captured_program_does_what_eager_does_on_each_rank(name: str) -> None:
    assert_right(PROGRAMS[name])


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name in RIGHT if name not in BRANCHING])
def test_a_traced_program_does_what_eager_does_on_each_rank(name: str) -> None:
    assert_right(PROGRAMS[name], system="make_fx")


# Dynamo itself gathers numbers into tensors of one element, and issues coalesced collectives one by one.
_OTHERWISE_BY_DYNAMO = ("all_gather_of_numbers", "coalescing")


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in RIGHT if name not in _OTHERWISE_BY_DYNAMO])
def test_a_compiled_program_does_what_eager_does_on_each_rank(name: str) -> None:
    assert_right(PROGRAMS[name], system="dynamo")


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("name", REFUSED)
def test_a_program_without_a_functional_form_is_refused_on_each_rank(name: str) -> None:
    refusals(PROGRAMS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_a_captured_program_does_what_eager_does_on_four_ranks(name: str) -> None:
    assert_right(PROGRAMS[name], 4)


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("name", EXPERTS)
def test_one_capture_serves_all_splits_that_data_decides(name: str) -> None:
    for outcome in kept(2).outcomes(EXPERTS[name]):
        assert outcome.verdict == "right", outcome.message
        assert outcome.variants == 1 or name == "skipping"


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_on_four_ranks_do_what_eager_does(name: str) -> None:
    assert_right(EXPERTS[name], 4)


@pytest.mark.slow
def test_random_programs_communicate_as_often_as_in_eager() -> None:
    assert _finds([6, 194]) == []


@pytest.mark.full
def test_a_thousand_random_programs_communicate_as_often_as_in_eager() -> None:
    assert _finds(range(1000)) == []


def _finds(seeds: Iterable[int]) -> list[tuple[int, str]]:
    """The seeds whose programs are neither right nor refused."""
    outcomes = ((seed, outcome) for seed in seeds for outcome in kept(2).outcomes(program(seed)))
    return [(seed, outcome.message) for seed, outcome in outcomes if outcome.verdict not in ("right", "refused")]
