"""`python -m tests.sweeps deferred`: each model type of transformers, deferred and made real, beside eager; counts.

Invariant: a model counts as right where it is eager's bit for bit: whole, and part by part. Limits: small sizes; what
eager does not construct is left out.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

from tests.support.deferred import check
from tests.sweeps.options import parser
from tests.sweeps.pool import Loss, Work, run_all, whole
from tests.sweeps.zoo.from_transformers import constructors, names

EAGER, RIGHT, WRONG = "not constructed by eager", "right", "wrong"
SECONDS = 600  # for one type


@dataclass(frozen=True)
class Verdict:
    """Whether the model of a type is right, and what is wrong with it."""

    name: str
    status: str
    reason: str = ""


def judged(name: str) -> Verdict:
    """Hold the model of a type against eager's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make = next(constructors(name))
        except Exception as error:  # settings that it does not take, or a library that is not here
            return Verdict(name, EAGER, str(error))
        try:
            check(make)
        except Exception as error:  # whatever it is, it is wrong
            return Verdict(name, WRONG, f"{type(error).__name__}: {error}")
    return Verdict(name, RIGHT)


def _lost(name: str, loss: Loss) -> Verdict:
    return Verdict(name, WRONG, loss.reason)


WORK: Work[str, str, Verdict] = Work(whole, judged, _lost, SECONDS)


def main(arguments: list[str]) -> int:
    """Run the sweep over the types that are named, or over all of them; 0 if none is wrong."""
    made = parser("deferred", __doc__)
    made.add_argument("types", nargs="*", help="default: all")
    options = made.parse_args(arguments)
    counts: Counter[str] = Counter()
    for verdict in run_all(WORK, options.types or names(), options.jobs):
        counts[verdict.status] += 1
        if verdict.status == WRONG:
            print(f"{verdict.name}: {verdict.reason}", flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(bool(counts[WRONG]))
