"""Higher-order ops (``cond``, ``map``, ``scan``, ...): their operands become values, their bodies are functionalized.

Limits: a body that writes to an operand is refused by torch's own checks on the bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functionalize._torch import pytree
from functionalize.program import Program


def run(program: Program, purify: Callable[[Any], Any], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a higher-order op on values, with bodies free of mutation."""

    def pure(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return program.value(leaf)
        return purify(leaf) if callable(leaf) else leaf

    call_args, call_kwargs = pytree.tree_map(pure, (tuple(args), kwargs))
    return func(*call_args, **call_kwargs)
