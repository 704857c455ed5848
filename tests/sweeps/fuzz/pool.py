"""The tensors that a program under construction has so far, and random choices among them.

Invariant: the tensors are what eager has after the steps so far.
Limits: `Unfit` says that a choice cannot be made.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

Tensor = torch.Tensor


class Unfit(Exception):
    """A kind of step that does not fit the tensors at hand."""


class Pool:
    """Names and tensors of a program under construction."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tensors: dict[str, Tensor] = {}
        self._count = 0

    def new(self) -> str:
        self._count += 1
        return f"v{self._count - 1}"

    def pick(self, fits: Callable[[Tensor], bool] = lambda _: True) -> str:
        """A name whose tensor fits, the recent ones more often."""
        names = [name for name, tensor in self.tensors.items() if fits(tensor)]
        if not names:
            raise Unfit
        return self.rng.choices(names, weights=[1 + position for position in range(len(names))])[0]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def one_of(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def dim(self, tensor: Tensor) -> int:
        need(tensor.dim() > 0)
        dim = self.rng.randrange(tensor.dim())
        return dim - tensor.dim() if self.chance(0.2) else dim

    def index(self, length: int) -> int:
        need(length > 0)
        index = self.rng.randrange(length)
        return index - length if self.chance(0.2) else index

    def number(self, dtype: torch.dtype) -> str:
        if dtype is torch.bool:
            return self.one_of("True", "False", "1", "0")
        return self.one_of("1", "2", "-1", "3", "0") if dtype is not torch.float32 else self.one_of("1", "0.5", "-2")

    def factors(self, numel: int) -> tuple[int, ...]:
        """A shape of so many elements."""
        need(numel > 0)
        shape: list[int] = []
        while numel > 1 and len(shape) < 3:
            divisor = self.rng.choice([n for n in range(1, numel + 1) if numel % n == 0])
            shape.append(divisor)
            numel //= divisor
        return (*shape, numel) if numel > 1 or not shape or self.chance(0.2) else tuple(shape)

    def other(self, like: Tensor) -> str:
        """Another operand that broadcasts to a shape: a tensor, or a part of one, or a fresh one."""
        if self.chance(0.75):
            try:
                return self.pick(lambda t: broadcasts(t.shape, like.shape) and t is not like)
            except Unfit:
                pass
        shape = [n if self.chance(0.7) else 1 for n in like.shape]
        shape = shape[self.rng.randrange(len(shape) + 1) :] if self.chance(0.3) else shape
        total = torch.Size(shape).numel()
        return f"torch.arange({total}).reshape({tuple(shape)})"


def need(condition: bool) -> None:
    if not condition:
        raise Unfit


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(shape, to) == to)
    except RuntimeError:
        return False


def addresses(tensor: Tensor) -> list[int]:
    """The bytes at which a tensor's elements begin."""
    places = [int(tensor.storage_offset())]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    return [place * tensor.itemsize for place in places]


def overlaps_itself(tensor: Tensor) -> bool:
    places = addresses(tensor)
    return len(set(places)) < len(places)


def meet(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have bytes in common."""
    if one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr():
        return False
    first, second = ({place + byte for place in addresses(t) for byte in range(t.itemsize)} for t in (one, two))
    return not first.isdisjoint(second)


def same_place(one: Tensor, two: Tensor) -> bool:
    return (one.shape, one.stride(), one.storage_offset(), one.dtype) == (
        two.shape,
        two.stride(),
        two.storage_offset(),
        two.dtype,
    )
