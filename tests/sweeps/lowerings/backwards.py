"""Backwards that torch runs for one program of its operator database, exported or on JAX, beside eager.

The program takes the gradients itself, as a training step does: what is exported are torch's operators for them.

Invariant: right means equal up to rounding. Limits: real arguments, results of numbers with a point; operators that
draw no random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.ledger import SKIPPED
from tests.support.routes import JAX, Route
from tests.sweeps.lowerings.check import PHASES, UNSPECIFIED, compared
from tests.sweeps.lowerings.closeness import Outcome
from tests.sweeps.lowerings.exported import held_to_eager
from tests.sweeps.lowerings.gradients import Differentiated, in_eager, results_of
from tests.sweeps.opinfo.cases import Case
from tests.sweeps.opinfo.programs import NoProgramError, Program, build


def checker(route: Route) -> Callable[[Case], Outcome]:
    """What runs the backward of a case by a route, and by eager."""

    def check(case: Case) -> Outcome:
        if case.op in UNSPECIFIED | PHASES:
            return Outcome(SKIPPED, "its results are whatever memory holds, or have signs that torch leaves open")
        try:
            forward = build(case)
            found = in_eager(forward)
        except NoProgramError as error:
            return Outcome(SKIPPED, str(error))
        except Exception as error:
            return Outcome(SKIPPED, f"eager raises {type(error).__name__}")
        if found is None:
            return Outcome(SKIPPED, "nothing has gradients, or they are random")
        program = dataclasses.replace(forward, run=_backward(forward, found))
        expected, after = list(found.gradients), [value.clone() for value in program.inputs]
        if route == JAX:
            return compared(program.run, program.inputs, expected, after)
        return held_to_eager(dataclasses.replace(case, op=f"{case.op}, backwards"), program, expected, after, route)

    return check


def _backward(program: Program, found: Differentiated) -> Callable[..., Any]:
    def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        inputs = [value.detach().clone().requires_grad_(n in found.arguments) for n, value in enumerate(values)]
        results = results_of(program, inputs)
        chosen = [results[number] for number in found.results]
        wanted = [inputs[place] for place in found.arguments]
        options: Any = {"allow_unused": True, "materialize_grads": True}
        return [one.clone() for one in torch.autograd.grad(chosen, wanted, found.cotangents, **options)]

    return run
