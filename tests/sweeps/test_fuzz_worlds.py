"""The fuzzer of Python worlds: it is a function of its seeds, and finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from functionalize import capture
from tests.sweeps.fuzz.verdict import FAILED, PASSED, REFUSED
from tests.sweeps.fuzz.worlds.check import check_world
from tests.sweeps.fuzz.worlds.generate import generate, shrink
from tests.sweeps.fuzz.worlds.program import FORMS, Line, World
from tests.sweeps.fuzz.worlds.rows import STATEMENTS

LIST = Line("l00 = [torch.ones(3)]", "list")
COUNTER = Line("n00 = 2", "number")
APPEND, COUNT, READ = Line("l00.append(y.detach())"), Line("n00 += 1"), Line("y = y * l00[0]")


def test_worlds_are_functions_of_their_seed() -> None:
    assert [str(generate(seed)) for seed in range(20)] == [str(generate(seed)) for seed in range(20)]


@pytest.mark.slow
def test_every_statement_is_met() -> None:
    met = {line.feature for seed in range(700) for line in generate(seed).steps}
    assert not {row.feature for row in STATEMENTS} - met


@pytest.mark.parametrize("form", FORMS)
def test_world_prints_what_it_runs(form: str) -> None:
    world = World(form, (LIST, COUNTER), (APPEND, COUNT), "y", ((), (COUNT,)))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(str(world), scope)
    assert len(scope["world"]()) == 3
    assert check_world(world).status in (PASSED, REFUSED)


def _drops_appends(program: Any, args: Any, **options: Any) -> Any:
    """Captures a program as of other lists than its own."""
    captured = capture(program, args, **options)
    items = next(c.cell_contents for c in program.__closure__ if isinstance(c.cell_contents, list))

    def call(*given: Any) -> Any:
        result = captured(*given)
        items.pop()
        return result

    return call


def _appends_at_once(program: Any, args: Any, **options: Any) -> Any:
    program(*args)
    return capture(program, args, **options)


@pytest.mark.parametrize(
    "wrong, kind", [(_drops_appends, "call 0 differs"), (_appends_at_once, "captured, with changes")]
)
def test_check_finds_what_is_wrong(wrong: Any, kind: str) -> None:
    world = World(FORMS[0], (LIST,), (APPEND,), "y", ((),))
    verdict = check_world(world, wrong)
    assert (verdict.status, verdict.kind) == (FAILED, kind)


def test_shrinks_to_what_matters() -> None:
    world = World(FORMS[1], (LIST, COUNTER), (READ, COUNT, APPEND), "(y, n00)", ((COUNT,), ()), "grad", True)
    small = shrink(world, lambda one: APPEND in one.steps)
    assert (small.declared, small.steps, small.changes) == ((LIST,), (APPEND,), ((),))
