"""Operators that fill a tensor with random numbers: what they draw, and how many numbers.

A kernel that draws element by element fills a part of the elements with the same numbers, if it begins with the state
that the generator has there. How many numbers it draws for an element is measured, once for each kind of call.

Invariant: a count holds for the kernel, on contiguous tensors of the CPU. Limits: calls whose count is not linear in
the number of elements have no count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from functionalize.deferred.random import mersenne
from functionalize.deferred.specs import Spec, spec_of
from functionalize.ops import traits
from functionalize.ops.variants import in_place_of

aten = torch.ops.aten
BLOCK = 16  # elements that the kernel of normal numbers computes together
_SAMPLES = tuple(BLOCK * blocks for blocks in (4, 8, 16))  # two 32-bit numbers for each element fit in one block of 624

_uniform = aten.uniform_.default
_normal = aten.normal_.default
_random = aten.random_.default
_random_to = aten.random_.to
_random_from = getattr(aten.random_, "from")
_BY_ELEMENT = frozenset({_uniform, _normal, _random, _random_to, _random_from})


def _has_own_generator(device: torch.device) -> bool:
    """Whether a device has another generator than the CPU's, which replaces CUDA's on a machine without CUDA."""
    return device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.cuda.is_available())


@dataclass(frozen=True)
class Fill:
    """One call that fills a tensor."""

    op: Any
    args: tuple[Any, ...]
    generator: Any  # a node, or None
    spec: Spec

    def run(self, tensor: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Fill a tensor, or a part of one."""
        filled: torch.Tensor = self.op(tensor, *self.args, generator=generator)
        return filled

    @property
    def in_blocks(self) -> bool:
        """Whether the kernel computes sixteen elements at a time."""
        return self.op is _normal

    @property
    def _counts(self) -> tuple[int, int] | None:
        """How many 32-bit numbers the call draws, as :func:`_law` says; None where a part cannot be drawn alone."""
        if self.op not in _BY_ELEMENT or not self.spec.contiguous or _has_own_generator(self.spec.device):
            return None
        if self.in_blocks and self.spec.numel < BLOCK:
            return None
        return _law(self.op, self.args, self.spec.dtype, self.spec.numel % BLOCK)

    @property
    def per_element(self) -> int | None:
        """How many 32-bit numbers an element takes; None if a part of the elements cannot be drawn alone."""
        return None if self._counts is None else self._counts[0]

    @property
    def draws(self) -> int | None:
        """How many 32-bit numbers the call draws; None if unknown, or if its generator keeps one for later."""
        return None if self._counts is None else self._counts[0] * self.spec.numel + self._counts[1]


def fill_of(node: Node) -> Fill | None:
    """The call that a node makes to fill a tensor, or None."""
    op = traits.FILLS_AS.get(node.target)
    args = () if op is not None else tuple(node.args[1:])
    if node.target in traits.FILLS:
        op = in_place_of(node.target)
    spec = None if op is None else spec_of(node)
    if spec is None:
        return None
    if any(isinstance(arg, Node) for arg in args):
        return None
    return Fill(op, args, node.kwargs.get("generator"), spec)


@cache
def _law(op: Any, args: tuple[Any, ...], dtype: torch.dtype, rest: int) -> tuple[int, int] | None:
    """How many numbers a call draws: for each element, and in addition; None if that is not linear."""
    sizes = [samples + rest for samples in _SAMPLES]
    counts = [_count(op, args, dtype, size) for size in sizes]
    first, second, third = counts
    if first is None or second is None or third is None:
        return None
    slope, remainder = divmod(second - first, sizes[1] - sizes[0])
    if remainder or third - second != slope * (sizes[2] - sizes[1]):
        return None
    return slope, first - slope * sizes[0]


def _count(op: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype, size: int) -> int | None:
    generator = torch.Generator()
    generator.manual_seed(0)
    op(torch.empty(size, dtype=dtype), *args, generator=generator)
    return mersenne.drawn_from_start(generator.get_state())
