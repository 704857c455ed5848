"""Gradients that JAX takes of one program of torch's operator database, beside those of eager.

Invariant: right means equal up to rounding, for one random cotangent of each result. Limits: real arguments, results of
numbers with a point; operators that draw no random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from functionalize import UnsupportedProgramError, capture
from functionalize.backends.jax import from_torch
from functionalize.backends.jax.program import JaxProgram
from tests.support.ledger import REFUSED, SKIPPED
from tests.sweeps.lowerings.check import UNSEEDED, UNSPECIFIED, close, reason
from tests.sweeps.lowerings.closeness import Outcome
from tests.sweeps.opinfo.cases import Case
from tests.sweeps.opinfo.programs import NoProgramError, Program, build

OTHERWISE = {
    "as_strided_scatter",  # torch's formula gives the input the gradient of what was overwritten, and of the rest none
    "linalg.eigh",  # of vectors whose signs torch leaves open
    *(f"nn.functional.max_unpool{n}d" for n in (1, 2, 3)),  # places are written twice; JAX has a gradient for one
}


class Differentiated(NamedTuple):
    """What eager's gradients are of one program: of some arguments, from some results."""

    arguments: list[int]
    results: list[int]
    cotangents: list[torch.Tensor]
    gradients: Sequence[torch.Tensor]


def check(case: Case) -> Outcome:
    """Differentiate one case in eager and by JAX."""
    if case.op in UNSPECIFIED | OTHERWISE:
        return Outcome(
            SKIPPED, "its results are whatever memory holds, or its gradients others than those of its values"
        )
    try:
        program = build(case)
        expected = in_eager(program)
    except NoProgramError as error:
        return Outcome(SKIPPED, str(error))
    except Exception as error:
        return Outcome(SKIPPED, f"eager raises {type(error).__name__}")
    if expected is None:
        return Outcome(SKIPPED, "nothing has gradients, or they are random")
    with jax.enable_x64(True):
        try:
            with UNSEEDED:
                step = capture(
                    lambda *inputs: results_of(program, inputs), tuple(program.inputs), on_data="raise"
                ).to_jax()
        except Exception as error:  # the database has operators that no fake tensor goes through
            return Outcome(REFUSED, f"capture: {reason(error)}")
        try:
            return close(list(expected.gradients), by_jax(step, program, expected))
        except UnsupportedProgramError as error:
            return Outcome(REFUSED, reason(error))


def in_eager(program: Program) -> Differentiated | None:
    """Eager's gradients; None where there are none, or random numbers are drawn."""
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    places = [place for place, value in enumerate(program.inputs) if value.is_floating_point()]
    inputs = [value.clone().requires_grad_(place in places) for place, value in enumerate(program.inputs)]
    with UNSEEDED:
        results = results_of(program, inputs)
    flowing = [number for number, result in enumerate(results) if result.requires_grad]
    if not (flowing and places and torch.equal(before, torch.random.get_rng_state())):
        return None
    cotangents = [torch.randn(results[number].size(), dtype=results[number].dtype) for number in flowing]
    chosen, wanted = [results[number] for number in flowing], [inputs[place] for place in places]
    found = torch.autograd.grad(chosen, wanted, cotangents, allow_unused=True, materialize_grads=True)
    return Differentiated(places, flowing, cotangents, [one.clone() for one in found])  # zeros may have no memory


def by_jax(step: JaxProgram, program: Program, expected: Differentiated) -> list[Any]:
    """The gradients of the same arguments by JAX."""
    arrays = [from_torch(value) for value in program.inputs]

    def run(*chosen: Any) -> Any:
        given = dict(zip(expected.arguments, chosen, strict=True))
        outputs = step(step.initial_state, *(given.get(place, array) for place, array in enumerate(arrays)))[1]
        outputs = outputs.returned if hasattr(outputs, "returned") else outputs
        return [outputs[number] for number in expected.results]

    _, backward = jax.vjp(run, *(arrays[place] for place in expected.arguments))
    return [np.asarray(one) for one in backward([from_torch(one) for one in expected.cotangents])]


def results_of(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What it gives with gradients: complex numbers as pairs."""
    leaves = [leaf for leaf in pytree.tree_leaves(program.run(*inputs)) if isinstance(leaf, torch.Tensor)]
    real = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return [leaf for leaf in real if leaf.is_floating_point()]
