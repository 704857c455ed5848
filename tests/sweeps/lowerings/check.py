"""One program of torch's operator database as a function of JAX arrays, beside eager.

Invariant: right means equal in shape, dtype and, up to rounding, in value; what is written is compared as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

from functionalize import UnsupportedProgramError, capture
from functionalize.backends.arrays.program import Written
from functionalize.backends.jax import from_torch, to_torch
from functionalize.backends.jax.values import is_array
from functionalize.verify.observation import clone_inputs
from tests.support.ledger import REFUSED, SKIPPED
from tests.sweeps.lowerings.closeness import Outcome, alike
from tests.sweeps.opinfo.cases import ALL_DTYPES, Case, op_table, samples
from tests.sweeps.opinfo.programs import NoProgramError, Program, build

# Of these torch leaves open what the elements are, or which of equal elements is the one.
UNSPECIFIED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"}
TIES = {"topk": 1, "kthvalue": 1, "msort": 1}  # from which result on
PHASES = {"linalg.eigh", "linalg.eig"}  # a vector times a number of size one is one as well
# What draws is seeded by the database, which is no part of what is exported.
UNSEEDED = mock.patch.object(
    common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs)
)
ORDERS = {"sort", "argsort"}  # of equal elements any order is right, unless it is to be stable


def check(case: Case) -> Outcome:
    """Run one case by jitted JAX and by eager."""
    begun = in_eager(case)
    if isinstance(begun, Outcome):
        return begun
    program, expected, after = begun
    return compared(program.run, program.inputs, expected, after, case.op)


def in_eager(case: Case) -> Outcome | tuple[Program, Any, list[torch.Tensor]]:
    """A case as a program, what eager gives, and the inputs as eager leaves them; or why it is skipped."""
    try:
        program = build(case)
    except NoProgramError as error:
        return Outcome(SKIPPED, str(error))
    inputs = list(clone_inputs(program.inputs))
    torch.manual_seed(0)
    try:
        expected = program.run(*inputs)
    except Exception as error:
        return Outcome(SKIPPED, f"eager raises {type(error).__name__}")
    return program, expected, inputs


def compared(function: Any, arguments: Any, expected: Any, after: Any, name: str = "") -> Outcome:
    """A function on JAX beside what eager gave. ``after``: the arguments as eager left them."""
    try:
        with UNSEEDED:
            captured = capture(function, tuple(arguments), on_data="raise")
    except Exception as error:  # the database has operators that no fake tensor goes through
        return Outcome(REFUSED, f"capture: {reason(error)}")
    try:
        program = captured.to_jax()
        state, outputs = program.jit(donate=False)(program.initial_state, *map(from_torch, arguments))
    except UnsupportedProgramError as error:
        return Outcome(REFUSED, reason(error))
    names = captured.specialization.capture.convention.names
    written = outputs.arguments if isinstance(outputs, Written) else {}
    outputs = outputs.returned if isinstance(outputs, Written) else outputs
    if "random_key" in state or name in UNSPECIFIED:
        return close(expected, outputs, values=False)
    if name in TIES:
        expected, outputs = expected[: TIES[name]], outputs[: TIES[name]]
    if name in PHASES:
        expected, outputs = (expected[0], expected[1].abs()), (outputs[0], np.abs(outputs[1]))
    if name in ORDERS and orders_alike(arguments[0], expected, outputs):
        outputs = pytree.tree_map_only(torch.Tensor, from_torch, expected)
    left = [written.get(name, from_torch(old)) for name, old in zip(names, arguments, strict=True)]
    return close([expected, after], [outputs, left])


def close(expected: Any, found: Any, *, values: bool = True) -> Outcome:
    """JAX's arrays beside eager's tensors."""
    tensors = pytree.tree_map_only(is_array, to_torch, found)
    return alike(expected, tensors, values=values, as_given=lambda wanted: to_torch(from_torch(wanted)))


def orders_alike(values: torch.Tensor, expected: Any, outputs: Any) -> bool:
    """Whether both orders put the same values into each place, along some dimension."""
    wanted, found = (pytree.tree_leaves(one)[-1] for one in (expected, outputs))
    one, two = torch.from_numpy(np.asarray(wanted)), torch.from_numpy(np.array(found))

    def alike_along(dim: int) -> bool:
        if not torch.equal(one.sort(dim)[0], two.sort(dim)[0]):
            return False
        return torch.equal(values.gather(dim, one).nan_to_num(), values.gather(dim, two).nan_to_num())

    return any(map(alike_along, range(values.dim())))


def reason(error: Exception, text: str = "") -> str:
    """What was refused, and why, of an error or of one of its causes; without the line, which is that of a template."""
    lines = [line.strip() for line in (text or str(error) or "no message").strip().splitlines()]
    why = next((line.removeprefix("why  ") for line in lines if line.startswith("why  ")), "")
    return "; ".join(part for part in (lines[0], why) if part)


def cases_of(name: str, dtypes: Iterable[str], count: int) -> list[Case]:
    """The first samples of an operator, in each dtype that it has."""
    supported = op_table()[name].supported_dtypes("cpu")
    found = []
    for dtype in dtypes:
        if ALL_DTYPES[dtype] in supported:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                there = len(samples(name, dtype, count))
            found += [Case(name, "call", dtype, number, "capture", "views") for number in range(there)]
    return found
