"""A captured program of a world held against eager on a twin world, call by call.

Each call must leave results and the whole world as eager does, or be refused by an error of this package with nothing
changed; a capture, those that calls make too, changes nothing, not an object, a byte or a version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functionalize import capture
from functionalize.errors import DataDependentError, InputMismatchError, UnsupportedProgramError
from tests.sweeps.fuzz.verdict import FAILED, NOT_COUNTED, PASSED, REFUSED, Verdict, line_of, refusal
from tests.sweeps.fuzz.worlds.program import World
from tests.sweeps.fuzz.worlds.running import Running, runs
from tests.sweeps.fuzz.worlds.snapshot import Snapshot

REFUSALS = (InputMismatchError, UnsupportedProgramError, DataDependentError)


def check_world(world: World, implementation: Callable[..., Any] = capture) -> Verdict:
    """The verdict on a world; ``implementation`` captures."""
    if not runs(world):
        return Verdict(NOT_COUNTED, "eager raises")
    eager, actual = Running(world), Running(world)
    with actual.active():
        before = actual.snapshot()
        try:
            captured = implementation(actual.program, (actual.argument(0),), on_guard_failure=world.again)
        except REFUSALS as error:
            return _unchanged(before, actual, "refused") or refusal(error)
        except Exception as error:
            return _unchanged(before, actual, "raises") or Verdict(FAILED, "the capture raises", line_of(error))
        changed = _unchanged(before, actual, "captured")
    if changed is not None:
        return changed
    return _calls(world, eager, actual, captured)


def _calls(world: World, eager: Running, actual: Running, captured: Callable[..., Any]) -> Verdict:
    for number in range(world.calls):
        with actual.active():
            actual.change(number)
            before, given = actual.snapshot(), len(actual.results)
            try:
                actual.call(number, captured)
            except REFUSALS as error:
                if len(actual.results) > given:
                    return _refused(number, error)  # a backward that the caller asked for, once the call had ended
                return _unchanged(before, actual, "call refused") or _refused(number, error)
            except Exception as error:
                if "\n    why  " in str(error):
                    return _refused(number, error)  # a backward that the caller asked for
                return Verdict(FAILED, f"call {min(number, 1)} raises", line_of(error))
            after = actual.snapshot(before.versions())
        wanted = _eager(eager, number)
        found = list(wanted.differences(after))
        if after.fakes:
            found.insert(0, f"{after.fakes[0]} is fake")
        if found:
            return Verdict(FAILED, f"call {min(number, 1)} differs", "; ".join(found[:3]))
    return Verdict(PASSED)


def _refused(number: int, error: Exception) -> Verdict:
    where = "at a later call" if number else "at the first call"
    return Verdict(REFUSED, "refused", f"{where}: {refusal(error).reason}")


def _eager(eager: Running, number: int) -> Snapshot:
    with eager.active():
        eager.change(number)
        before = eager.snapshot()
        eager.call(number, eager.program)
        return eager.snapshot(before.versions())


def _unchanged(before: Snapshot, world: Running, when: str) -> Verdict | None:
    """A verdict on a world that was changed where nobody may do so."""
    after = world.snapshot()
    if after.fakes and not before.fakes:
        return Verdict(FAILED, f"{when}, with a fake tensor left", after.fakes[0])
    found = list(before.changes(after))
    return Verdict(FAILED, f"{when}, with changes", found[0]) if found else None
