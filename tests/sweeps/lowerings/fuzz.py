"""The fuzzer's programs on jitted JAX, beside eager: writes through views of views, aliased inputs, outputs that alias.

``python -m tests.sweeps lowered-programs --count 500`` prints what differs, and how many were refused and why; it exits
with 1 where one is refused for a reason that tests/support/ledgers does not list. By ``--to`` they are exported, and
called three times: ``onnx``, or what torch runs (``module``, ``core_aten``, ``run_decompositions``).
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functionalize import UnsupportedExportError, UnsupportedProgramError, capture, jaxify
from functionalize.backends.arrays.program import Written
from functionalize.backends.jax import from_torch
from tests.support.ledger import REFUSED, RIGHT, SKIPPED, WIDTH, WRONG, Ledger, Row
from tests.support.routes import JAX, ROUTES, SWEPT
from tests.sweeps.fuzz.generate import generate
from tests.sweeps.fuzz.program import Program
from tests.sweeps.lowerings.check import close, compared, reason
from tests.sweeps.lowerings.closeness import Outcome, alike
from tests.sweeps.options import parser
from tests.sweeps.pool import Loss, Work, run_all, whole

SECONDS = 300  # for one program
_OF_ONE_PROGRAM = r"for one cause|for \d+ causes|'[^']*'|`[^`]*`|aten\.[\w.]+|\d+|\|"  # what a reason says besides


def check(program: Program) -> list[Outcome]:
    """One program, captured with inputs that alias as it wants them, and by ``jaxify`` with inputs of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = program.function()
        arguments, after = program.arguments(), program.arguments()
        try:
            with torch.no_grad():
                expected = function(*after)
        except Exception as error:
            return [Outcome(SKIPPED, type(error).__name__)]
        with torch.no_grad():
            return [compared(function, program.arguments(), expected, after), _jaxified(function, arguments)]


def _jaxified(function: object, arguments: list[torch.Tensor]) -> Outcome:
    own = [value.detach().clone(memory_format=torch.contiguous_format) for value in arguments]
    arrays = [from_torch(value) for value in own]
    try:
        expected = function(*own)  # type: ignore[operator]
    except Exception as error:
        return Outcome(SKIPPED, type(error).__name__)
    try:
        found = jaxify(function)(*arrays)  # type: ignore[arg-type]
    except (UnsupportedProgramError, RuntimeError) as error:
        return Outcome(REFUSED, reason(error))
    written = found.arguments if isinstance(found, Written) else {}
    outputs = found.returned if isinstance(found, Written) else found
    names = function.__code__.co_varnames  # type: ignore[attr-defined]
    left = [written.get(name, array) for name, array in zip(names, arrays, strict=False)]
    return close([expected, *own], [outputs, *left])


def check_exported(program: Program, to: str) -> list[Outcome]:
    """One program as a module of an ExportedProgram, or as an ONNX file: three calls, with arguments that alias so."""
    quiet = contextlib.redirect_stderr(io.StringIO())
    with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder, quiet:
        warnings.simplefilter("ignore")
        function = program.function()
        try:
            expected = [_called(function, program) for _ in range(3)]
        except Exception as error:
            return [Outcome(SKIPPED, type(error).__name__)]
        if alike(*expected[:2]).kind == WRONG:
            return [Outcome(SKIPPED, "it draws random numbers")]
        try:
            run = ROUTES[to](capture(function, tuple(program.arguments())), Path(folder))
        except UnsupportedExportError as error:
            return [Outcome(REFUSED, reason(error, error.causes[0]))]
        except (UnsupportedProgramError, ValueError) as error:  # the engine has no kernel
            return [Outcome(REFUSED, str(error).splitlines()[0])]
        return [alike(wanted, _called(run, program)) for wanted in expected]


def _called(function: Any, program: Program) -> list[Any]:
    """What a call gives, and its arguments afterwards; complex numbers by their parts."""
    arguments = program.arguments()
    leaves = pytree.tree_leaves([function(*arguments), arguments])
    return [_settled(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves if leaf is not None]


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """What is in a tensor now; complex numbers by their parts."""
    found = tensor.detach().resolve_conj().resolve_neg().clone()
    return torch.view_as_real(found) if found.is_complex() else found


@dataclass(frozen=True)
class Seed:
    """A program, and the route that it goes."""

    seed: int
    to: str


def _lost(seed: Seed, loss: Loss) -> list[Row]:
    return [Row(f"seed {seed.seed}", "program", WRONG, loss.reason)]


def main(arguments: list[str]) -> int:
    made = parser("lowered-programs", __doc__)
    made.add_argument("--count", type=int, default=100)
    made.add_argument("--first", type=int, default=0)
    made.add_argument("--to", choices=SWEPT, default=JAX.name)
    made.add_argument("--write", action="store_true", help="write the ledger")
    options = made.parse_args(arguments)
    ledger = Ledger(f"lowerings-fuzz-{options.to}")
    seeds = [Seed(seed, options.to) for seed in range(options.first, options.first + options.count)]
    found = [row for some in run_all(WORK, seeds, options.jobs) for row in some]
    selection = f"{options.count} programs from {options.first} on"
    if options.write:
        ledger.take(found, selection)
    print(dict(Counter(row.status for row in found)))
    print(*Counter(f"  {row.name}" for row in found if row.status == REFUSED).most_common(12), sep="\n")
    objections = ledger.objections(found, selection)
    print(*objections, sep="\n")
    return int(bool(objections))


def rows(seed: Seed) -> list[Row]:
    """What becomes of the program of a seed; by the reason, where it is refused or left out."""
    found = []
    program = generate(seed.seed)
    for outcome in check(program) if seed.to == JAX.name else check_exported(program, seed.to):
        right = outcome.kind in (RIGHT, WRONG)
        name = f"seed {seed.seed}" if right else re.sub(_OF_ONE_PROGRAM, "_", outcome.why)[:WIDTH].strip()
        why = f"{outcome.why}\n{program}" if outcome.kind == WRONG else f"as of seed {seed.seed}"
        found.append(Row(name, "program", outcome.kind, why))
    return found


WORK: Work[Seed, Seed, list[Row]] = Work(whole, rows, _lost, SECONDS)
