"""One program of torch's operator database as a function of JAX arrays, beside eager.

Invariant: right means equal in shape, dtype and, up to rounding, in value; what is written is compared as well.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

from functionalize import UnsupportedProgramError, capture
from functionalize.backends.array_program import Written
from functionalize.backends.jax import from_torch
from tests.opinfo.cases import ALL_DTYPES, Case, op_table, samples
from tests.opinfo.programs import NoProgramError, Program, build

RIGHT, REFUSED, WRONG, SKIPPED = "right", "refused", "wrong", "skipped"
# Of these torch leaves open what the elements are, or which of equal elements is the one.
UNSPECIFIED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"}
TIES = {"topk": 1, "kthvalue": 1, "msort": 1}  # from which result on
PHASES = {"linalg.eigh", "linalg.eig"}  # a vector times a number of size one is one as well
COARSE = {"grid_sampler_2d"}  # eager's kernels with 16 bits are further off than the limit: beside those with 32
# What draws is seeded by the database, which is no part of what is exported.
UNSEEDED = mock.patch.object(
    common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs)
)
ORDERS = {"sort", "argsort"}  # of equal elements any order is right, unless it is to be stable
_SHORT = (torch.float16, torch.bfloat16)
_TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.complex64: 2e-5}


@dataclass(frozen=True)
class Outcome:
    """What became of one case, and why."""

    kind: str
    why: str = ""


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
    inputs = [value.clone() for value in program.inputs]
    torch.manual_seed(0)
    try:
        expected = program.run(*inputs) if case.op not in COARSE else _in_32_bits(program.run, inputs)
    except Exception as error:
        return Outcome(SKIPPED, f"eager raises {type(error).__name__}")
    return program, expected, inputs


def _in_32_bits(run: Any, inputs: list[torch.Tensor]) -> Any:
    found = run(*(value.float() if value.dtype in _SHORT else value for value in inputs))
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(inputs[0].dtype), found)


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
        return Outcome(*alike(expected, outputs, values=False))
    if name in TIES:
        expected, outputs = expected[: TIES[name]], outputs[: TIES[name]]
    if name in PHASES:
        expected, outputs = (expected[0], expected[1].abs()), (outputs[0], np.abs(outputs[1]))
    if name in ORDERS and orders_alike(arguments[0], expected, outputs):
        outputs = pytree.tree_map_only(torch.Tensor, from_torch, expected)
    found = alike(expected, outputs)
    pairs = [(one, written.get(name, from_torch(old))) for name, one, old in zip(names, after, arguments, strict=True)]
    return Outcome(*next((pair for one in pairs if (pair := alike(*one))[0] == WRONG), found))


def alike(expected: Any, actual: Any, *, values: bool = True) -> tuple[str, str]:
    one = [leaf for leaf in pytree.tree_leaves(expected) if leaf is not None]
    two = [leaf for leaf in pytree.tree_leaves(actual) if leaf is not None]
    if len(one) != len(two):
        return WRONG, f"{len(two)} results for {len(one)}"
    for wanted, array in zip(one, two, strict=True):
        if not isinstance(wanted, torch.Tensor):
            if values and not np.allclose(wanted, array, equal_nan=True):
                return WRONG, f"{array} for {wanted}"
            continue
        found = _difference(wanted, np.asarray(array), values)
        if found:
            return WRONG, found
    return RIGHT, ""


def orders_alike(values: torch.Tensor, expected: Any, outputs: Any) -> bool:
    """Whether both orders put the same values into each place, along some dimension."""
    wanted, found = (pytree.tree_leaves(one)[-1] for one in (expected, outputs))
    one, two = torch.from_numpy(np.asarray(wanted)), torch.from_numpy(np.array(found))

    def alike_along(dim: int) -> bool:
        if not torch.equal(one.sort(dim)[0], two.sort(dim)[0]):
            return False
        return torch.equal(values.gather(dim, one).nan_to_num(), values.gather(dim, two).nan_to_num())

    return any(map(alike_along, range(values.dim())))


def _difference(wanted: torch.Tensor, array: Any, values: bool) -> str:
    reference = np.asarray(from_torch(wanted))
    if reference.shape != array.shape or reference.dtype != array.dtype:
        return f"{array.dtype}{array.shape} for {reference.dtype}{reference.shape}"
    if not values or not reference.size:
        return ""
    wide = np.complex128 if wanted.is_complex() else np.float64
    if not (wanted.is_complex() or wanted.is_floating_point()):
        return "" if np.array_equal(reference, array) else f"integers differ: {array} for {reference}"[:200]
    one, two = reference.astype(wide), array.astype(wide)
    limit = _TOLERANCE.get(wanted.dtype, 1e-9)
    scale = float(np.abs(one[np.isfinite(one)]).max(initial=1))
    if np.allclose(one, two, rtol=max(limit * 10, 1e-7), atol=limit * scale, equal_nan=True):
        return ""
    return f"differs by {np.nanmax(np.abs(one - two)):.2e}"


def reason(error: Exception) -> str:
    lines = [line.strip()[5:] for line in str(error).splitlines() if line.strip().startswith("why  ")]
    return lines[0] if lines else str(error).splitlines()[0]


def cases_of(name: str, dtypes: list[str], count: int) -> list[Case]:
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
