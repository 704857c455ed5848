"""Programs whose graphs show how a functionalizer grows with the number of writes or the depth of views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH = 4
DEPTH, WRITES = 200, 5


@dataclass(frozen=True)
class Pattern:
    """A family of programs: `build(n)` gives the function, and the input to call it on."""

    name: str
    build: Callable[[int], tuple[Callable[[Tensor], Tensor], Tensor]]
    sizes: tuple[int, ...]


def row_updates(n: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """One base; row after row is updated in place."""

    def program(x: Tensor) -> Tensor:
        base = x.clone()
        for row in range(n):
            base[row].add_(row)
        return base

    return program, torch.zeros(n, WIDTH)


def row_views(n: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """All row views are made first; then each is mutated; then each is read."""

    def program(x: Tensor) -> Tensor:
        base = x.clone()
        views = [base[row] for row in range(n)]
        for view in views:
            view.mul_(2)
        return torch.stack([view.sin() for view in views])

    return program, torch.ones(n, WIDTH)


def view_chain(depth: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A chain of views, five writes through its end, and a read of the base."""

    def program(x: Tensor) -> Tensor:
        base = x.clone()
        view = base
        for step in range(depth):
            view = view.t() if step % 2 else view[:]
        for write in range(WRITES):
            view.add_(write)
        return base.sin()

    return program, torch.ones(WIDTH, WIDTH)


def narrowing_chain(depth: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """As `view_chain`, but each view leaves out the first element."""

    def program(x: Tensor) -> Tensor:
        base = x.clone()
        view = base
        for _ in range(depth):
            view = view[1:]
        for write in range(WRITES):
            view.add_(write)
        return base.sin()

    return program, torch.ones(depth + WIDTH)


PATTERNS = (
    Pattern("row updates of one base", row_updates, (25, 50, 100, 200)),
    Pattern("row views, mutated, read", row_views, (25, 50, 100, 200)),
    Pattern("chain of views, 5 writes", view_chain, (50, 100, DEPTH, 2 * DEPTH)),
    Pattern("narrowing chain, 5 writes", narrowing_chain, (50, 100, DEPTH, 2 * DEPTH)),
)
