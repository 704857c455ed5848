"""Whether what a route gives is eager's, and how far it is off.

Invariant: the limits are those of `torch.testing.assert_close` for the dtype, for each element by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils import _pytree as pytree

from tests.support.ledger import RIGHT, WRONG


@dataclass(frozen=True)
class Miss:
    """A result that is not eager's, up to rounding: its place among the results, and the two tensors."""

    place: int
    wanted: torch.Tensor
    actual: torch.Tensor

    @property
    def times(self) -> float:
        return times_off(self.wanted, self.actual)


@dataclass(frozen=True)
class Outcome:
    """What became of one case, and why; where it is wrong by rounding at most, the result that is the farthest off."""

    kind: str
    why: str = ""
    miss: Miss | None = None


def alike(
    expected: Any, found: Any, *, values: bool = True, as_given: Callable[[Any], Any] = torch.as_tensor
) -> Outcome:
    """Results beside those of eager. ``as_given``: gives eager's result the dtype that the route has for it."""
    pairs = [[leaf for leaf in pytree.tree_leaves(tree) if leaf is not None] for tree in (expected, found)]
    if len(pairs[0]) != len(pairs[1]):
        return Outcome(WRONG, f"{len(pairs[1])} results for {len(pairs[0])}")
    misses = []
    for place, (leaf, other) in enumerate(zip(*pairs, strict=True)):
        number = not isinstance(leaf, torch.Tensor)
        wanted, actual = torch.as_tensor(leaf) if number else as_given(leaf.detach()), torch.as_tensor(other).detach()
        actual = actual.to(wanted.dtype) if number else actual  # Python's numbers have one width
        if wanted.dtype != actual.dtype or wanted.shape != actual.shape:
            what = f"{actual.dtype}{list(actual.shape)} for {wanted.dtype}{list(wanted.shape)}"
            return Outcome(WRONG, f"result {place}: {what}")
        try:
            if values:
                torch.testing.assert_close(actual, wanted, equal_nan=True, check_stride=False)
        except AssertionError:
            misses.append(Miss(place, wanted, actual))
    if not misses:
        return Outcome(RIGHT)
    worst = max(misses, key=lambda miss: miss.times)
    return Outcome(WRONG, _words(worst), worst if math.isfinite(worst.times) else None)


def times_off(wanted: torch.Tensor, actual: torch.Tensor, dtype: torch.dtype | None = None) -> float:
    """How many times the limit of a dtype the element that is the farthest off is off; infinite where none may be."""
    dtype = dtype or wanted.dtype
    if wanted.layout is not torch.strided or not (dtype.is_floating_point or dtype.is_complex):
        return 0.0 if torch.equal(wanted, actual) else math.inf
    rtol, atol = default_tolerances(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    one, other = wanted.to(wide), actual.to(wide)
    plain = one.isfinite() & other.isfinite()
    torch_equal = torch.isclose(one, other, rtol=0, atol=0, equal_nan=True)
    if not bool((plain | torch_equal).all()):
        return math.inf
    distances = (one - other).abs() / (atol + rtol * one.abs())
    return float(distances[plain].max()) if bool(plain.any()) else 0.0


def _words(miss: Miss) -> str:
    some = miss.actual.flatten(), miss.wanted.flatten()
    different = torch.nonzero(~torch.isclose(*some, rtol=0, atol=0, equal_nan=True)).flatten()[:3]
    values = [tensor[different].tolist() for tensor in some]
    return f"result {miss.place}: {miss.times:.3g} times the limit: {values[0]} for {values[1]}"
