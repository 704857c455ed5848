"""The cases of one operator on one route, held against the ledger of that route.

A result that is farther from eager's than `torch.testing.assert_close` allows is right where the ledger has a bound for
the operator and dtype. ``--write`` adds one by itself where the result is as near to what eager gives in double
precision as eager's own result is. Any other is mended, or its bound is added by hand with the reason; so is each bound
of gradients.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.support.ledger import RIGHT, WRONG, Bound, Ledger, Row
from tests.support.routes import BACKWARDS, GRADIENTS, JAX, RESULTS, Route
from tests.sweeps.lowerings import exported
from tests.sweeps.lowerings.check import cases_of, check
from tests.sweeps.lowerings.closeness import Miss, Outcome, times_off
from tests.sweeps.opinfo.cases import Case
from tests.sweeps.opinfo.programs import build

AS_NEAR = 4.0  # how many times eager's own distance from double precision a result may have, as in tests/sweeps/opinfo
Check = Callable[[Any], Outcome]


@dataclass(frozen=True)
class Table:
    """The operators of the database by one route: their results, the engine's gradients, or torch's backwards on it."""

    route: Route
    compares: str = RESULTS

    def check(self) -> Check:
        """What holds a case against eager."""
        if self.compares == BACKWARDS:
            from tests.sweeps.lowerings.backwards import checker

            return checker(self.route)
        if self.compares == GRADIENTS:
            from tests.sweeps.lowerings import gradients

            return gradients.check
        return check if self.route == JAX else exported.checker(self.route)

    def ledger(self) -> Ledger:
        """What may be refused, left out, or compared less strictly."""
        return Ledger(f"lowerings-{self.route.name}{self.compares}")


def rows(
    name: str, dtypes: Iterable[str], count: int, checked: Check, ledger: Ledger, *, write: bool = False
) -> Iterator[Row]:
    """What becomes of an operator's first samples in each dtype. ``write``: enter bounds into the ledger."""
    for case in cases_of(name, dtypes, count):
        outcome = safely(case, checked)
        kind, why = outcome.kind, outcome.why
        if outcome.miss is not None:
            why = f"{why}; {_enter(case, outcome.miss, ledger)}" if write else why
            kind = RIGHT if ledger.allows(name, case.dtype, outcome.miss.times) else WRONG
        yield Row(name, f"{case.dtype}/{case.sample}", kind, why)


def safely(case: Any, checked: Check = check) -> Outcome:
    """The outcome of a case; an error that is no refusal is wrong."""
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return checked(case)
        except Exception as error:
            return Outcome(WRONG, f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:150]}")


def _enter(case: Case, miss: Miss, ledger: Ledger) -> str:
    """Add a bound where eager itself is as far from double precision; the two distances in words."""
    exact = _in_double(case, miss)
    if exact is None:
        return "double precision gives no such result"
    eager, here = (times_off(exact, tensor, miss.wanted.dtype) for tensor in (miss.wanted, miss.actual))
    said = f"from double precision eager is {eager:.2g} limits off, this {here:.2g}"
    if here <= max(AS_NEAR * eager, 1.0) and not ledger.allows(case.op, case.dtype, miss.times):
        times = 2.0 ** math.ceil(math.log2(1.5 * miss.times))  # room for machines that add up in another order
        ledger.bounds[case.op, case.dtype] = Bound(times, said)
    return said


def _in_double(case: Case, miss: Miss) -> torch.Tensor | None:
    """The same result as eager gives it of the same numbers in double precision."""
    program = build(case)
    inputs = [_doubled(value.clone()) for value in program.inputs]
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = program.run(*inputs)
    except Exception:
        return None
    leaves = [leaf for leaf in pytree.tree_leaves([results, inputs]) if leaf is not None]
    found = _doubled(torch.as_tensor(leaves[miss.place])) if miss.place < len(leaves) else None
    return found if found is not None and found.shape == miss.wanted.shape else None


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
