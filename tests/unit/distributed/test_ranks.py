"""Programs that communicate on real ranks: captured, traced and compiled they do what eager does, as often as eager."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.support.communicating import BRANCHING, PROGRAMS, REFUSED, RIGHT
from tests.support.ranks import Ranks
from tests.sweeps.fuzz.collectives import program


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_captured_program_does_what_eager_does_on_each_rank(pair: Ranks, name: str) -> None:
    for outcome in pair.outcomes(PROGRAMS[name]):
        assert outcome.verdict == "right", outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RIGHT if name not in BRANCHING])
def test_a_traced_program_does_what_eager_does_on_each_rank(pair: Ranks, name: str) -> None:
    for outcome in pair.outcomes(PROGRAMS[name], "make_fx"):
        assert outcome.verdict == "right", outcome.message


# Dynamo itself gathers numbers into tensors of one element, and issues coalesced collectives one by one.
_OTHERWISE_BY_DYNAMO = ("all_gather_of_numbers", "coalescing")


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in RIGHT if name not in _OTHERWISE_BY_DYNAMO])
def test_a_compiled_program_does_what_eager_does_on_each_rank(pair: Ranks, name: str) -> None:
    for outcome in pair.outcomes(PROGRAMS[name], "dynamo"):
        assert outcome.verdict == "right", outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_program_without_a_functional_form_is_refused_on_each_rank(pair: Ranks, name: str) -> None:
    for outcome in pair.outcomes(PROGRAMS[name]):
        assert outcome.verdict == "refused", outcome.message


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_a_captured_program_does_what_eager_does_on_four_ranks(four: Ranks, name: str) -> None:
    for outcome in four.outcomes(PROGRAMS[name]):
        assert outcome.verdict == "right", outcome.message


@pytest.mark.slow
def test_random_programs_communicate_as_often_as_in_eager(pair: Ranks) -> None:
    assert _finds(pair, [0, 6, 21, 194]) == []


@pytest.mark.full
def test_a_thousand_random_programs_communicate_as_often_as_in_eager(pair: Ranks) -> None:
    assert _finds(pair, range(1000)) == []


def _finds(ranks: Ranks, seeds: Iterable[int]) -> list[tuple[int, str]]:
    """The seeds whose programs are neither right nor refused."""
    outcomes = ((seed, outcome) for seed in seeds for outcome in ranks.outcomes(program(seed)))
    return [(seed, outcome.message) for seed, outcome in outcomes if outcome.verdict not in ("right", "refused")]
