"""`python -m tests.sweeps.zoo.deferred`: each model type of transformers, deferred and made real, beside eager; counts.

Invariant: a model counts as right where it is eager's bit for bit: whole, and part by part. Limits: small sizes; what
eager does not construct is left out.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from tests.support.deferred import check
from tests.sweeps.zoo.from_transformers import constructors, names

EAGER, RIGHT, WRONG = "not constructed by eager", "right", "wrong"


def verdict(name: str) -> tuple[str, str]:
    """Whether the model of a type is right, and what is wrong with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make = next(constructors(name))
        except Exception as error:  # settings that it does not take, or a library that is not here
            return EAGER, str(error)
        try:
            check(make)
        except Exception as error:  # whatever it is, it is wrong
            return WRONG, f"{type(error).__name__}: {error}"
    return RIGHT, ""


def sweep(chosen: Sequence[str]) -> tuple[Counter[str], dict[str, str]]:
    """How many models there are of each verdict, and what is wrong with those that are."""
    counts: Counter[str] = Counter()
    wrong = {}
    for name in chosen:
        found, why = verdict(name)
        counts[found] += 1
        if found == WRONG:
            wrong[name] = why
    return counts, wrong


def main() -> int:
    """Run the sweep over the types that are named, or over all of them; 0 if none is wrong."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    counts, wrong = sweep(sys.argv[1:] or names())
    for name, why in wrong.items():
        print(f"{name}: {why}")
    print(", ".join(f"{count} {found}" for found, count in counts.items()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
