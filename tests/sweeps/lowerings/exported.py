"""One program of torch's operator database as a file or a program of torch's, run there, beside eager.

Invariant: right means equal in shape, dtype and, up to rounding, in value; what is written is compared as well. Limits:
what ONNX Runtime has no kernel for counts as refused, when the file is loaded.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from functionalize import UnsupportedExportError, capture
from functionalize.verify.observation import clone_inputs
from tests.support.ledger import REFUSED
from tests.support.routes import Route
from tests.sweeps.lowerings.check import ORDERS, TIES, UNSEEDED, UNSPECIFIED, in_eager, orders_alike, reason
from tests.sweeps.lowerings.closeness import Outcome, alike
from tests.sweeps.opinfo.cases import Case
from tests.sweeps.opinfo.programs import Program


def checker(route: Route) -> Callable[[Case], Outcome]:
    """What runs a case by a route and by eager."""

    def check(case: Case) -> Outcome:
        begun = in_eager(case)
        return begun if isinstance(begun, Outcome) else held_to_eager(case, *begun, route)

    return check


def held_to_eager(case: Case, program: Program, expected: Any, after: list[torch.Tensor], route: Route) -> Outcome:
    """A program by a route beside what eager gave. ``after``: the inputs as eager left them."""
    try:
        with UNSEEDED:
            captured = capture(program.run, tuple(program.inputs))
    except Exception as error:  # the database has operators that no fake tensor goes through
        return Outcome(REFUSED, f"capture: {reason(error)}")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        try:
            run = route(captured, Path(folder))
        except UnsupportedExportError as error:
            return Outcome(REFUSED, reason(error, error.causes[0]))
        given = list(clone_inputs(program.inputs))
        found = run(*given)
    drawn = any("rand" in str(node.target) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
                for node in captured.graph_module.graph.nodes)  # fmt: skip
    if case.op in ORDERS and orders_alike(program.inputs[0], expected, found):
        found = expected
    if case.op in TIES:
        expected, found = expected[: TIES[case.op]], found[: TIES[case.op]]
    return alike([expected, after], [found, given], values=not drawn and case.op not in UNSPECIFIED)
