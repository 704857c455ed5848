"""The fuzzer's programs on jitted JAX, beside eager: writes through views of views, aliased inputs, outputs that alias.

``python -m tests.lowerings.fuzz --count 500`` prints what differs, and how many were refused and why.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter

import torch

from functionalize import UnsupportedProgramError, jaxify
from functionalize.backends.array_program import Written
from functionalize.backends.jax import from_torch
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.lowerings.check import REFUSED, RIGHT, SKIPPED, WRONG, Outcome, alike, compared


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
    return Outcome(*alike([expected, *own], [outputs, *left]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    kinds, whys = Counter[str](), Counter[str]()
    for seed in range(options.first, options.first + options.count):
        program = generate(seed)
        for outcome in check(program):
            kinds[outcome.kind] += 1
            whys[outcome.why[:90]] += outcome.kind == REFUSED
            if outcome.kind == WRONG:
                print(f"seed {seed}: {outcome.why}\n{program}", flush=True)
    print(dict(kinds))
    print(*(f"  {count} {why}" for why, count in whys.most_common(12) if count), sep="\n")
    return int(kinds[WRONG] > 0 or not kinds[RIGHT])


if __name__ == "__main__":
    sys.exit(main())
