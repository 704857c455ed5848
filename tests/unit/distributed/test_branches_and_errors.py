"""Random programs whose ranks take different branches and catch different errors: they communicate as in eager."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support.ranks import Ranks
from tests.sweeps.fuzz.collectives import program


def wrong(world: int, seeds: Iterable[int]) -> list[tuple[int, str]]:
    """The seeds whose programs are neither right nor refused."""
    ranks = Ranks(world)
    try:
        outcomes = ((seed, outcome) for seed in seeds for outcome in ranks.outcomes(program(seed)))
        return [(seed, outcome.message) for seed, outcome in outcomes if outcome.verdict not in ("right", "refused")]
    finally:
        ranks.end()


@pytest.mark.slow
def test_a_few_random_programs_communicate_as_often_as_in_eager() -> None:
    assert wrong(2, [0, 6, 21, 194]) == []


@pytest.mark.full
def test_a_thousand_random_programs_communicate_as_often_as_in_eager() -> None:
    assert wrong(2, range(1000)) == []
