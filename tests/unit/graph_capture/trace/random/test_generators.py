"""torch's generators of random numbers in captured programs: those that a program makes, and what it does to others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functionalize import capture
from functionalize.errors import UnsupportedProgramError

GENERATOR = torch.Generator()
Program = Callable[[Tensor], Any]


def noise(x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(3)
    first = torch.rand(3, generator=generator)
    return x * first + torch.randn(3, generator=generator) + torch.randn(3)


def two(x: Tensor) -> Any:
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    drawn = torch.rand(3, generator=first), torch.rand(3, generator=second), torch.rand(3, generator=first)
    return x * drawn[0], drawn


def deciding(x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(5)
    while torch.rand((), generator=generator) < 0.9:
        x = x * 2
    return x + torch.rand(3, generator=generator)


def unseeded(x: Tensor) -> Any:
    return x + torch.empty(3).normal_(generator=torch.Generator())


@pytest.mark.parametrize("program", [noise, two, deciding, unseeded])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_generators_that_a_program_makes_are_made_by_each_call(program: Program, requires_grad: bool) -> None:
    x = torch.ones(3, requires_grad=requires_grad)
    torch.manual_seed(0)
    captured = capture(program, (x,))

    def results(run: Program) -> list[Any]:
        torch.manual_seed(0)
        found = [run(x) for _ in range(3)]
        firsts = [one[0] if isinstance(one, tuple) else one for one in found]
        return [found, [torch.autograd.grad(one.sum(), x) for one in firsts if requires_grad]]

    found, wanted = results(captured), results(program)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(captured.variants) == 1


def seeds_when_it_has_drawn(x: Tensor) -> Any:
    y = x + torch.rand(3)
    torch.manual_seed(0)
    return y + torch.rand(3)


def seeds_by_chance(x: Tensor) -> Any:
    torch.seed()
    return x + torch.rand(3)


def seeds_its_own(x: Tensor) -> Any:
    GENERATOR.manual_seed(0)
    return x + torch.rand(3, generator=GENERATOR)


def seeds_and_draws_nothing(x: Tensor) -> Any:
    GENERATOR.manual_seed(0)
    return x + 1


def forks(x: Tensor) -> Any:
    with torch.random.fork_rng():
        y = x + torch.rand(3)
    return y + torch.rand(3)


def puts_back(x: Tensor) -> Any:
    state = GENERATOR.get_state()
    y = x + torch.rand(3, generator=GENERATOR)
    GENERATOR.set_state(state)
    return y


def reads(x: Tensor) -> Any:
    return x + torch.rand(3), torch.get_rng_state()


def clones(x: Tensor) -> Any:
    return x + torch.rand(3, generator=GENERATOR.clone_state())


def asks_for_the_seed(x: Tensor) -> Any:
    return x + torch.initial_seed()


def seeds(x: Tensor) -> Any:
    torch.manual_seed(3)
    torch.manual_seed(4)
    return F.dropout(x)


def seeds_alone(x: Tensor) -> Any:
    torch.manual_seed(4)
    return x * 2


def seeds_in_a_fork(x: Tensor) -> Any:
    with torch.random.fork_rng():
        noise = torch.rand(3, generator=torch.manual_seed(4))
    return x * noise


def draws_in_a_fork(x: Tensor) -> Any:
    with torch.random.fork_rng():
        return x * torch.rand(3)


def seeds_by_the_data(x: Tensor) -> Any:
    torch.manual_seed(int(x[0]))
    return x + torch.rand(3)


SEEDED = r"(?s)the program (seeds|sets the state of|draws from) .*torch.*try  seed before"
READ = r"(?s)the program reads the state of a torch generator.*try  read it before"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (seeds_when_it_has_drawn, SEEDED),
        (seeds, SEEDED),
        (seeds_alone, SEEDED),
        (seeds_in_a_fork, SEEDED),
        (draws_in_a_fork, SEEDED),
        (seeds_by_the_data, SEEDED),
        (seeds_by_chance, SEEDED),
        (seeds_its_own, SEEDED),
        (seeds_and_draws_nothing, SEEDED),
        (forks, SEEDED),
        (puts_back, SEEDED),
        (reads, READ),
        (clones, READ),
        (asks_for_the_seed, r"(?s)the program reads the seed.*try  pass the seed"),
    ],
)
def test_states_that_a_program_sets_or_reads_are_refused(program: Program, message: str) -> None:
    torch.manual_seed(0)  # as the programs do: the state is the same before and after
    GENERATOR.manual_seed(0)
    before = torch.get_rng_state(), GENERATOR.get_state()
    with pytest.raises(UnsupportedProgramError, match=message):
        capture(program, (torch.ones(3),))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(GENERATOR.get_state(), before[1])


def draws_of_its_own(x: Tensor) -> Any:
    """The way out that the refusal names."""
    return x + torch.rand(3, generator=torch.Generator().manual_seed(4))


def forks_and_draws_nothing(x: Tensor) -> Any:
    with torch.random.fork_rng():
        y = x * 2
    return y + torch.rand(3)


@pytest.mark.parametrize("func", [draws_of_its_own, forks_and_draws_nothing])
def test_what_leaves_the_state_as_it_is(func: Program) -> None:
    program = capture(func, (torch.ones(3),))
    torch.manual_seed(2)
    results = [program(torch.ones(3)) for _ in range(2)]
    torch.manual_seed(2)
    assert all(torch.equal(result, func(torch.ones(3))) for result in results)


def test_a_generator_that_is_kept_where_nobody_looks_is_refused() -> None:
    kept = threading.local()
    kept.generator = torch.Generator()

    def program(x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=kept.generator)

    with pytest.raises(UnsupportedProgramError, match="from a generator that is not part of its state"):
        capture(program, (torch.ones(3),))
