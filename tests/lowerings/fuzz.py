"""The fuzzer's programs on jitted JAX, beside eager: writes through views of views, aliased inputs, outputs that alias.

``python -m tests.lowerings.fuzz --count 500`` prints what differs, and how many were refused and why. By ``--to`` they
are exported, and called three times: ``onnx``, or what torch runs (``module``, ``core_aten``, ``run_decompositions``).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functionalize import UnsupportedExportError, UnsupportedProgramError, capture, jaxify
from functionalize.backends.array_program import Written
from functionalize.backends.jax import from_torch
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.ledger import REFUSED, RIGHT, SKIPPED, WRONG
from tests.lowerings import exported
from tests.lowerings.check import close, compared
from tests.lowerings.closeness import Outcome, alike


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
        return Outcome(REFUSED, str(error).splitlines()[0][:100])
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
            run = exported.ROUTES[to](capture(function, tuple(program.arguments())), Path(folder))
        except UnsupportedExportError as error:
            return [Outcome(REFUSED, error.causes[0].splitlines()[0])]
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--to", choices=["jax", *exported.ROUTES], default="jax")
    options = parser.parse_args(arguments)
    kinds, whys = Counter[str](), Counter[str]()
    for seed in range(options.first, options.first + options.count):
        program = generate(seed)
        for outcome in check(program) if options.to == "jax" else check_exported(program, options.to):
            kinds[outcome.kind] += 1
            whys[outcome.why[:90]] += outcome.kind == REFUSED
            if outcome.kind == WRONG:
                print(f"seed {seed}: {outcome.why}\n{program}", flush=True)
    print(dict(kinds))
    print(*(f"  {count} {why}" for why, count in whys.most_common(12) if count), sep="\n")
    return int(kinds[WRONG] > 0 or not kinds[RIGHT])


if __name__ == "__main__":
    sys.exit(main())
